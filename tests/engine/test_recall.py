"""Recall under state policies against the plain model."""

import dataclasses

import numpy as np
import pytest
import torch

from replayeval.engine.forcing import Forcing
from replayeval.engine.recall import recalled_answers
from replayeval.errors import ConfigError
from replayeval.models.builtin import BookStyle, DocumentKind, builtin_corpus
from replayeval.models.builtin.evaluate import answers_right
from replayeval.models.head import OutputHead
from replayeval.models.loading import load_model
from replayssm.policy import Policy

STYLE = BookStyle(tokens_per_fact=150, opening_facts=3)


def arms(*texts: str) -> tuple[Policy, ...]:
    return tuple(Policy.parse(text) for text in texts)


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
@pytest.mark.parametrize("chunk", [97, 1024])
def test_the_reference_recalls_what_the_plain_model_recalls(name: str, chunk: int) -> None:
    loaded = load_model(f"builtin:{name}")
    books = builtin_corpus(2, 700, 3, mixture=(DocumentKind.RECALL,), style=STYLE)
    forcing = Forcing(arms=arms("shared:fp32"), chunk_tokens=chunk)
    answered = recalled_answers(OutputHead(loaded.model), books, forcing)
    for book, found in zip(books, answered, strict=True):
        assert found.doc_id == book.doc_id
        assert found.policies == tuple(str(p) for p in forcing.policies)
        with torch.no_grad():
            greedy = loaded.model(torch.from_numpy(book.ids)[None]).logits[0].argmax(-1).numpy()
        plain = answers_right(book, greedy)
        assert found.right[0].tolist() == plain
        assert found.right[1].tolist() == plain
        assert any(plain), "a model that recalls nothing cannot show a difference"
        # One place further on, the answers of the plain model are others: the comparison can fail.
        assert answers_right(book, np.roll(greedy, 1)) != plain


def test_what_has_no_answers_is_refused() -> None:
    head = OutputHead(load_model("builtin:gdn").model)
    english = builtin_corpus(1, 100, 0, mixture=(DocumentKind.ENGLISH,))
    with pytest.raises(ConfigError, match="asks nothing"):
        recalled_answers(head, english, Forcing(arms=arms("shared:fp32")))
    with pytest.raises(ConfigError, match="without a prompt"):
        recalled_answers(head, [], dataclasses.replace(Forcing(arms=arms("shared:fp32")), prefill_tokens=4))
