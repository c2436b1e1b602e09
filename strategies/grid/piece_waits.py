"""How soon Flower looks again for a piece of a message that has not arrived yet."""

from __future__ import annotations

from functools import partial
from typing import Any

FIRST_WAIT_S = 0.1
"""Doubled with each look, up to Flower's own ten seconds."""


def look_again_soon(module: Any, function: str) -> None:
    """Have a function of Flower's wait less for pieces, wherever a module uses it.

    Whoever gets a message knows its pieces before they have all come: the server app's order at the SuperLink, the
    SuperNode's at its client app, and the answers on their way back. Flower then waits a second, two, four: a message
    of a few kilobytes took four seconds to a client app that was there at once.

    Parameters
    ----------
    module : that has imported the function; one without it is left alone
    function : its name there; it takes ``initial_backoff``
    """
    if (pull := getattr(module, function, None)) is not None:
        setattr(module, function, partial(pull, initial_backoff=FIRST_WAIT_S))
