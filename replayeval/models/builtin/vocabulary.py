"""Learn the built-in tokenizer again: `python -m replayeval.models.builtin.vocabulary` writes `data/tokenizer.json`.

It is learned from the training text and the sentences of recall books, whose words come out as single tokens.
"""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from replayeval.models.builtin import words
from replayeval.models.builtin.text import training_english
from replayeval.models.builtin.tokenizer import SPECIALS, TOKENIZER_FILE, VOCAB_SIZE

# Often enough that each word becomes one token.
_REPEATS = 200
# One digit, one word with the space before it, marks, other spaces: no token crosses from one into another.
_PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def learn_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Learn the vocabulary.

    Args:
        texts: Texts in the proportions that count.

    Returns:
        The tokenizer, the same for the same texts.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = Sequence(
        [Split(Regex(_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def vocabulary_texts() -> Iterator[str]:
    """Yield the training text, and every word of the books in each place that it takes."""
    yield from training_english().chapter_texts
    for name in words.NAMES:
        yield f"The number of {name} is 1. Ask {name}: 1." * _REPEATS
    for noun in words.NOUNS:
        yield f"Record {noun} holds. Look up record {noun}:" * _REPEATS
    for variable in words.VARIABLES:
        yield f"VAR {variable} = 1. The value of VAR {variable} is 1." * _REPEATS
    for adjective, noun in zip(words.ADJECTIVES, words.NOUNS, strict=True):
        yield (
            f"One of the special magic numbers for {adjective}-{noun} is: 1. "
            f"What is the special magic number for {adjective}-{noun} mentioned in the provided text? "
        ) * _REPEATS
    for line in words.NOISE:
        yield f" {line}" * _REPEATS


if __name__ == "__main__":
    target = Path(__file__).parent / "data" / TOKENIZER_FILE
    learn_tokenizer(vocabulary_texts()).save(str(target))
    print(target)
