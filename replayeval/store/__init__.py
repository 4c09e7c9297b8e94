"""Runs on disk: per-token scores, the stores that hold them, and where they come from. Never loads torch."""

from replayeval.store.identity import RunIdentity, weights_sha256
from replayeval.store.manifest import RunManifest
from replayeval.store.provenance import provenance
from replayeval.store.run import RunDirectory
from replayeval.store.scores import DocumentScores

__all__ = ["DocumentScores", "RunDirectory", "RunIdentity", "RunManifest", "provenance", "weights_sha256"]
