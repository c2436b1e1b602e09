"""A simulation's Ray, started beside the SuperLink: Flower's simulation would start it when it needs it, and wait.

A program of its own, as Ray's programs end with the process that has started them. It runs until it is told to end, or
the launcher is gone.
"""

# Alone: a program; the launcher knows its name, and the simulation the file that it writes.

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

_POLL_S = 1.0


def main() -> None:
    """Start Ray and the simulation's shared actors; the argument, JSON, says which.

    ``num_cpus``: processors that Ray believes in; ``file``: where its address is written, nothing if it could not be
    started; ``actors``, ``idle_s``, ``modules``: as :func:`client_pipeline.runtime.shared_actor.start_when_ray_is_up`
    takes them; ``imports``: what workers need beside Ray and torch.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        sys.exit("without the launcher's secret Ray would take orders from anybody")
    order, launcher = json.loads(sys.argv[1]), os.getppid()
    file = Path(order["file"])
    address = ""
    try:
        import ray

        from client_pipeline.runtime.private_ray import lean_head
        from client_pipeline.runtime.shared_actor import start_when_ray_is_up
        from client_pipeline.runtime.worker_forks import IMPORTS

        os.environ[IMPORTS] = ",".join(order["imports"])
        # As Flower's simulation would.
        with lean_head():
            context = ray.init(num_cpus=order["num_cpus"], include_dashboard=False, logging_level="WARNING")
        # Ray's own handler would print where the program stood.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        address = str(context.address_info["gcs_address"])
    finally:
        # Under its name it is whole from the beginning.
        partial = file.with_suffix(".new")
        partial.write_text(address, encoding="utf-8")
        os.rename(partial, file)
    try:
        start_when_ray_is_up(order["actors"], order["idle_s"], order["modules"], timeout_s=0.0)
    except Exception:
        # The simulation starts what it does not find, and needs this Ray.
        traceback.print_exc()
    while os.getppid() == launcher:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
