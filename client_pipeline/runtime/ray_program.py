"""Ray's command with a head as :func:`lean_head` has it: ``python -m client_pipeline.runtime.ray_program start ...``.

``ray start`` has no option against Ray Client's server, which listens at port 10001 on all of the machine's addresses
and runs what programs of other machines send it.
"""

# Alone: a program; no module needs what is here.

from __future__ import annotations

from client_pipeline.runtime.private_ray import lean_head


def main() -> None:
    """Run ``ray`` with the arguments of this program."""
    from ray.scripts.scripts import main as ray_command

    with lean_head():
        ray_command()


if __name__ == "__main__":
    main()
