"""Keep transformers and the hub client silent for a while."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging


@contextmanager
def quiet(enabled: bool = True) -> Generator[None]:
    """Silence transformers' messages below errors and all progress bars of loading; put everything back on exit.

    Args:
        enabled: False lets everything through, so that a caller can pass on a `verbose` choice.
    """
    if not enabled:
        yield
        return
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    _switch(bars, hub_bars, on=False)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        _switch(bars, hub_bars, on=True)


def _switch(bars: bool, hub_bars: bool, *, on: bool) -> None:
    # Where the user fixed the hub's bars through its own environment variable, the client warns and changes nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if bars:
            (logging.enable_progress_bar if on else logging.disable_progress_bar)()
        if hub_bars:
            (enable_progress_bars if on else disable_progress_bars)()
        elif on:
            disable_progress_bars()
