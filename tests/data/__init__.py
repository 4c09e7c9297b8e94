"""Tests of where documents come from."""
