"""Constants and types that Flower's public packages do not export; a test compares them with the installed flwr."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Context, Message

log = logging.getLogger("flwr").log
"""Logs among the lines of Flower's server app and client app."""
NUMPY_STYPE = "numpy.ndarray"
"""Serialization type of an array that holds the bytes of a ``.npy`` file."""
KEY_CLIPPING_NORM = "clipping_norm"
"""Key by which Flower's mods read the clip."""
KEY_NORM_BIT = "norm_bit"
"""Key by which they answer."""
CLIENT_APP_RAISED_EXCEPTION = 2
"""Code of an error: the client app raised an exception. So are the next ones."""
MESSAGE_UNAVAILABLE = 3
NODE_UNAVAILABLE = 5
MOD_FAILED_PRECONDITION = 6
INVALID_FAB = 7

ClientAppCallable = Callable[[Message, Context], Message]
"""Type of the callable that a mod wraps."""
Mod = Callable[[Message, Context, ClientAppCallable], Message]
"""Type of a mod."""
