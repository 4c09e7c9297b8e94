"""`replayeval formats`: the named storage formats, and what one format text means."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replayeval.cli import values
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayssm.formats import Format

EXAMPLES = """\b
Examples:
  replayeval formats --shape 64,64,128
  replayeval formats 'fp8[tile=32,max=240]+sr'
"""
DEFAULT_SHAPE = "32,128,128"


def run(
    text: Annotated[str | None, typer.Argument(metavar="[FORMAT]", help="A format to explain.")] = None,
    shape: Annotated[
        str, typer.Option(metavar="heads,d_v,d_k", help="State of one layer, for the bits per element.")
    ] = DEFAULT_SHAPE,
) -> None:
    """List the named storage formats of a state, or explain one."""
    heads, d_v, d_k = values.shape(shape)
    if text is None:
        _list(heads=heads, d_v=d_v, d_k=d_k)
    else:
        _explain(text, heads=heads, d_v=d_v, d_k=d_k)


def _list(*, heads: int, d_v: int, d_k: int) -> None:
    from replayssm.formats import NAMED_FORMATS

    table = Table(
        box=box.SIMPLE_HEAD, title=f"Formats for a state of {heads} heads, d_v {d_v}, d_k {d_k}", title_justify="left"
    )
    table.add_column("format", no_wrap=True)
    table.add_column("bits/element", justify="right")
    table.add_column("what it is", overflow="fold")
    table.add_column("also called", overflow="fold")
    for name, entry in NAMED_FORMATS.items():
        try:
            bits = f"{entry.format.bits_per_element(heads=heads, d_v=d_v, d_k=d_k):.5g}"
        except ValueError:
            bits = "does not fit"
        table.add_row(name, bits, Text(entry.summary), ", ".join(entry.aliases))
    console = Console()
    console.print(table)
    console.print(
        Text(
            "Append +sr for stochastic rounding. Options in brackets: tensor, head, row, tile=N or block=N (who shares "
            "a scale), max=X (its divisor), scale=TYPE, ef=FORMAT (error feedback)."
        )
    )


def _explain(text: str, *, heads: int, d_v: int, d_k: int) -> None:
    from replayssm.formats import Format

    try:
        form = Format.parse(text)
        bits = form.bits_per_element(heads=heads, d_v=d_v, d_k=d_k)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, meaning in (
        ("canonical text", str(form)),
        ("payload", _payload(form)),
        ("scale", _scale(form)),
        ("rounding", "stochastic, from counter-based random bits" if _stochastic(form) else "to nearest, ties to even"),
        ("error feedback", "none" if form.error_feedback is None else f"kept as {form.error_feedback}"),
        ("bits per element", f"{bits:.6g} at {heads} heads, d_v {d_v}, d_k {d_k}"),
        ("bytes per layer", f"{round(bits * heads * d_v * d_k / 8):,} per sequence"),
    ):
        table.add_row(name, Text(meaning))
    Console().print(table)


def _stochastic(form: "Format") -> bool:
    from replayssm.formats import Rounding

    return form.rounding is Rounding.STOCHASTIC


def _payload(form: "Format") -> str:
    spec = form.spec
    kind = (
        "two's complement integer, symmetric range"
        if spec.is_integer
        else f"1 sign, {spec.exponent_bits} exponent and {spec.mantissa_bits} fraction bits"
    )
    return f"{form.element}: {spec.bits} bits, {kind}; largest value {spec.largest:g}, beyond it {_overflow(form)}"


def _overflow(form: "Format") -> str:
    return "infinity" if form.spec.overflow == "infinite" else "saturation"


def _scale(form: "Format") -> str:
    if not form.is_scaled:
        return "none"
    group = {
        "tensor": "sequence (all heads)",
        "head": "head",
        "row": "row (head and value)",
        "tile": f"{form.group} value rows x all keys",
        "block": f"block of {form.group} keys",
    }[form.granularity.value]
    also = ", over one float32 scale per head" if form.scale.value == "e4m3" else ""
    return f"{form.scale} per {group}: largest magnitude / {form.divisor:g}{also}"
