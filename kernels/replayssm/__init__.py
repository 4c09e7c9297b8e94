"""replayssm: state numerics of Mamba-2, Gated DeltaNet and Kimi Delta Attention layers under replay.

A recurrent state is kept as a *checkpoint* (one or two stored copies) and a buffer of *records* (the inputs of the
tokens since). This package holds the storage formats, the recurrences in their token-by-token and window forms, the
state policies, and the bank that advances every state of a run. It needs PyTorch and nothing above it.
"""

NUMERICS_VERSION = 4
"""Raised whenever a change of this package may change a number that it computes for the same input."""
