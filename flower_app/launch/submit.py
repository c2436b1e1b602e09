"""``flwr run`` for the launcher, and the guard of its processes.

It waits until the SuperLink answers, because its imports take as long as the SuperLink's start, and for the word of the
launcher, which may still be checking the run. And it ends the run if the launcher dies: SuperLink and SuperExec would
go on without it, and a simulation survives even their deaths, for its main thread sleeps in a lock that no signal
interrupts.
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
"""What the launcher says when the app may be handed over."""


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
    at which this waits for the launcher's word.
    """
    address, timeout_s, launcher, superlink, pipe, *arguments = sys.argv[1:]
    processes = RunProcesses(os.environ[MARK], int(superlink))
    guarding = threading.Thread(target=guard, args=(int(launcher), processes), daemon=True)
    guarding.start()
    from client_pipeline.quick_imports import quick_imports

    with quick_imports():
        from strategies.flower_internals import flower_cli

    if not wait_for_superlink(address, float(timeout_s)):
        sys.exit(f"the SuperLink at {address} did not answer within {timeout_s} s")
    with os.fdopen(int(pipe), "rb") as word:
        if word.read() != GO:
            # It says why itself, or is gone.
            sys.exit("the launcher hands over no app")
    try:
        flower_cli(["run", *arguments])
    finally:
        if os.getppid() != int(launcher):
            # The guard has cut the line to the SuperLink, and is still clearing up.
            guarding.join()


if __name__ == "__main__":
    main()
