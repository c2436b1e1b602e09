"""Waits of tests: as long as a broken program needs, never as short as a healthy one takes."""

import os
import time

PATIENCE = float(os.environ.get("COLLAPIPE_TEST_PATIENCE", "1"))
"""Factor of every wait, for machines that are slower still."""


def patient(seconds):
    """Return the seconds of a wait on this machine."""
    return seconds * PATIENCE


def eventually(condition, seconds=120.0, words=lambda: "it never became true", poll_s=0.02):
    """Return the value of ``condition`` as soon as it is true; fails with ``words()`` after ``seconds``."""
    deadline = time.monotonic() + patient(seconds)
    while not (value := condition()):
        assert time.monotonic() < deadline, words()
        time.sleep(poll_s)
    return value
