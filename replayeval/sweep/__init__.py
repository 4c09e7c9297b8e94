"""Sweeps: plans of many measurements, run unit by unit on one machine or many."""
