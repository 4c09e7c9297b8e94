"""Gated DeltaNet: scalar decay per head, delta-rule write."""
