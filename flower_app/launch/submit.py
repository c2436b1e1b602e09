"""``flwr run`` for the launcher, and the guard of its processes.

It waits until the SuperLink answers, and imports Flower then: until then others have more use for the processor. Where
the app would begin at once, it waits for the word of the launcher, too, which may still be checking the run. And it
ends the run if the launcher dies: SuperLink and SuperExec would go on without it, and a simulation survives even their
deaths, for its main thread sleeps in a lock that no signal interrupts.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request

from flower_app.launch.processes import MARK, RunProcesses

GO = b"go"
"""What the launcher says when the app may begin."""


def wait_for_word(descriptor: int) -> None:
    """Wait until the launcher says that the app may begin; if it does not, or is gone, this process ends.

    Parameters
    ----------
    descriptor : of a pipe, closed here
    """
    with os.fdopen(descriptor, "rb") as word:
        if word.read() != GO:
            # It says why itself.
            sys.exit("the launcher does not let the app begin")


def wait_for_superlink(address: str, timeout_s: float) -> bool:
    """Wait until the SuperLink at ``address`` (host:port) is healthy.

    Returns
    -------
    False if it was not within ``timeout_s`` seconds.
    """
    # A proxy, where the environment names one, cannot reach this machine's loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with opener.open(f"http://{address}/health", timeout=1.0):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
    return False


def guard(launcher: int, processes: RunProcesses, poll_s: float = 1.0) -> None:
    """End the run's processes, and this one, when the launcher is gone; returns only then."""
    while os.getppid() == launcher:
        time.sleep(poll_s)
    processes.end(polite_s=1.0)
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Run ``flwr run`` with the arguments after the first five.

    These are the address, its time limit [s], the process ids of launcher and SuperLink, and the descriptor of a pipe
    at which this waits for the launcher's word, or nothing.
    """
    address, timeout_s, launcher, superlink, pipe, *arguments = sys.argv[1:]
    processes = RunProcesses(os.environ[MARK], int(superlink))
    guarding = threading.Thread(target=guard, args=(int(launcher), processes), daemon=True)
    guarding.start()
    if not wait_for_superlink(address, float(timeout_s)):
        sys.exit(f"the SuperLink at {address} did not answer within {timeout_s} s")
    from client_pipeline.quick_imports import quick_imports

    with quick_imports():
        from strategies.flower_internals import flower_cli

    if pipe:
        wait_for_word(int(pipe))
    try:
        flower_cli(["run", *arguments])
    finally:
        if os.getppid() != int(launcher):
            # The guard has cut the line to the SuperLink, and is still clearing up.
            guarding.join()


if __name__ == "__main__":
    main()
