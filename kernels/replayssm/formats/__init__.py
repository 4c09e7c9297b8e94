"""Storage formats of recurrent states: what a stored number is, how it is scaled and rounded, and its bytes."""

from replayssm.formats.cast import store_and_load, store_and_load_with_feedback
from replayssm.formats.elements import ElementSpec, ElementType, Overflow, decode_table
from replayssm.formats.format import NAMED_FORMATS, Format, Granularity, NamedFormat, Rounding, ScaleType
from replayssm.formats.packing import PackedState, pack, pack_with_feedback
from replayssm.formats.philox import random_bits

__all__ = [
    "NAMED_FORMATS",
    "ElementSpec",
    "ElementType",
    "Format",
    "Granularity",
    "NamedFormat",
    "Overflow",
    "PackedState",
    "Rounding",
    "ScaleType",
    "decode_table",
    "pack",
    "pack_with_feedback",
    "random_bits",
    "store_and_load",
    "store_and_load_with_feedback",
]
