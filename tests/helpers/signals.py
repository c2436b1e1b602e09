"""Signals of programs that tests start, whoever started the tests."""

import signal


def default_signals():
    """Set back, in a child before its program begins, what the shell may have told it to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
