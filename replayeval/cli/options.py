"""Options that several commands share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from replayeval.cli import values
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayssm.policy import Policy

DEFAULT_MODEL = "builtin:gdn"
DEFAULT_PRECISION = "nvfp4"

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="MODEL", help=f"Hub id, directory, or builtin:NAME (see `replayeval models`). Default {DEFAULT_MODEL}."
    ),
]
Precision: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="P[,P...]",
        help="Formats; each stands for shared:fp32 (control), shared:P, shared:P+sr, separate:P/fp32 and "
        f"separate:P/fp16+sr. Default {DEFAULT_PRECISION}, unless --arm is given.",
    ),
]
Arm: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="POLICY", help="One state policy, such as conventional:bf16 or shared:fp8[tile=32]+sr; repeatable."
    ),
]
Data: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="pg19|FILE|DIR|builtin", help="The text to force. Default builtin for a built-in model, else pg19."
    ),
]
Window: TypeAlias = Annotated[str, typer.Option(metavar="N", help="Replay window in tokens, 1 to 128.")]
Chunk: TypeAlias = Annotated[str, typer.Option(metavar="N", help="Tokens per forward pass of the chunk engine.")]
Dtype: TypeAlias = Annotated[
    str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Precision of the weights.")
]
Device: TypeAlias = Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to run.")]
Json: TypeAlias = Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the record as JSON; - is stdout.")]
Revision: TypeAlias = Annotated[
    str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit of a hub model.")
]
TrustRemoteCode: TypeAlias = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code from its repository.")
]


def window_tokens(text: str) -> int:
    """Return the window of `--window`.

    Raises:
        ConfigError: Not a whole number within the limits of a window.
    """
    from replayssm.policy import MAX_WINDOW

    return values.integer(text, option="--window", least=1, most=MAX_WINDOW)


def arms(precision: str | None, texts: Sequence[str], *, window: int) -> "list[Policy]":
    """Return the policies that `--precision` and `--arm` name together, each once.

    Raises:
        ConfigError: One of them is no format or no policy.
    """
    from replayssm.policy import Policy, precision_arms

    if precision is None and not texts:
        precision = DEFAULT_PRECISION
    named: Sequence[str] = () if precision is None else values.split_list(precision, option="--precision")
    written = [part for text in texts for part in values.split_list(text, option="--arm")]
    found: list[Policy] = []
    option = "--precision"
    try:
        for name in named:
            found.extend(precision_arms(name, window=window))
        option = "--arm"
        found.extend(Policy.parse(text, default_window=window) for text in written)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    return list(dict.fromkeys(found))
