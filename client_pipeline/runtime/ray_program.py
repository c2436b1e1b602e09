"""Ray's command with a head as :func:`lean_head` has it: ``python -m client_pipeline.runtime.ray_program start ...``.

``ray start`` has no option against Ray Client's server, which listens at port 10001 on all of the machine's addresses
and runs what programs of other machines send it. It has no option either against the commands of Ray Serve, of jobs and
of states, which import pandas and a web framework: more than half of the program's start, and memory for as long as the
node is up.
"""

# Alone: a program; no module needs what is here.

from __future__ import annotations

import sys

from client_pipeline.quick_imports import quick_imports
from client_pipeline.runtime.private_ray import lean_head

_OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Ray's command goes without those that cannot be imported."""


def main() -> None:
    """Run ``ray`` with the arguments of this program."""
    for name in _OTHER_COMMANDS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    with quick_imports():
        from ray.scripts.scripts import main as ray_command

    with lean_head():
        ray_command()


if __name__ == "__main__":
    main()
