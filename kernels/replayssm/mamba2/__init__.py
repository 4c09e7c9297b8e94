"""Mamba-2: scalar decay per head, additive write."""
