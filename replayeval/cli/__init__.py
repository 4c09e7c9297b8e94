"""The command line: one thin module per command. Nothing here loads torch until a command needs it."""

from replayeval.cli.app import main

__all__ = ["main"]
