"""A Ray for one program: it hears this machine alone, and answers nobody without a secret of its own.

Ray takes every caller by default, listens on all addresses of the machine, and runs what it is sent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from client_pipeline.runtime import ray_agents, worker_forks
from client_pipeline.runtime.memory import ONE_HEAP
from client_pipeline.runtime.node_tls import TLS_VARIABLES

TOKEN_BYTES = 32
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where Ray would not speak to other machines it takes the loopback address, on every system."""
_START_RAYLET, _COMMAND_OF = "start_raylet", "_build_python_executable_command_memory_profileable"
"""Method of Ray's ``Node`` and function of its ``services``."""
_SAY = "print_to_stdstream"
"""Function of Ray's ``worker`` that prints in a driver what others have to say."""
_AGENTS = ("dashboard_agent", "runtime_env_agent")
"""As Ray calls these programs of a node; the second makes environments for workers."""
_SECRETS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *TLS_VARIABLES)
ADDRESS_FILE = "COLLAPIPE_RAY_ADDRESS_FILE"
"""Environment variable: the file that the address of a simulation's Ray is written into, once it is there."""
RAY_FOLDER = "COLLAPIPE_RAY_FOLDER"
"""Environment variable: the folder in which all workers of that Ray look for the packages."""


def private_environment() -> dict[str, str]:
    """Make the variables of a Ray that is about to start, and of all that speaks to it; the secret is a new one.

    Only this user's processes can read them, as the file that Ray would take the secret from otherwise.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(TOKEN_BYTES), _LOOPBACK: "0"}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop secret and certificates of another Ray, which would come before new ones."""
    return {name: value for name, value in environment.items() if name not in _SECRETS}


@contextlib.contextmanager
def lean_head(*, shows_output: bool = True, environments: bool = False) -> Iterator[None]:
    """Start a node of Ray within, by ``ray.init`` or ``ray start``, with what a cluster of ours needs, and no more.

    The autoscaler's monitor would add machines of a cloud, the dashboard's server has nothing to show without its
    dashboard, and Ray Client's server would let programs of other machines in. Each is a process of 50 to 60 MB that
    imports for a second, and ``ray.init`` waits for the second. Ray has an option against the first alone, in ``ray
    start``; a release in which the methods are called otherwise starts all. The workers of what is started have one
    heap each, unless the environment says how many; on Linux they are forks
    (:mod:`client_pipeline.runtime.worker_forks`), and what nobody needs of a node's two agents waits
    (:mod:`client_pipeline.runtime.ray_agents`).

    Parameters
    ----------
    shows_output : whether drivers may ask for what workers print; the log monitor, a process that reads it from files
        ten times a second, starts for that alone
    environments : whether the first worker comes with an environment of its own; the agent that makes it starts at once
    """
    from ray._private import services
    from ray._private.node import Node

    added = {name: value for name, value in ONE_HEAP.items() if name not in os.environ}
    os.environ.update(added)

    unused = ["start_monitor", "start_api_server", "start_ray_client_server"]
    if not shows_output:
        unused.append("start_log_monitor")
    originals = {name: vars(Node)[name] for name in unused if name in vars(Node)}
    for name in originals:
        setattr(Node, name, lambda node, **options: None)
    # Other systems' libraries need not survive a fork.
    if sys.platform == "linux" and _START_RAYLET in vars(Node):
        originals[_START_RAYLET] = vars(Node)[_START_RAYLET]
        setattr(Node, _START_RAYLET, _with_forks(originals[_START_RAYLET]))
    command_of = getattr(services, _COMMAND_OF, None)
    if sys.platform == "linux" and command_of is not None:
        agents = _AGENTS[:1] if environments else _AGENTS
        setattr(services, _COMMAND_OF, _with_waiting_agents(command_of, agents))
    try:
        yield
    finally:
        if command_of is not None:
            setattr(services, _COMMAND_OF, command_of)
        for name, method in originals.items():
            setattr(Node, name, method)
        for name in added:
            del os.environ[name]


def _with_forks(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    def start(node: Any, *arguments: Any, **options: Any) -> Any:
        node._ray_params.worker_path = node._ray_params.setup_worker_path = worker_forks.__file__
        return start_raylet(node, *arguments, **options)

    return start


def _with_waiting_agents(command_of: Callable[..., list[str]], agents: Sequence[str]) -> Callable[..., list[str]]:
    def begin_command(component: str, *arguments: Any, **options: Any) -> list[str]:
        command = command_of(component, *arguments, **options)
        return [sys.executable, "-I", "-S", ray_agents.__file__, *command] if component in agents else command

    return begin_command


@contextlib.contextmanager
def private_ray(*, num_cpus: int = 1, **options: Any) -> Iterator[dict[str, str]]:
    """Start a Ray for this process, and end it; a Ray that it uses already is kept.

    Whatever cluster ``RAY_ADDRESS`` may name is not joined.

    Parameters
    ----------
    num_cpus : processors that it believes in
    options : more of ``ray.init``

    Yields
    ------
    The variables that a program needs to speak to this Ray; none of a Ray that was there before.
    """
    import ray
    from ray._private import ray_constants, worker

    if ray.is_initialized():
        yield {}
        return
    previous_environment, cluster = dict(os.environ), ray_constants.ENABLE_RAY_CLUSTER
    environment = private_environment()
    os.environ.update(environment)
    for name in ("RAY_AUTH_TOKEN_PATH", *TLS_VARIABLES):
        os.environ.pop(name, None)
    # Ray has read its settings when it was imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    say = getattr(worker, _SAY, None)
    if say is not None:
        setattr(worker, _SAY, _on_standard_error(say))
    try:
        read_settings()
        try:
            with lean_head(shows_output=False):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    **options,
                )
        finally:
            # Ray's own processes have them by now; those that this one starts are none of Ray's.
            for name in (*_SECRETS, _LOOPBACK):
                os.environ.pop(name, None)
                if name in previous_environment:
                    os.environ[name] = previous_environment[name]
        yield environment
    finally:
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = cluster
        if say is not None:
            setattr(worker, _SAY, say)
        read_settings()


def be_driver(address: str, **options: Any) -> None:
    """Join a Ray whose secret is in this process's environment, as a program of its own.

    Parameters
    ----------
    address : ``host:port``
    options : more of ``ray.init``
    """
    import ray

    ray.init(address=address, **options)


def _on_standard_error(say: Callable[..., None]) -> Callable[..., None]:
    """Have a driver's output to itself: Ray would say there which worker died, also between two lines of JSON."""
    return lambda data, *arguments, **options: say({**data, "is_err": True}, *arguments, **options)


def read_settings() -> None:
    """Have Ray look at the environment again: it has read its settings when it was imported."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
