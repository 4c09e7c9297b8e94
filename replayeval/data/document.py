"""A document: token ids with a name and an identity."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from replayeval.arrays import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One text as token ids; documents are never joined.

    Attributes:
        name: Where it came from, for messages and tables.
        token_ids: Token ids from the beginning of the text, BOS included where the tokenizer adds one.
    """

    name: str
    token_ids: Int64[Array[np.int64], " time"]

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.token_ids.shape[0])

    @cached_property
    def doc_id(self) -> str:
        """SHA-256 over the token ids as little-endian 64-bit integers, in hexadecimal."""
        return hashlib.sha256(self.token_ids.astype("<i8").tobytes()).hexdigest()
