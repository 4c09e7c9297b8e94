"""RULER at any length: lm-eval's own generators, one length and any number of samples per task, reproducibly.

lm-eval's tasks make 500 samples at every length that they are given, from Python's global random state, and `--limit`
then takes the shortest. Here a task has one length, as many samples as are wanted, and seeds of its own.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from replayeval.errors import ConfigError
from replayeval.tasks.sources import Row, local_rows

LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}
SAMPLES = 500
"""Samples per task and length, as in the paper."""

_NIAH_TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
_NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_2": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_k": 4,
    },
    "niah_multikey_2": {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_v": 4,
    },
    "niah_multiquery": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_q": 4,
    },
}
_OTHERS = {"vt": "vt", "cwe": "cwe", "fwe": "fwe", "qa_squad": "qa_1", "qa_hotpot": "qa_2"}
KINDS = {**{name: name for name in _NIAH}, **_OTHERS}
"""Tasks, with the name that RULER itself gives each."""


def ruler(
    *,
    kind: str,
    length: int,
    data: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    pretrained: str | None = None,
    samples: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the samples of one RULER task at one length.

    Args:
        kind: One of `KINDS`.
        length: Length of a sample in tokens, the output included.
        data: Folders of samples that RULER's scripts wrote, under the name `ruler`.
        tokenizer: The model's tokenizer, or its name; it measures the lengths.
        pretrained: The model's name, which gives the tokenizer where none is named.
        samples: How many; the first `n` do not depend on it.

    Raises:
        ConfigError: No such task, no tokenizer, a package or a text is missing, or the length is too short.

    Source: Hsieh et al. 2024, RULER; generators of `lm_eval.tasks.ruler`.
    """
    if kind not in KINDS:
        raise ConfigError(f"ruler: expected a task among {', '.join(KINDS)}, got {kind!r}.")
    if data is not None and "ruler" in data:
        rows = _written_samples(Path(data["ruler"]), kind, length)
    else:
        rows = _generated(kind, length, _tokenizer(tokenizer or pretrained), samples or SAMPLES)
    wanted = rows if samples is None else rows[:samples]
    return {"test": cast(Any, datasets).Dataset.from_list(wanted)}


def all_matches(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the share of expected strings that occur in the output, in any case."""
    output = results[0].lower()
    return {"string_match": sum(expected.lower() in output for expected in doc["outputs"]) / len(doc["outputs"])}


def any_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return whether one of the accepted answers occurs in the output, in any case."""
    output = results[0].lower()
    return {"string_match": float(any(expected.lower() in output for expected in doc["outputs"]))}


def _tokenizer(named: Any) -> Any:
    if named is None:
        raise ConfigError(
            "ruler: expected a tokenizer to measure lengths with, got none; give the model's name, or its samples as "
            "files: --task-data ruler=FOLDER."
        )
    if not isinstance(named, str):
        return named
    from transformers import AutoTokenizer

    from replayeval.models.sources import resolve

    return cast(Any, AutoTokenizer).from_pretrained(resolve(named).directory)


def _written_samples(folder: Path, kind: str, length: int) -> list[Row]:
    """Read what RULER's `prepare.py` wrote: `LENGTH/data/TASK/validation.jsonl`, also without `data`."""
    name = KINDS[kind]
    found = [
        folder / part / name / "validation.jsonl"
        for part in (f"{length}/data", f"{length}", f"synthetic/{length}/data")
        if (folder / part / name / "validation.jsonl").is_file()
    ]
    if not found:
        raise ConfigError(
            f"ruler: expected {length}/data/{name}/validation.jsonl below {folder}, got no such file. Write it with "
            "RULER's prepare.py, or leave --task-data out to generate samples."
        )
    rows: list[Row] = []
    for row in local_rows(found[0], split="validation", name="ruler"):
        if not isinstance(row.get("input"), str) or not row.get("outputs"):
            raise ConfigError(f"ruler: expected `input` and `outputs` in every line of {found[0]}.")
        # Newer versions keep the start of the answer apart from the input; older ones end the input with it.
        prefix = str(row.get("answer_prefix") or row.get("gen_prefix") or "").strip()
        rows.append({"input": row["input"], "outputs": [str(o) for o in row["outputs"]], "gen_prefix": prefix})
    return rows


def _generated(kind: str, length: int, tokenizer: Any, samples: int) -> list[Row]:
    try:
        with _own_random_state():
            # Importing them draws random numbers too, the first time.
            generate = _niah_generator(kind) if kind in _NIAH else _other_generator(kind)
            random.seed(f"{kind}/{length}")
            np.random.seed(random.getrandbits(32))  # noqa: NPY002
            rows = generate(tokenizer, length, samples)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"ruler: {error}; install it with `pip install 'lm_eval[ruler]'`.") from None
    except Exception as error:  # of the network, of NLTK's data, or of a length too short for the task
        raise ConfigError(
            f"ruler: {kind} at {length} tokens cannot be generated ({type(error).__name__}: {str(error)[:200]}). Texts "
            "for it come from the network; files that RULER's prepare.py wrote do without: --task-data ruler=FOLDER."
        ) from None
    return [{key: row[key] for key in ("input", "outputs", "gen_prefix")} for row in rows]


