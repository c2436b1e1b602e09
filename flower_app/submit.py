"""``flwr run``, held back until the SuperLink answers: its imports take as long as the SuperLink's start."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request


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


def main() -> None:
    """Run ``flwr run`` with the arguments after the address and the time limit in seconds."""
    from flwr.cli.app import app

    address, timeout_s, *arguments = sys.argv[1:]
    if not wait_for_superlink(address, float(timeout_s)):
        sys.exit(f"the SuperLink at {address} did not answer within {timeout_s} s")
    app(["run", *arguments])


if __name__ == "__main__":
    main()
