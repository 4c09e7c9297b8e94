"""What a record says about how a function was called."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from replayssm.policy import Policy


def call_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return which arguments were passed and which took their default, as JSON values.

    Args:
        function: What was called.
        values: Its arguments by name.
    """
    defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    shown = {n: _shown(v) for n, v in values.items() if n not in ("progress", "tokenizer")}
    given = {n: v for n, v in shown.items() if v != _shown(defaults[n])}
    return {"given": given, "defaulted": {n: v for n, v in shown.items() if n not in given}}


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_shown(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        return {str(k): _shown(v) for k, v in cast(Mapping[Any, Any], value).items()}
    return str(value) if isinstance(value, Policy | Path) else type(value).__name__
