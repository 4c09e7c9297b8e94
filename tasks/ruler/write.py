"""Write the task files of RULER: one per task and length, and a group per length. Run it in this folder."""

from pathlib import Path

LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}
NIAH = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
# Tokens that RULER lets each task generate.
OUTPUT_TOKENS = {**{f"niah_{n}": 128 for n in NIAH}, "vt": 30, "cwe": 120, "fwe": 50, "qa_squad": 32, "qa_hotpot": 32}


def contents() -> dict[str, str]:
    """Return the text of every file by its name."""
    files: dict[str, str] = {}
    for label, length in LENGTHS.items():
        for kind, tokens in OUTPUT_TOKENS.items():
            score = "process_results: !function replayeval.tasks.ruler.any_match\n" if kind.startswith("qa") else ""
            files[f"{label}_{kind}.yaml"] = (
                f"include: _all\ntask: replayeval_ruler_{label}_{kind}\n{score}generation_kwargs:\n  until: []\n"
                f"  do_sample: false\n  temperature: 0.0\n  max_gen_toks: {tokens}\n"
                f"metadata:\n  version: 1\n  generated: true\n  chat: true\n  kind: {kind}\n  length: {length}\n"
            )
        members = "".join(f"  - replayeval_ruler_{label}_{kind}\n" for kind in OUTPUT_TOKENS)
        files[f"{label}.yaml"] = (
            f"group: replayeval_ruler_{label}\ntask:\n{members}aggregate_metric_list:\n"
            "  - metric: string_match\n    weight_by_size: true\nmetadata:\n  version: 1\n"
        )
    groups = "".join(f"  - replayeval_ruler_{label}\n" for label in LENGTHS)
    files["ruler.yaml"] = f"group: replayeval_ruler\ntask:\n{groups}metadata:\n  version: 1\n"
    return files


if __name__ == "__main__":
    for name, text in contents().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
