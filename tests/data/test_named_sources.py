"""PG-19 and the built-in documents, without a network."""

from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replayeval.data import load_documents, pg19
from replayeval.errors import ConfigError
from replayeval.models.builtin.tokenizer import decode
from tests.data.tokenizers import WORDS, bpe

REAL_LOAD = datasets.load_dataset


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small stand-in for the data set on its hub, streamed by the real library."""
    titles = [f"Title {i}" for i in range(5)]
    table = pa.table(
        {"short_book_title": titles, "publication_date": [1900] * 5, "text": [t + WORDS * 50 for t in titles]}
    )
    pq.write_table(table, tmp_path / "test.parquet")
    asked: dict[str, Any] = {}

    class Hub:
        def dataset_info(self, repository: str, *, revision: str, timeout: float) -> None:
            asked["hub"] = (repository, revision)

    def load_dataset(repository: str, **options: Any) -> Any:
        asked["datasets"] = (repository, options)
        split = options["split"]
        return REAL_LOAD("parquet", data_files={split: str(tmp_path / "test.parquet")}, split=split, streaming=True)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_pg19(mirror: dict[str, Any]) -> None:
    documents = load_documents("pg19", bpe(), docs=2, tokens=100)
    assert [d.name for d in documents] == ["pg19:Title 0", "pg19:Title 1"]
    whole = bpe()("Title 1" + WORDS * 50, add_special_tokens=False, verbose=False)["input_ids"]
    assert documents[1].token_ids.tolist() == whole[:100]
    assert len(pg19.REVISION) == 40
    assert mirror["hub"] == ("emozilla/pg19", pg19.REVISION)
    assert mirror["datasets"] == (
        "emozilla/pg19",
        {"split": "test", "revision": pg19.REVISION, "streaming": True},
    )


def test_pg19_at_another_revision(mirror: dict[str, Any]) -> None:
    load_documents("pg19", bpe(), docs=1, tokens=10, revision="f00")
    assert mirror["datasets"][1]["revision"] == "f00"


def test_pg19_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def dataset_info(self, *_: object, **__: object) -> None:
            raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    with pytest.raises(
        ConfigError, match=r"ConnectionError: Name or service not known\n.*--data FILE.parquet"
    ) as caught:
        load_documents("pg19", bpe(), docs=1, tokens=10)
    assert caught.value.exit_code == 2


def test_pg19_that_breaks_off(mirror: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield {"text": "a text", "short_book_title": "A"}
        raise OSError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    assert len(load_documents("pg19", bpe(), docs=1, tokens=10)) == 1
    with pytest.raises(ConfigError, match="connection reset"):
        load_documents("pg19", bpe(), docs=2, tokens=10)


@pytest.mark.hub
def test_pg19_from_its_hub() -> None:
    documents = load_documents("pg19", bpe(), docs=2, tokens=5000, lengths=[5000])
    assert len({d.doc_id for d in documents}) == 2


def test_builtin_without_a_tokenizer() -> None:
    documents = load_documents("builtin", None, docs=3, tokens=200, seed=1)
    assert [len(d) for d in documents] == [200] * 3
    assert all(((d.token_ids >= 0) & (d.token_ids < 2048)).all() for d in documents)
    again = load_documents("builtin", None, docs=3, tokens=200, seed=1)
    other = load_documents("builtin", None, docs=3, tokens=200, seed=2)
    assert [d.doc_id for d in documents] == [d.doc_id for d in again] != [d.doc_id for d in other]
    assert len(load_documents("builtin", None, docs=None, tokens=50)) == 4


def test_builtin_for_the_tokenizer_of_the_built_in_models() -> None:
    tokenizer_module = pytest.importorskip("replayeval.models.builtin.tokenizer")
    tokenizer = tokenizer_module.build_tokenizer()
    with_tokenizer = load_documents("builtin", tokenizer, docs=2, tokens=300)
    without = load_documents("builtin", None, docs=2, tokens=300)
    assert [d.doc_id for d in with_tokenizer] == [d.doc_id for d in without]


def test_builtin_for_another_tokenizer_is_text() -> None:
    documents = load_documents("builtin", bpe(), docs=2, tokens=300, lengths=[300])
    ours = load_documents("builtin", None, docs=2, tokens=900)
    for document, original in zip(documents, ours, strict=True):
        text = decode(original.token_ids)
        assert text.startswith(str(bpe().decode(document.token_ids.tolist())))
        assert not np.array_equal(document.token_ids, original.token_ids[:300])


def test_english_of_another_tokenizer_is_not_read_twice() -> None:
    documents = load_documents("builtin", bpe(), docs=8, tokens=6000, lengths=[6000])
    english = [str(bpe().decode(document.token_ids.tolist())) for document in documents[1::2]]
    windows = [{text[start : start + 200] for start in range(0, len(text) - 200)} for text in english]
    assert all(windows[i].isdisjoint(windows[j]) for i in range(4) for j in range(i))
    assert all(len(document) == 6000 for document in documents)


def test_builtin_refusals_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="built-in documents"):
        load_documents("builtin", None, docs=1, tokens=10, seed=-1)
