"""``collapipe join``: a box asks for its place once, and then is what ``collapipe up`` makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline import durable
from flower_app.deployment.control_unit_box import RUNTIME_PORT, ControlUnitBox
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.device_box import DeviceBox
from flower_app.deployment.metrics_door import metrics_address
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.joining.join_call import JoinRefused
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_request import ANY_CLUSTER, CU_KIND, DEVICE_KIND
from flower_app.joining.newcomer import BoxFolder, Wish, join_deployment
from flower_app.joining.renewal import MembershipWatch

JOINED = "joined"
APPROVAL_S = 1_800.0


@dataclass(frozen=True, kw_only=True)
class JoiningBox:
    """Options of ``collapipe join``."""

    code: str
    """Empty: start what this box has become by an earlier code."""
    state: Path
    data: str = ""
    control_unit: bool = False
    """A control unit without text of its own."""
    cluster: int = ANY_CLUSTER
    devices: Sequence[int] = ()
    host: str = ""
    model: str = ""
    device_profile: str = ""
    allowed_apps: Sequence[str] = ()
    allowed_modules: Sequence[str] = ()
    ray_port: int = FIRST_PORT
    runtime_port: int = RUNTIME_PORT
    object_store_mb: int = 512
    metrics: str = ""
    """Of a control unit: where Prometheus asks."""
    wait: float = APPROVAL_S
    """For the approval [s]."""

    def __post_init__(self) -> None:
        if self.cluster < ANY_CLUSTER:
            raise ValueError(f"--cluster: expected a number from 0, found {self.cluster}")
        if not 0 < self.wait <= 86_400:
            raise ValueError(f"--wait: expected more than 0 and at most 86400 s, found {self.wait:g}")
        if self.code and not self._is_control_unit and self.cluster == ANY_CLUSTER:
            raise ValueError(
                "join: expected --data FOLDER (a control unit with its own text), --control-unit (one without), or "
                "--cluster N (a device of that cluster), found none"
            )
        if self.code and self.metrics and not self._is_control_unit:
            raise ValueError("--metrics: expected on a control unit, found on a device")
        metrics_address(self.metrics)

    @property
    def _is_control_unit(self) -> bool:
        return bool(self.data) or self.control_unit

    @property
    def folder(self) -> BoxFolder:
        """What the box keeps."""
        return BoxFolder(self.state / JOINED)

    def join(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Ask for a place, unless this box has one by this code; returns what it has become.

        Raises
        ------
        ValueError
            If the code is none, or the edge server does not let the box in.
        """
        if not self.code:
            return self.folder.box()
        # A folder that is not there is said before anybody is asked.
        if self.data and not Path(self.data).is_dir():
            raise FileNotFoundError(f"--data: no folder {self.data}; name the one that holds the cluster's text")
        code = JoinCode.read(self.code)
        if self.folder.joined_by(code):
            return self.folder.box()
        wish = Wish(
            kind=CU_KIND if self._is_control_unit else DEVICE_KIND,
            cluster=self.cluster,
            devices=tuple(self.devices),
            host=self.host,
            ray_port=self.ray_port,
        )
        options = {
            "data": str(Path(self.data).resolve()) if self.data else "",
            "model": self.model,
            "device_profile": self.device_profile,
            "allowed_apps": list(self.allowed_apps),
            "allowed_modules": list(self.allowed_modules),
            "ray_port": self.ray_port,
            "runtime_port": self.runtime_port,
            "object_store_mb": self.object_store_mb,
            "metrics": self.metrics,
        }
        # Aside: what the box has by an earlier code is lost only when it has something better.
        aside = BoxFolder(self.state / f"joining-{code.token_hash[:16]}")
        box = join_deployment(aside, code, wish, self.wait, say, options)
        durable.remove(self.folder.folder)
        durable.adopt_folder(aside.folder, self.folder.folder)
        return box

    def up(self, say: Callable[[str], None]) -> int:
        """Join, and run the box's programs until told to end; returns the exit code."""
        box = self.join(say)
        say(f"starting {box['name']}; the next time: collapipe join --state {self.state}")
        while True:
            watch = MembershipWatch(self.folder, say)
            if not (reason := watch.reason()):
                try:
                    code = machine_of(box, self.folder, self.state, watch.reason).up(say)
                finally:
                    watch.stop()
                if not watch.is_renewed:
                    return code
            elif not watch.is_renewed:
                raise JoinRefused(f"{box['name']} starts nothing: {reason}")
            say(f"starting {box['name']} with its new secret")


def machine_of(
    box: Mapping[str, Any], folder: BoxFolder, state: Path, until: Callable[[], str] = lambda: ""
) -> ControlUnitBox | DeviceBox:
    """What ``collapipe up`` starts on a box that has joined.

    Parameters
    ----------
    box : ``box.json``
    folder : where it lies
    state : folder of what survives a restart
    until : why its programs have to end; empty as long as they go on
    """
    options = box["options"]
    shared = {name: options[name] for name in ("ray_port", "object_store_mb")}
    if box["kind"] == CU_KIND:
        names = ("data", "model", "device_profile", "allowed_apps", "allowed_modules", "runtime_port")
        return ControlUnitBox(
            cluster=int(box["cluster"]),
            host=str(box["host"]),
            server=str(box["superlink"]),
            certs=folder.files,
            state=state,
            devices=box["devices"],
            until=until,
            # A box that joined with an earlier release has not been asked.
            metrics=options.get("metrics", ""),
            **{name: options[name] for name in names},
            **shared,
        )
    return DeviceBox(
        devices=box["devices"],
        host=str(box["host"]),
        cu=str(box["cu"]),
        certs=DeviceFiles(folder.folder),
        # Its control unit may have been approved a moment ago.
        wait=_CONTROL_UNIT_S,
        until=until,
        **shared,
    )


_CONTROL_UNIT_S = 300.0
