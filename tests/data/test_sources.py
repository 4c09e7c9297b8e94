"""Every kind of source, and every way in which it can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replayeval.data import Document, load_documents, make_documents
from replayeval.data.sources import PIECE_BYTES
from replayeval.errors import ConfigError
from tests.data.tokenizers import WORDS, bpe

TEXTS = [f"Book {i}. {WORDS * 3}" for i in range(3)]
IDS = [[1, 2, 3], [4, 5, 6, 7], [8]]


def load(path: Path | str, **options: Any) -> list[Document]:
    defaults: dict[str, Any] = {"docs": None, "tokens": 10**6}
    return load_documents(path, bpe(), **(defaults | options))


def text_ids(text: str) -> list[int]:
    return bpe()(text, add_special_tokens=False, verbose=False)["input_ids"]


def write_txt(path: Path) -> None:
    path.write_bytes(TEXTS[0].encode())


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS) + "\n")


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"title": ["a", "b", "c"], "text": TEXTS}), path)


@pytest.mark.parametrize(
    ("suffix", "write", "count"), [("txt", write_txt, 1), ("jsonl", write_jsonl, 3), ("parquet", write_parquet, 3)]
)
def test_texts(tmp_path: Path, suffix: str, write: Callable[[Path], None], count: int) -> None:
    path = tmp_path / f"books.{suffix}"
    write(path)
    assert [d.token_ids.tolist() for d in load(path)] == [text_ids(text) for text in TEXTS[:count]]
    assert [len(d) for d in load(path, docs=1, tokens=5)] == [5]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.jsonl", lambda p: p.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))),
        ("x.jsonl", lambda p: p.write_text("".join(json.dumps({"tokens": ids, "text": 1}) + "\n" for ids in IDS))),
        ("x.parquet", lambda p: pq.write_table(pa.table({"input_ids": IDS}), p)),
        ("x.parquet", lambda p: pq.write_table(pa.table({"tokens": IDS, "text": ["", "", ""]}), p)),
        ("x.json", lambda p: p.write_text(json.dumps(IDS))),
    ],
)
def test_token_ids(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    documents = load(tmp_path / name)
    assert [d.token_ids.tolist() for d in documents] == IDS
    assert all(d.token_ids.dtype == np.int64 for d in documents)
    assert load_documents(tmp_path / name, None, docs=1, tokens=2)[0].token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_npy(tmp_path: Path, dtype: type) -> None:
    np.save(tmp_path / "x.npy", np.array(IDS[1], dtype=dtype))
    assert [d.token_ids.tolist() for d in load(tmp_path / "x.npy")] == [IDS[1]]
    np.save(tmp_path / "x.npy", np.arange(6, dtype=dtype).reshape(2, 3))
    assert [d.token_ids.tolist() for d in load(tmp_path / "x.npy")] == [[0, 1, 2], [3, 4, 5]]


def test_single_document_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for value in (IDS[0], {"input_ids": IDS[0]}):
        path.write_text(json.dumps(value))
        assert [d.token_ids.tolist() for d in load(path)] == [IDS[0]]


def test_directory_is_sorted_and_recursive(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b/1.txt", "a.txt", "c.txt", ".hidden/0.txt", "b/notes.md"):
        (tmp_path / name).write_text(f"text of {name}")
    assert [d.name for d in load(tmp_path)] == ["a.txt", "b/1.txt", "c.txt"]
    assert [d.name for d in load(tmp_path, docs=2)] == ["a.txt", "b/1.txt"]


def test_later_documents_are_not_even_opened(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"\xff\xff")
    assert len(load(tmp_path, docs=1)) == 1
    with pytest.raises(ConfigError, match=r"b.txt"):
        load(tmp_path, docs=2)


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert load(tmp_path / "x.txt")[0].token_ids.tolist() == text_ids("one\r\ntwo\n")


def test_characters_across_pieces(tmp_path: Path) -> None:
    text = "é" * PIECE_BYTES + " end"
    (tmp_path / "x.txt").write_bytes(b" " + text.encode())
    assert load(tmp_path / "x.txt")[0].token_ids.tolist() == text_ids(" " + text)


@pytest.mark.parametrize("offset", [0, 5, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 7])
def test_offset_of_what_is_no_utf8(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "x.txt"
    filler = ("a " * offset).encode()[:offset]
    path.write_bytes(filler + b"\xe9\x20" + b"rest")
    with pytest.raises(ConfigError, match=rf"UTF-8 text in .*x.txt, got byte 0xe9 at offset {offset};"):
        load(path)
    path.write_bytes(filler + b"\0" + b"rest")
    with pytest.raises(ConfigError, match=rf"binary data: byte 0 at offset {offset}$"):
        load(path)
    # A character that starts in one piece and turns out wrong in the next is where it started.
    path.write_bytes(filler + b"\xe2\x82")
    with pytest.raises(ConfigError, match=rf"got byte 0xe2 at offset {offset};"):
        load(path)


def _npy(array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def _text(text: str | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _parquet(columns: dict[str, Any]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("x.txt", _text(""), "empty file"),
        ("x.txt", _text("  \n"), "nothing but white space"),
        ("x.md", _text("x"), r"\.txt, \.jsonl, \.parquet, \.npy or \.json file or a directory"),
        ("x.jsonl", _text("\n\n"), "blank lines only"),
        ("x.jsonl", _text('{"text": "a"}\n\n{"title": "b"}\n'), r"line 3: .*'text'.*got the keys \['title'\]"),
        ("x.jsonl", _text('{"text": "a"}\n{"text": 5}\n'), "line 2: .*'text' of type int"),
        ("x.jsonl", _text('{"text": "a"}\n{"text": \n'), "line 2: expected a JSON object"),
        ("x.jsonl", _text(b'{"text": "a"}\n{"text": "\xe9"}\n'), "line 2: expected a JSON object in UTF-8"),
        ("x.jsonl", _text('{"text": "a"}\n[1]\n'), "line 2: expected an object with .*, got list"),
        ("x.jsonl", _text('{"text": " "}\n'), "line 1: expected text"),
        ("x.jsonl", _text('{"text": "a\\ud800"}\n'), "line 1: character 1 is a lone surrogate"),
        ("x.jsonl", _text('{"input_ids": [1, 2.5]}\n'), "line 1, 'input_ids': .*integers, got float64"),
        ("x.jsonl", _text('{"input_ids": [true]}\n'), "integers, got bool"),
        ("x.jsonl", _text('{"input_ids": [[1], [2]]}\n'), "flat list of token ids, got 2 dimensions"),
        ("x.jsonl", _text('{"input_ids": [[1], [2, 3]]}\n'), "flat list of token ids"),
        ("x.jsonl", _text('{"input_ids": []}\n'), "got none"),
        ("x.jsonl", _text('{"input_ids": ["a"]}\n'), "integers, got <U1"),
        ("x.json", _text("{"), "expected JSON"),
        ("x.json", _text("3"), "expected an object"),
        ("x.json", _text("[]"), "got none"),
        ("x.json", _text("[[1], []]"), r"\[1\]: expected token ids, got none"),
        ("x.npy", _text("no array"), "NumPy's format"),
        ("x.npy", _npy(np.zeros(3, np.float32)), "integers, got float32; store them as int32 or int64"),
        ("x.npy", _npy(np.zeros((1, 1, 1), np.int64)), "got 3 dimensions"),
        ("x.npy", _npy(np.array([{}], dtype=object)), "NumPy's format"),
        ("x.npy", _npy(np.array([2**63], dtype=np.uint64)), "does not fit 64 bits"),
        (
            "x.npy",
            _npy(np.array([1, 2, 400])),
            r"token 2 has the id 400, outside the vocabulary of \d{3} ids \(0 to",
        ),
        ("x.npy", _npy(np.array([1, -2])), "token 1 has the id -2"),
        ("x.parquet", _text("no table"), "expected a Parquet file"),
        ("x.parquet", _parquet({"title": ["a"]}), r"expected a column 'text'.*got \['title'\]"),
        ("x.parquet", _parquet({"text": ["a", None]}), "row 1: .*'text' of type NoneType"),
        ("x.parquet", _parquet({"text": pa.array([], pa.string())}), "no rows"),
        ("x.parquet", _parquet({"input_ids": [[1.5]]}), "row 0, 'input_ids': .*float64"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, write: Callable[[Path], Any], words: str) -> None:
    write(tmp_path / name)
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path / name)
    assert name in str(caught.value) and caught.value.exit_code == 2
    if name != "x.md":
        with pytest.raises(ConfigError, match=words):
            load(tmp_path)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found none"):
        load(tmp_path)


def test_missing_path_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "books.jsonl").touch()
    with pytest.raises(ConfigError, match=r"did you mean .*books.jsonl\?"):
        load(tmp_path / "book.jsonl")
    with pytest.raises(ConfigError, match=r"did you mean pg19\?"):
        load("pg-19")
    with pytest.raises(ConfigError, match="check the path"):
        load(tmp_path / "absent" / "thing")


@pytest.mark.parametrize(("options", "words"), [({"docs": 0}, "--docs 0"), ({"tokens": 0}, "1 token per document")])
def test_counts_are_checked_first(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("absent", **options)


def test_short_documents_are_kept_for_the_lengths_they_reach(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(IDS))
    assert [len(d) for d in load(tmp_path / "x.json", tokens=5, lengths=[1, 4])] == [3, 4, 1]
    with pytest.raises(ConfigError, match=r"reaches the length 5: the longest of 3, x.json:1, decodes 4"):
        load(tmp_path / "x.json", tokens=5, lengths=[1, 5])


def test_the_model_decides_the_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1, 450]))
    assert len(load(tmp_path / "x.npy", vocab_size=451)) == 1
    with pytest.raises(ConfigError, match="vocabulary of 450 ids"):
        load(tmp_path / "x.npy", vocab_size=450)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match="no tokenizer; give token ids"):
        load_documents(tmp_path / "x.txt", None, docs=1, tokens=5)


def test_documents_in_memory() -> None:
    document = Document(name="mine", token_ids=np.array([5, 6]))
    made = make_documents([TEXTS[0], [1, 2], np.array([3], np.int32), document], bpe(), tokens=1000)
    assert [d.token_ids.tolist() for d in made] == [text_ids(TEXTS[0])[:1000], [1, 2], [3], [5, 6]]
    assert [d.name for d in made] == ["documents[0]", "documents[1]", "documents[2]", "mine"]
    for wrong in ("a text", []):
        with pytest.raises(ConfigError, match="list of documents"):
            make_documents(wrong, bpe(), tokens=5)
    with pytest.raises(ConfigError, match=r"documents\[1\]: expected text"):
        make_documents(["a", ""], bpe(), tokens=5)


def test_identity_is_of_the_tokens_alone() -> None:
    same = [Document(name=name, token_ids=np.array([1, 2])) for name in "ab"]
    other = Document(name="a", token_ids=np.array([1, 3]))
    assert same[0].doc_id == same[1].doc_id != other.doc_id
    # The digest of the bytes 1, 2 as 64-bit little-endian integers, from sha256sum.
    assert same[0].doc_id == "0c730b69905c5ef7a4ca5269f72365400bde2dd2c04eaf9bbb3d1c4a265a0131"
