"""Which weights a name stands for, found without loading them."""

import warnings
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from replayeval.models.loading import load_tokenizer
from replayeval.models.quiet import quiet
from replayeval.models.sources import resolve
from replayeval.models.weights import check_config, check_model_type, fingerprint, weight_files


@dataclass(frozen=True, kw_only=True)
class PinnedModel:
    """A model that can be loaded again as it is now.

    Attributes:
        revision: Commit of the hub repository, or None for local weights.
        weights_sha256: Digest of local weights, or None where `revision` pins them.
        tokenizer: Its tokenizer, or None if it has none.
    """

    revision: str | None
    weights_sha256: str | None
    tokenizer: PreTrainedTokenizerBase | None


def pin_model(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PinnedModel:
    """Find what a model's name stands for. Of a hub model everything but the weights is downloaded.

    Args:
        source: A hub id, a local directory, or `builtin:NAME`.
        revision: Branch, tag or commit of a hub repository.
        trust_remote_code: Allow the tokenizer of the repository to run code from it.

    Raises:
        ConfigError: There is no such model, it is not supported, or its files are damaged.
    """
    with quiet(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = resolve(source, revision, weights=False)
        local = checkpoint.revision is None
        # Whether a hub repository holds weights was checked by the names of its files.
        _ = check_config(checkpoint) if local else check_model_type(checkpoint)
        tokenizer, _ = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code, needed=False)
        digest = fingerprint(checkpoint, weight_files(checkpoint)) if local else None
    return PinnedModel(revision=checkpoint.revision, weights_sha256=digest, tokenizer=tokenizer)
