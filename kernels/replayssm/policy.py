"""State policies: in which formats a recurrent state is kept, in how many copies, and how often it is stored."""

import difflib
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from replayssm.formats import Format, Rounding

MAX_WINDOW = 128
"""Longest replay window; the work inside a window grows with its square."""

DEFAULT_WINDOW = 16
"""Window of the ReplaySSM paper."""

LONGEST_TEXT = 200
"""Characters of the longest policy that is read; a message about a longer one could not be read either."""


def check_window(window: int) -> None:
    """Refuse a window outside 1…128.

    Raises:
        ValueError: With the limits and what came.
    """
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"expected a window of 1 to {MAX_WINDOW} tokens, got {window}")


class CheckpointSharing(StrEnum):
    """Which copies of the state exist."""

    CONVENTIONAL = "conventional"
    SHARED = "shared"
    SEPARATE = "separate"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One state policy.

    Attributes:
        sharing: `conventional` stores the state after every token. `shared` keeps one checkpoint that serves outputs
            and carries the recurrence. `separate` keeps a copy for outputs and another one for the recurrence.
        read_format: Format that outputs see.
        recurrence_format: Format that is carried from window to window; differs from `read_format` only if `separate`.
        window_tokens: Tokens from one store to the next (1 for `conventional`).

    Raises:
        ValueError: When the parts contradict each other, or the window is outside 1…128.

    Source: ReplaySSM, shared and separate checkpoints.
    """

    sharing: CheckpointSharing
    read_format: Format
    recurrence_format: Format
    window_tokens: int

    def __post_init__(self) -> None:
        check_window(self.window_tokens)
        if self.sharing is CheckpointSharing.CONVENTIONAL and self.window_tokens != 1:
            raise ValueError(
                f"a conventional policy stores after every token (window 1), got window {self.window_tokens}; "
                f"`shared:{self.recurrence_format}@L={self.window_tokens}` stores after every {self.window_tokens}"
            )
        if self.sharing is not CheckpointSharing.SEPARATE and self.read_format != self.recurrence_format:
            raise ValueError(
                f"a {self.sharing} policy has one format, got {self.read_format} and {self.recurrence_format}; "
                f"two formats need `separate:{self.read_format}/{self.recurrence_format}`"
            )

    @classmethod
    def parse(cls, text: str, *, default_window: int = DEFAULT_WINDOW) -> "Policy":
        """Read a policy from its text form.

        `conventional:F`, `shared:F`, `separate:R/H`, each of the last two with an optional `@L=N`; `F`, `R` and `H` are
        formats such as `nvfp4+sr` or `fp8[tile=32,max=240]`.

        Raises:
            ValueError: With what was expected, what came and, for a mistyped name, the nearest one that exists.
        """
        if len(text) > LONGEST_TEXT:
            raise ValueError(
                f"expected a policy of at most {LONGEST_TEXT} characters, got {len(text)} that begin with {text[:40]!r}"
            )
        example = "such as `shared:nvfp4+sr` or `separate:nvfp4/fp16+sr@L=32`"
        body, at, suffix = text.strip().partition("@")
        kind, colon, formats = body.partition(":")
        names = [str(s) for s in CheckpointSharing]
        sharing = kind.strip().lower()
        if sharing not in names:
            near = difflib.get_close_matches(sharing, names, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ValueError(
                f"policy {text!r}: expected one of {', '.join(names)} before the colon, got {kind.strip()!r}{hint} "
                f"A policy reads {example}."
            )
        if not colon or not formats.strip():
            raise ValueError(f"policy {text!r}: expected a format after `{sharing}:`, {example}")
        parts = [_format(part, policy=text) for part in formats.split("/")]
        window = 1 if sharing == CheckpointSharing.CONVENTIONAL else default_window
        if at:
            window = _window(suffix, policy=text)
        expected = 2 if sharing == CheckpointSharing.SEPARATE else 1
        if len(parts) != expected:
            wanted = "two formats, read/recurrence" if expected == 2 else "one format"
            raise ValueError(f"policy {text!r}: {sharing} takes {wanted}, got {len(parts)}; for instance {example[8:]}")
        try:
            return cls(
                sharing=CheckpointSharing(sharing),
                read_format=parts[0],
                recurrence_format=parts[-1],
                window_tokens=window,
            )
        except ValueError as error:
            raise ValueError(f"policy {text!r}: {error}") from None

    def __str__(self) -> str:
        """The canonical text, always with its window when it has one: `Policy.parse(str(p)) == p`."""
        if self.sharing is CheckpointSharing.CONVENTIONAL:
            return f"conventional:{self.recurrence_format}"
        formats = str(self.recurrence_format)
        if self.sharing is CheckpointSharing.SEPARATE:
            formats = f"{self.read_format}/{formats}"
        return f"{self.sharing}:{formats}@L={self.window_tokens}"

    @property
    def copies(self) -> tuple[Format, ...]:
        """The formats of the stored copies: the one that carries the recurrence, then (if separate) the read copy."""
        if self.sharing is CheckpointSharing.SEPARATE:
            return self.recurrence_format, self.read_format
        return (self.recurrence_format,)

    @property
    def is_stochastic(self) -> bool:
        """Whether any copy is rounded stochastically."""
        return any(f.rounding is Rounding.STOCHASTIC for f in self.copies)

    @property
    def is_lossless(self) -> bool:
        """Whether every copy keeps a float32 state as it is."""
        return all(f.is_identity for f in self.copies)

    def bits_per_element(self, *, heads: int, d_v: int, d_k: int) -> float:
        """Stored bits per element of the state, scales and all copies included."""
        return sum(f.bits_per_element(heads=heads, d_v=d_v, d_k=d_k) for f in self.copies)


REFERENCE = Policy(
    sharing=CheckpointSharing.CONVENTIONAL,
    read_format=Format.parse("fp32"),
    recurrence_format=Format.parse("fp32"),
    window_tokens=1,
)
"""What every arm is compared with: a float32 state, stored after every token."""


def precision_arms(precision: str, *, window: int = DEFAULT_WINDOW) -> tuple[Policy, ...]:
    """The five arms that `--precision P` stands for, the float32 control first.

    `shared:fp32`, `shared:P`, `shared:P+sr`, `separate:P/fp32`, `separate:P/fp16+sr`; arms that coincide (for `fp32`,
    which has no stochastic form) appear once.

    Raises:
        ValueError: When `precision` is no format, or already names a rounding.
    """
    fmt = _format(precision, policy=precision)
    if fmt.rounding is Rounding.STOCHASTIC:
        raise ValueError(
            f"precision {precision!r}: expected a format without `+sr` (both roundings are measured), "
            f"for instance {str(fmt).removesuffix('+sr')!r}"
        )
    texts = ["shared:fp32", f"shared:{fmt}", f"separate:{fmt}/fp32", f"separate:{fmt}/fp16+sr"]
    if not fmt.is_identity:
        texts.insert(2, f"shared:{fmt}+sr")
    return tuple(dict.fromkeys(Policy.parse(text, default_window=window) for text in texts))


def nearest_rounding_twin(policy: Policy) -> Policy | None:
    """The same policy rounded to nearest where `policy` rounds its only copy stochastically, else `None`."""
    if policy.sharing is CheckpointSharing.SEPARATE or policy.recurrence_format.rounding is Rounding.NEAREST_EVEN:
        return None
    fmt = replace(policy.recurrence_format, rounding=Rounding.NEAREST_EVEN)
    return replace(policy, read_format=fmt, recurrence_format=fmt)


def _format(text: str, *, policy: str) -> Format:
    try:
        return Format.parse(text)
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}" if text != policy else str(error)) from None


def _window(suffix: str, *, policy: str) -> int:
    match = re.fullmatch(r"\s*[lL]\s*=\s*(\d{1,9})\s*", suffix, flags=re.ASCII)
    if match is None:
        raise ValueError(f"policy {policy!r}: expected `@L=N` with a window of 1 to {MAX_WINDOW}, got {'@' + suffix!r}")
    return int(match.group(1))
