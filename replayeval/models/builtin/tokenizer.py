"""The tokenizer of the built-in models and documents: a small byte-level BPE, learned by `vocabulary.py`."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
BOS_ID, EOS_ID, PAD_ID = range(3)
VOCAB_SIZE = 2048
TOKENIZER_FILE = "tokenizer.json"


@functools.cache
def _backend() -> Tokenizer:
    packed = importlib.resources.files(__package__ or __name__).joinpath("data", TOKENIZER_FILE)
    return Tokenizer.from_str(packed.read_text(encoding="utf-8"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer. It adds no token on its own, and decoding gives the text back.

    Returns:
        A fast tokenizer.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        pad_token=SPECIALS[2],
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files into a model directory."""
    build_tokenizer().save_pretrained(directory)


@functools.lru_cache(maxsize=1 << 17)
def _encode_word(word: str) -> tuple[int, ...]:
    return tuple(_backend().encode(word).ids)


def encode(text: str) -> list[int]:
    """Return the token ids of a text, as the tokenizer gives them; fast on words that were seen before.

    Args:
        text: Any text. No token crosses a space that stands before a word, so words can be looked up one by one.
    """
    first, *others = text.split(" ")
    ids = list(_encode_word(first))
    if "" in others[:-1]:
        # Of several spaces in a row only the last belongs to a word.
        return list(_backend().encode(text).ids)
    for word in others:
        ids += _encode_word(f" {word}")
    return ids


def decode(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """Return the text of token ids; bytes that are no UTF-8, cut at the ends, are left out."""
    return b"".join(token_bytes()[i] for i in ids).decode("utf-8", errors="ignore")


@functools.cache
def token_bytes() -> tuple[bytes, ...]:
    """Return the bytes of every token; specials have none."""
    bytes_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = _backend()
    names = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size())]
    return tuple(b"" if n in SPECIALS else bytes(bytes_of[c] for c in n) for n in names)


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    moved = (byte for byte in range(256) if byte not in alphabet)
    alphabet |= {byte: chr(256 + offset) for offset, byte in enumerate(moved)}
    return [alphabet[byte] for byte in range(256)]
