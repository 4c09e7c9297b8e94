"""The errors that replayeval raises on purpose, and the exit code each one stands for."""


class ReplayEvalError(Exception):
    """Base of every error that replayeval raises on purpose.

    The message says what was expected, what came, where, and what to do. `exit_code` is what the command line
    returns: 1 for a check that failed, 2 for input that cannot be used.
    """

    exit_code: int = 1


class ConfigError(ReplayEvalError, ValueError):
    """Input that cannot be used: an option, a path, a file or a model."""

    exit_code = 2


class UnsupportedArmError(ConfigError):
    """A state policy that this model, device or engine cannot run."""


class NumericsError(ReplayEvalError):
    """A self-check of the measuring apparatus failed, so its numbers would mean nothing."""


class StoreError(ReplayEvalError):
    """A run directory that cannot be written, is damaged, or belongs to another run."""

    exit_code = 2
