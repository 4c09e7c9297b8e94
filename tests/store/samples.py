"""Scores and manifests to store, the same in every process."""

import sys
from typing import Any

import numpy as np

from replayeval.store import DocumentScores, RunDirectory, RunIdentity, RunManifest

ARMS = ("shared:fp8[tile=32,max=3.5]@L=16", "separate:nvfp4/fp16+sr@L=32")
DOCUMENTS = 3
TOKENS = 50
DIVERGED_AT = 21


def sample_scores(index: int, **changes: Any) -> DocumentScores:
    """Scores of one document, in which the second arm diverged at generation length 21."""
    generator = np.random.default_rng(index)
    kl, nll = generator.random((2, TOKENS)), generator.random((2, TOKENS))
    reference, agrees = generator.random(TOKENS), generator.random((2, TOKENS)) < 0.9
    reference[-1] = nll[:, -1] = np.nan
    kl[1, DIVERGED_AT - 1 :] = nll[1, DIVERGED_AT - 1 :] = np.nan
    agrees[1, DIVERGED_AT - 1 :] = False
    fields: dict[str, Any] = {
        "doc_index": index,
        "doc_id": f"document-{index}",
        "prefill_tokens": 4,
        "arms": ARMS,
        "kl_nats": kl,
        "nll_nats": nll,
        "nll_reference_nats": reference,
        "top1_agrees": agrees,
        "diverged_at": (None, DIVERGED_AT),
        "counters": {"seconds": 1.5},
    }
    return DocumentScores(**(fields | changes))


def sample_identity(**changes: Any) -> RunIdentity:
    """What decides the numbers of the sample run."""
    fields: dict[str, Any] = {
        "kind": "kl",
        "model": "org/model",
        "revision": "abc",
        "weights_sha256": None,
        "reference": "conventional:fp32",
        "arms": ARMS,
        "data": "books.txt",
        "documents": tuple(f"document-{index}" for index in range(DOCUMENTS)),
        "lengths": (25, 50),
        "prefill_tokens": 4,
        "seed": 7,
        "engine": "chunk",
        "dtype": "bfloat16",
        "window_tokens": 16,
        "extra": {"numerics": "1"},
    }
    return RunIdentity(**(fields | changes))


def sample_manifest(**changes: Any) -> RunManifest:
    """The manifest of the sample run."""
    return RunManifest.start(sample_identity(**changes), provenance={"device": "cpu"})


def work(path: str) -> None:
    """Do what a process does that starts or resumes the sample run."""
    with RunDirectory.create(path, manifest=sample_manifest(), resume=True) as run:
        for index in range(DOCUMENTS):
            if not run.has(index):
                run.write(sample_scores(index))
        run.finish(results={"checks": []})


if __name__ == "__main__":
    work(sys.argv[1])
