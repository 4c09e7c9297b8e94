"""Tokenizers to test with: a trained BPE and one whose tokens depend on the end of the text."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "It was the best of times, it was the worst of times; it was the age of wisdom... "
    "“Quoted,” she said — naïvely — and\r\n\r\n  indented   text\tfollowed. 1234567 numbers, don't they? "
)


class Counting:
    """Passes texts on to a tokenizer and counts their characters."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.characters = inner, 0
        self.bos_token_id = getattr(inner, "bos_token_id", None)

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.inner(text, **options)

    def __len__(self) -> int:
        return len(self.inner)


class LookingBack:
    """One token per word, each a hash of its word and of how the text around it ends: a prefix tells nothing."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [(len(text) + len(word)) % 1000 for word in text.split()]}

    def __len__(self) -> int:
        return 1000


@cache
def bpe(*, regex: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a few sentences; without the regex, merges run across words."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS * 20], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=64)
