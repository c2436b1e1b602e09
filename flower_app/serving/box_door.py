"""Program of a control unit's box: the door at which its cluster answers with the model that the server has given.

It runs as long as the box does, without the server. It waits for an order in its folder, brings the cluster's devices
up with the model's TEBs, and answers until the order is another one; then it ends, and the box starts it again. The
model's last layers and the text of prompts stay in this process.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client_pipeline.link.hosts import split_address
from flower_app.launch.processes import interruptible
from flower_app.node.door_folder import DoorFolder

if TYPE_CHECKING:
    from flower_app.serving.served_model import ServedModel

READER = "Prompts and answers stay on the machines of this site: no token leaves it, and they are written to no file."
_POLL_S = 0.5
_AGAIN_S = 10.0
"""Pause after a failure to open: devices may come later [s]."""


@dataclass(frozen=True, kw_only=True)
class BoxDoor:
    """Door of a box, as its owner has opened it."""

    folder: Path
    """Orders and models, and the digest of the key."""
    cluster: int
    ray_address: str
    """``host:port`` of the cluster's Ray."""
    host: str
    """Address of the box that its devices reach."""
    address: str
    """``host:port`` of the door."""
    tls: tuple[Path, Path] | None
    """Certificate and private key; None: the door is on the loopback."""

    def command(self) -> list[str]:
        """Return the program's command line."""
        tls = map(str, self.tls or ())
        place = (str(self.folder), str(self.cluster), self.ray_address, self.host, self.address)
        return [sys.executable, "-P", "-m", "flower_app.serving.box_door", *place, *tls]

    @classmethod
    def of_command(cls, arguments: Sequence[str]) -> BoxDoor:
        """Read the arguments of :meth:`command`."""
        folder, cluster, ray_address, host, address, *tls = arguments
        return cls(
            folder=Path(folder),
            cluster=int(cluster),
            ray_address=ray_address,
            host=host,
            address=address,
            tls=(Path(tls[0]), Path(tls[1])) if tls else None,
        )

    def run(self) -> None:
        """Wait for an order, and serve it to its end."""
        door = DoorFolder(self.folder)
        while not (order := door.order()):
            time.sleep(_POLL_S)
        # What serves imports torch: a box without an order does without.
        number = str(order["id"])
        while door.order().get("id") == number:
            try:
                self._serve(door, order)
            except (OSError, RuntimeError, ValueError) as error:
                say(f"the door of cluster {self.cluster} does not open: {error}")
                door.tell(number, error=str(error))
                _pause(door, number)

    def _serve(self, door: DoorFolder, order: Mapping[str, Any]) -> None:
        from flower_app.serving.door_key import door_key
        from flower_app.serving.door_server import open_door, serve_door

        number, place = str(order["id"]), split_address("--serve", self.address)
        with (
            self._served(order) as served,
            open_door(place.bare_host, place.port, self.tls is not None) as listener,
        ):
            host, port = listener.getsockname()[:2]
            address = f"http{'s' if self.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"
            _, digest = door_key(self.folder, new=False)

            def opened() -> None:
                say(f"the door of cluster {self.cluster} is open: {address}, model {served.name}")
                door.tell(number, address=address)

            def until() -> str:
                return "" if door.order().get("id") == number else f"{served.name} is served no longer"

            serve_door(served, digest, listener, reader=READER, tls=self.tls, opened=opened, until=until)

    @contextmanager
    def _served(self, order: Mapping[str, Any]) -> Iterator[ServedModel]:
        """Bring the model up on the cluster's devices.

        Raises
        ------
        ValueError, RuntimeError
            If its files do not fit, a training holds the cluster, or the devices cannot hold the TEBs.
        """
        from client_pipeline.runtime.control_unit.actors import DEVICES_TIMEOUT_S, end_older_runs, join_ray
        from client_pipeline.runtime.devices.answering_devices import DeviceStages
        from client_pipeline.runtime.devices.device_nodes import check_devices, wait_for_devices
        from client_pipeline.runtime.devices.pipeline import Pipeline
        from client_pipeline.runtime.ray.placement import Placement
        from client_pipeline.serving.engine import Engine
        from client_pipeline.serving.saved_parts import answering_parts
        from client_pipeline.timetable.replanning import answering_plans
        from flower_app.config.run_config import RunConfig
        from flower_app.node.own_plans import answering_replan
        from flower_app.saved_model import read_model
        from flower_app.serving.run_model import check_served, served_model
        from strategies.clusters import ClusterState

        config, state = RunConfig.as_sent(order["config"]), ClusterState.from_dict(order["state"])
        stored, num_devices = read_model(self.folder, config.model.family), len(state.devices)
        check_served(stored.spec, self.folder)
        model = answering_parts(stored.spec, stored.weights, stored.base)
        placement = Placement(ray_address=self.ray_address, host=self.host, num_devices=num_devices)
        run = f"door-{secrets.token_hex(4)}"
        join_ray(placement)
        end_older_runs(run, self.cluster)
        joined = wait_for_devices(num_devices, DEVICES_TIMEOUT_S, least=1)
        check_devices(joined)
        pipeline = Pipeline(
            name=f"collapipe/{run}/cluster-{self.cluster}",
            spec=model.spec,
            optimizer=config.optimizer,
            runtime=replace(config.runtime, recompute="never"),
            placement=placement,
            frozen=model.frozen,
            absent=[device for device in range(num_devices) if device not in joined],
        )
        num_blocks = len(model.parts.blocks)
        plan_for = answering_plans(answering_replan(state, num_blocks), num_devices, num_blocks)
        try:
            stages = DeviceStages(pipeline, plan_for, num_devices, model.weights)
        except BaseException:
            pipeline.close()
            raise
        try:
            engine = Engine(model.parts.embedding, model.parts.head, stages, say)
            served = served_model(str(order["name"]), engine, stored.spec, stored.tokenizer_json)
            try:
                yield served
            finally:
                served.close()
        finally:
            stages.close()


def _pause(door: DoorFolder, number: str) -> None:
    deadline = time.monotonic() + _AGAIN_S
    while door.order().get("id") == number and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def say(line: str) -> None:
    """Print a line where the box prints its own."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Serve until told to end."""
    with interruptible():
        try:
            BoxDoor.of_command(sys.argv[1:]).run()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
