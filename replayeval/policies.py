"""Which policies texts and a precision name together."""

from collections.abc import Sequence

from replayeval.errors import ConfigError
from replayssm.policy import REFERENCE, Policy, check_window, precision_arms

DEFAULT_PRECISION = "nvfp4"


def parse_policies(arms: Sequence[Policy | str] | None, precision: str | None, window: int) -> tuple[Policy, ...]:
    """Return the policies that texts and a precision name together, each once.

    Args:
        arms: Policies, as values or text; None asks for those of `precision`.
        precision: A format that stands for its five default arms; `nvfp4` when neither is given.
        window: Replay window in tokens of policies that name none.

    Raises:
        ConfigError: A text is no policy, or names the reference.
    """
    try:
        check_window(window)
        given = () if arms is None else arms
        policies = [p if isinstance(p, Policy) else Policy.parse(p, default_window=window) for p in given]
        if precision is not None or arms is None:
            policies = [*precision_arms(precision or DEFAULT_PRECISION, window=window), *policies]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if REFERENCE in policies:
        raise ConfigError(
            f"expected arms that differ from the reference, got {REFERENCE}, which is always there; "
            "`shared:fp32` is the control arm that shows the floor"
        )
    return tuple(dict.fromkeys(policies))
