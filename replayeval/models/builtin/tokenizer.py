"""The byte tokenizer: token id = byte value, and a few special tokens above."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 264
_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    moved = (byte for byte in range(256) if byte not in alphabet)
    alphabet |= {byte: chr(256 + offset) for offset, byte in enumerate(moved)}
    return [alphabet[byte] for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer. It adds no token on its own, so text of n UTF-8 bytes is n tokens.

    Returns:
        A fast tokenizer whose ids 0 to 255 are the bytes.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    reserved = [f"<|reserved_{index}|>" for index in range(VOCAB_SIZE - 256 - len(_SPECIALS))]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*_SPECIALS, *reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_SPECIALS[0],
        eos_token=_SPECIALS[1],
        pad_token=_SPECIALS[2],
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files into a model directory."""
    build_tokenizer().save_pretrained(directory)
