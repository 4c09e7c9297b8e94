"""`python -m replayeval.cli`."""

import sys

from replayeval.cli.app import main

sys.exit(main())
