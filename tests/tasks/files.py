"""Small files in the formats of the public datasets."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def mmlu_pro(folder: Path, count: int = 12) -> Path:
    """A snapshot folder as the hub client leaves it: `data/test-….parquet` beside a validation file."""
    (folder / "data").mkdir(parents=True)
    rows = [
        {
            "question_id": 70 + i,
            "question": f"What is {i} plus one?",
            "options": [str(i + k) for k in range(10)],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "",
            "category": "math",
            "src": "made up",
        }
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "test-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:2]), folder / "data" / "validation-00000-of-00001.parquet")
    return folder


GPQA_COLUMNS = (
    "Record ID",
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
    "High-level domain",
)


def gpqa(file: Path, count: int = 12) -> Path:
    """`gpqa_diamond.csv`."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, GPQA_COLUMNS)
        writer.writeheader()
        for i in range(count):
            values = [f"rec{i}", f"Question, number {i}?\nWith a second line.", f"right {i} ", "a", "b", "c", "Physics"]
            writer.writerow(dict(zip(GPQA_COLUMNS, values, strict=True)))
    return file


def math(folder: Path, count: int = 6) -> Path:
    """The folders of the original archive: one JSON file per problem, all levels."""
    for i in range(count):
        for level in (1, 5):
            file = folder / "test" / "algebra" / f"{i}{level}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            values = {
                "problem": f"Halve ${i}$.",
                "level": f"Level {level}",
                "type": "Algebra",
                "solution": f"It is \\boxed{{1}} no: \\boxed{{\\frac{{{i}}}{{2}}}}.",
            }
            file.write_text(json.dumps(values), encoding="utf-8")
    return folder


def ruler(folder: Path, *, length: int = 4096, names: tuple[str, ...] = ("niah_single_1", "vt", "qa_1")) -> Path:
    """What RULER's prepare.py writes, in its older form (prefix at the end of the input) and its newer one."""
    for name in names:
        file = folder / str(length) / "data" / name / "validation.jsonl"
        file.parent.mkdir(parents=True)
        lines: list[dict[str, Any]] = [
            {"index": 0, "input": "The number is 17. The number is", "outputs": ["17"], "length": 40},
            {"index": 1, "input": "A is 5, B is 6.", "outputs": ["5", "6"], "length": 40, "answer_prefix": " They are"},
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
