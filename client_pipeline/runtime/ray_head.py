"""A simulation's Ray, started beside the SuperLink: Flower's simulation would start it when it needs it, and wait.

A program of its own, as Ray's programs end with the process that has started them. It runs until it is told to end.
"""

# Alone: a program; the launcher knows its name, and the simulation the file that it writes.

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Start a Ray with so many processors, and write its address into a file: nothing, if it could not be started."""
    num_cpus, file = int(sys.argv[1]), Path(sys.argv[2])
    import ray

    address = ""
    try:
        # As Flower's simulation would.
        context = ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
        # Ray's own handler would print where the program stood.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        address = str(context.address_info["gcs_address"])
    finally:
        # Under its name it is whole from the beginning.
        partial = file.with_suffix(".new")
        partial.write_text(address, encoding="utf-8")
        os.rename(partial, file)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
