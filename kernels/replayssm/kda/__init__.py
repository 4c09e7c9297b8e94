"""Kimi Delta Attention: one decay per key channel, delta-rule write."""
