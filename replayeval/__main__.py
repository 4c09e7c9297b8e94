"""`python -m replayeval` is the command `replayeval`."""

from replayeval.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
