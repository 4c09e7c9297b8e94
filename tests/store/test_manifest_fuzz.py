"""Whatever stands in a manifest, opening the run either works or says in one message what is wrong."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from replayeval.errors import StoreError
from replayeval.store.manifest import MANIFEST, RunManifest, read_manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
VALID = {
    "schema": "replayeval.run/1",
    "fingerprint": "",
    "identity": {},
    "documents": 1,
    "attempts": [],
    "finished": None,
    "results": {},
}


def read_back(directory: Path, content: bytes) -> RunManifest | None:
    (directory / MANIFEST).write_bytes(content)
    try:
        return read_manifest(directory)
    except StoreError as error:
        assert str(error)
        return None


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_random_bytes(tmp_path_factory: object, content: bytes) -> None:
    assert read_back(_directory(tmp_path_factory), content) is None


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(sorted(VALID)), value=JSON)
def test_one_field_of_another_kind(tmp_path_factory: object, key: str, value: object) -> None:
    found = read_back(_directory(tmp_path_factory), json.dumps(VALID | {key: value}).encode())
    assert found is None, "a manifest whose fingerprint does not fit was accepted"


@settings(max_examples=60, deadline=None)
@given(value=JSON)
def test_a_fitting_fingerprint_does_not_excuse_fields_of_another_kind(tmp_path_factory: object, value: object) -> None:
    good = RunManifest(identity={"kind": "kl"}, documents=1)
    for key in ("documents", "attempts", "finished", "results"):
        changed = good.to_json() | {key: value}
        found = read_back(_directory(tmp_path_factory), json.dumps(changed).encode())
        if found is not None:
            assert isinstance(found.documents, int) and isinstance(found.attempts, tuple)
            assert found.finished is None or isinstance(found.finished, str)
            assert isinstance(found.results, dict)


def _directory(factory: object) -> Path:
    from pytest import TempPathFactory

    assert isinstance(factory, TempPathFactory)
    return factory.mktemp("run")
