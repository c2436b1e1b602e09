"""Box of a deployment: it joins once, and runs its programs as long as the edge server lets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.link.hosts import check_reached_host, split_address
from flower_app.deployment.control_unit_box import RUNTIME_PORT, ControlUnitBox
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.device_box import DeviceBox
from flower_app.deployment.metrics_door import metrics_address
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.error_text import error_text
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_folder import APPROVED, REVOKED
from flower_app.joining.join_request import ANY_CLUSTER, CU_KIND, DEVICE_KIND
from flower_app.joining.newcomer import BoxFolder, JoinRefused, NotThere, Wish, ask, join_by_files, join_deployment
from flower_app.runs.run_lock import check_own_folder

_SHARED_OPTIONS = ("ray_port", "object_store_mb")
_CU_OPTIONS = ("data", "model", "device_profile", "allowed_apps", "allowed_modules", "runtime_port", "metrics", "serve")
"""Options of a box's programs: of both kinds, and of a control unit alone."""
JOINED = "joined"
APPROVAL_S = 1_800.0
_HERE = "127.0.0.1"
POLL_S = 5.0
"""Time between two questions for the box's present state [s]."""


@dataclass(frozen=True, kw_only=True)
class JoiningBox:
    """Options of ``collapipe join``."""

    code: str
    """Code, or file of ``collapipe invite --file``; empty: start the box that has joined by an earlier one."""
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
    """Address of a control unit's metrics."""
    serve: str = ""
    """Address of a control unit's door; ``off``: none."""
    wait: float = APPROVAL_S
    """Time for the approval [s]."""

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
        for option in ("metrics", "serve"):
            if self.code and getattr(self, option) and not self._is_control_unit:
                raise ValueError(f"--{option}: expected on a control unit, found on a device")
        metrics_address(self.metrics)
        if self.host:
            check_reached_host("--host", self.host)
        # A wrong option is refused before the box joins: what the edge server decides does not matter here.
        kind = CU_KIND if self._is_control_unit else DEVICE_KIND
        place = {
            "kind": kind,
            "cluster": 0,
            "devices": self.devices or [0],
            "host": _HERE,
            "superlink": _HERE,
            "cu": _HERE,
        }
        machine_of(place | {"options": self._options()}, self.folder, self.state).ray_node(self.state)

    @property
    def _is_control_unit(self) -> bool:
        return bool(self.data) or self.control_unit

    @property
    def folder(self) -> BoxFolder:
        """Folder of what the box keeps."""
        return BoxFolder(self.state / JOINED)

    def join(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Ask for a place, unless this box has one by this code; return the place.

        Returns
        -------
        ``box.json``; empty where the answer to a request file is missing.

        Raises
        ------
        ValueError
            If the code cannot be read, or the edge server refuses the box.
        """
        if self.state.is_dir():
            check_own_folder(self.state.resolve())
        # Adopt the place of a join that was killed after its answer.
        for path in self.state.glob("joining-*"):
            if (earlier := BoxFolder(path)).box_file.is_file():
                self._adopt(earlier)
        if not self.code:
            return self._present_box()
        # A missing folder is reported before the edge server is asked.
        if self.data and not Path(self.data).is_dir():
            raise FileNotFoundError(f"--data: no folder {self.data}; name the one that holds the cluster's text")
        file = Path(self.code) if Path(self.code).is_file() else None
        code = JoinCode.read(file.read_text(encoding="utf-8") if file else self.code)
        if self.folder.joined_by(code):
            return self._present_box()
        wish = Wish(
            kind=CU_KIND if self._is_control_unit else DEVICE_KIND,
            cluster=self.cluster,
            devices=tuple(self.devices),
            host=self.host,
            ray_port=self.ray_port,
            options=self._options(),
        )
        # Aside: the box keeps its earlier place until it has the new one.
        aside = BoxFolder(self.state / f"joining-{code.token_hash[:16]}")
        if file:
            box = join_by_files(aside, file, wish, say)
        else:
            box = join_deployment(aside, code, wish, self.wait, say)
        if box:
            self._adopt(aside)
        return box

    def _options(self) -> dict[str, Any]:
        """Return the options of the box's programs."""
        options = {name: getattr(self, name) for name in (*_CU_OPTIONS, *_SHARED_OPTIONS)}
        data = str(Path(self.data).resolve()) if self.data else ""
        lists = {name: list(options[name]) for name in ("allowed_apps", "allowed_modules")}
        return options | {"data": data} | lists

    def _adopt(self, aside: BoxFolder) -> None:
        durable.remove(self.folder.folder)
        durable.adopt_folder(aside.folder, self.folder.folder)
        durable.remove_leftovers(self.state)

    def _present_box(self) -> dict[str, Any]:
        """Return the box that has joined, with the options that this command changes."""
        box = self.folder.box()
        if self.host and self.host != box["host"]:
            raise ValueError(
                f"--host: {box['name']} has joined as {box['host']}, which its certificate is for, found {self.host}; "
                "let it join anew: collapipe revoke --box ID and collapipe invite on the edge server, and then "
                f"collapipe join CODE --host {self.host} here"
            )
        defaults = JoiningBox(code="", state=self.state)._options()
        changes = {name: value for name, value in self._options().items() if value != defaults[name]}
        options = box["options"] | changes
        if options.get("ray_port") != box["options"].get("ray_port"):
            raise ValueError(
                f"--ray-port: {box['name']} has joined with {box['options'].get('ray_port')}, which the others of its "
                f"cluster know, found {self.ray_port}; leave the option out, or let the box join anew by another code"
            )
        return self.folder.set_options(options) if options != box["options"] else box

    def up(self, say: Callable[[str], None]) -> int:
        """Join, and run the box's programs until told to end; return the exit code."""
        if not (box := self.join(say)):
            return 0
        say(f"starting {box['name']}; the next time: collapipe join --state {self.state}")
        while True:
            watch = MembershipWatch(self.folder, say)
            if not (reason := watch.reason()):
                try:
                    code = machine_of(box, self.folder, self.state, watch.reason).up(say)
                except (OSError, ValueError):
                    # The box may have waited for a control unit that its cluster no longer has.
                    if not watch.is_renewed:
                        raise
                finally:
                    watch.stop()
                if not watch.is_renewed:
                    return code
            elif not watch.is_renewed:
                raise JoinRefused(f"{box['name']} starts nothing: {reason}")
            box = self.folder.box()
            say(f"starting {box['name']} with its new secret, or for another control unit")


def machine_of(
    box: Mapping[str, Any], folder: BoxFolder, state: Path, until: Callable[[], str] = lambda: ""
) -> ControlUnitBox | DeviceBox:
    """Return the programs of a box that has joined."""
    # A box of an earlier release has neither metrics nor a door.
    options = {"metrics": "", "serve": ""} | box["options"]
    shared = {name: options[name] for name in _SHARED_OPTIONS}
    if box["kind"] == CU_KIND:
        return ControlUnitBox(
            cluster=int(box["cluster"]),
            host=str(box["host"]),
            server=str(box["superlink"]),
            certs=folder.files,
            state=state,
            devices=box["devices"],
            until=until,
            **{name: options[name] for name in _CU_OPTIONS},
            **shared,
        )
    return DeviceBox(
        devices=box["devices"],
        host=str(box["host"]),
        cu=str(box["cu"]),
        certs=DeviceFiles(folder.folder),
        state=state,
        until=until,
        **shared,
    )


class MembershipWatch:
    """Present state of a box on the edge server: asked once at first, and then in a thread until :meth:`stop`.

    When a box of the cluster is revoked, the others get another secret and other certificates, and start again.
    """

    def __init__(self, folder: BoxFolder, say: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._folder, self._say, self._poll_s = folder, say, poll_s
        self._authority = folder.files.ca.read_text(encoding="ascii")
        address = str(folder.box().get("joining", ""))
        # A box of an older release does not know the address.
        self._service = split_address("joining", address) if address else None
        self._ends = threading.Event()
        self._reason = ""
        self.is_renewed = False
        """True once the folder has new secrets."""

        def follow() -> None:
            while not self._ends.wait(self._poll_s) and not self.look():
                pass

        # A box that was revoked while it was off starts nothing.
        if not self.look():
            threading.Thread(target=follow, name="membership", daemon=True).start()

    def reason(self) -> str:
        """Return the reason to end the box's programs; empty as long as nothing has changed."""
        return self._reason

    def look(self) -> str:
        """Ask once; return :meth:`reason`."""
        if self._service is None:
            return self._reason
        try:
            answer = ask(self._service, self._folder.renewal_question(), self._authority)
            if answer["status"] == REVOKED:
                self._reason = "this box was revoked on the edge server"
            elif answer["status"] == APPROVED and self._folder.keep_of_cluster(answer):
                self.is_renewed = True
                self._reason = "a box of this cluster was revoked: there is a new secret, or another control unit"
        except NotThere:
            # The box goes on while the edge server is down.
            pass
        except (OSError, ValueError, LookupError) as error:
            # A disk that is full now need not be so the next time.
            self._say(f"warning: {error_text(error)}; asking again in {self._poll_s:g} s")
        return self._reason

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()
