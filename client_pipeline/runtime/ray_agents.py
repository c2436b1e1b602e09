"""What stands where Ray starts the two agents of a node, until somebody needs one.

Each is a program that imports Ray: 0.8 s of a processor and 90 MB, on every box of a cluster. The dashboard's agent
does nothing where Ray is installed without its dashboard; it says of its ports that there are none. The other one
makes the environments that workers ask for, and ours ask for none. In their places
:func:`client_pipeline.runtime.private_ray.lean_head` has this file started, with Ray's command as its arguments. It
says the same, and waits for the end of its raylet; when somebody connects to the agent of environments, it becomes that
agent.

It imports nothing but the standard library until then.
"""

# Alone: a program; lean_head names its file to Ray.

from __future__ import annotations

import os
import runpy
import select
import socket
import sys
from collections.abc import Sequence

_UNUSED_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""What Ray's dashboard agent says where it is without the dashboard."""
_ENVIRONMENT_PORT, _PORT_OPTION = "runtime_env_agent_port", "runtime-env-agent-port"
_MINIMAL = "--minimal"
_BACKLOG = 128
_LOOK_S = 1.0
"""How often it looks whether its raylet is there, where the system does not tell it [s]."""


def _options(command: Sequence[str]) -> dict[str, str]:
    pairs = (word[2:].partition("=") for word in command if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def _say_port(command: Sequence[str], name: str, port: int) -> None:
    """Write a port where the raylet looks for it, as Ray's ``persist_port`` does."""
    options = _options(command)
    path = os.path.join(options["session-dir"], f"{name}_{options['node-id']}")
    # Under its name it is whole from the beginning.
    with open(f"{path}.{os.getpid()}", "w", encoding="ascii") as file:
        file.write(str(port))
    os.rename(file.name, path)


def _wait(raylet: int, server: socket.socket | None = None) -> bool:
    """Wait until somebody connects, or the raylet has ended; returns whether somebody did."""
    try:
        # Some Pythons have none, and some systems do not let it be.
        end = os.pidfd_open(raylet)
    except (AttributeError, OSError):
        end = -1
    awaited = [number for number in (end, -1 if server is None else server.fileno()) if number >= 0]
    # By its parent it knows, too: the number may have been another's when it was opened.
    while os.getppid() == raylet:
        if ready := select.select(awaited, [], [], None if end >= 0 else _LOOK_S)[0]:
            return end not in ready
    return False


def stand_for_dashboard(command: Sequence[str], raylet: int) -> None:
    """Be the agent of a dashboard that is not installed, until the raylet has ended.

    Parameters
    ----------
    command : Ray's own, with its arguments
    raylet : process id of this process's parent
    """
    for name in _UNUSED_PORTS:
        _say_port(command, name, -1)
    _wait(raylet)


def stand_for_environments(command: Sequence[str], raylet: int) -> None:
    """Hold the port of the agent of environments until somebody connects, and be that agent from then on.

    Parameters
    ----------
    command, raylet : as of :func:`stand_for_dashboard`
    """
    options = _options(command)
    port = int(options[_PORT_OPTION])
    places = socket.getaddrinfo(options["node-ip-address"], port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = places[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(_BACKLOG)
        port = server.getsockname()[1]
        _say_port(command, _ENVIRONMENT_PORT, port)
        if _wait(raylet, server):
            # Whoever has connected waits in the queue of this socket, and the agent takes it over.
            server.set_inheritable(True)
            place = command.index(next(word for word in command if word.endswith(".py")))
            python, agent = command[:place], [*command[place:], f"--{_PORT_OPTION}={port}"]
            os.execv(python[0], [*python, __file__, str(server.fileno()), *agent])


def become_agent(server: int, agent: Sequence[str]) -> None:
    """Run Ray's file with a socket that listens already in place of the one that it would bind.

    Parameters
    ----------
    server : file descriptor of the socket
    agent : Ray's file, and its arguments, the socket's port among them
    """
    bind, port = socket.socket.bind, int(_options(agent)[_PORT_OPTION])

    def take_over(new: socket.socket, address: tuple[str, int]) -> None:
        # Libraries bind sockets, too, to see what this machine can.
        if address[1] == port:
            os.dup2(server, new.fileno(), inheritable=False)
        else:
            bind(new, address)

    socket.socket.bind = take_over  # type: ignore[method-assign, assignment]
    sys.argv = [*agent]
    # As Python does for a file that it is started with; it has done so for this one.
    sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.dirname(agent[0])]
    runpy.run_path(agent[0], run_name="__main__")


def main() -> None:
    """Stand for the agent whose command the arguments are, or become it: the first is the socket's number then."""
    command = sys.argv[1:]
    if command[0].isdecimal():
        become_agent(int(command[0]), command[1:])
        return
    raylet = int(os.environ["RAY_RAYLET_PID"])
    if _PORT_OPTION in _options(command):
        stand_for_environments(command, raylet)
    elif _MINIMAL in command:
        stand_for_dashboard(command, raylet)
    else:
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