_Generator = Callable[[Any, int, int], list[Row]]


def _niah_generator(kind: str) -> _Generator:
    module = _niah_module(sentences=_NIAH[kind]["type_haystack"] == "essay")

    def generate(tokenizer: Any, length: int, samples: int) -> list[Row]:
        options = _NIAH[kind]
        return module.generate_samples(
            module.get_haystack(type_haystack=options["type_haystack"]),
            TOKENIZER=tokenizer,
            max_seq_length=length,
            template=_NIAH_TEMPLATE,
            num_samples=samples,
            **options,
        )

    return generate


def _fetch_nothing(*_: object) -> bool:
    return True


def _niah_module(*, sentences: bool) -> Any:
    """Import lm-eval's needles without the data to cut sentences with, which it fetches and only essays need."""
    import nltk  # pyright: ignore[reportMissingTypeStubs]

    fetch = nltk.download  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        # Without a network the attempt takes a minute.
        nltk.download = _fetch_nothing
        from lm_eval.tasks.ruler import prepare_niah  # pyright: ignore[reportMissingTypeStubs]
    finally:
        nltk.download = fetch
    module: Any = prepare_niah
    if sentences:
        module.download_nltk_resources()
    return module


def _other_generator(kind: str) -> _Generator:
    from lm_eval.tasks.ruler import (  # pyright: ignore[reportMissingTypeStubs]
        cwe_utils,
        fwe_utils,
        qa_utils,
        vt_utils,
    )

    vt, cwe, fwe, qa = (cast(Any, module) for module in (vt_utils, cwe_utils, fwe_utils, qa_utils))

    def variables(tokenizer: Any, length: int, samples: int) -> list[Row]:
        # RULER's worked example has 500 tokens. Where a token is a byte it needs more.
        room = max(500, 2 * _smallest(tokenizer, lambda: vt.generate_input_output(5, 1, 4, is_icl=True)[0]))
        example = vt.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=1, max_seq_length=room, incremental=5
        )[0]
        needed = room + 2 * _smallest(tokenizer, lambda: vt.generate_input_output(10, 1, 4)[0])
        _check_room(kind, length, needed)
        return vt.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=samples, max_seq_length=length, icl_example=example
        )

    def common_words(tokenizer: Any, length: int, samples: int) -> list[Row]:
        cwe.RNG.seed(42)
        needed = 120 + _smallest(tokenizer, lambda: cwe.generate_input_output(10, length)[1])
        _check_room(kind, length, round(1.1 * needed))
        return cwe.sys_word_pair_random(num_samples=samples, max_seq_length=length, tokenizer=tokenizer)

    def frequent_words(tokenizer: Any, length: int, samples: int) -> list[Row]:
        return fwe.sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=samples)

    def questions(tokenizer: Any, length: int, samples: int) -> list[Row]:
        pairs, texts = qa.read_squad() if kind == "qa_squad" else qa.read_hotpotqa()
        return qa.generate_samples(
            tokenizer=tokenizer, docs=texts, qas=pairs, max_seq_length=length, num_samples=samples
        )

    return {"vt": variables, "cwe": common_words, "fwe": frequent_words}.get(kind, questions)


def _smallest(tokenizer: Any, make: Callable[[], str]) -> int:
    return len(tokenizer(make()).input_ids)


def _check_room(kind: str, length: int, needed: int) -> None:
    """Refuse what the generators of lm-eval would try for ever."""
    if needed > length:
        raise ConfigError(
            f"ruler: {kind} needs about {needed} tokens of this tokenizer, got a length of {length}; take a longer one."
        )


@contextmanager
def _own_random_state() -> Generator[None]:
    """Give the caller's global random states back, which the generators draw from."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
