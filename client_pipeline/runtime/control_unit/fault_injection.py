"""Seeded injection of the faults of ``[faults]`` into the run's own processes.

Seed, round and cluster alone decide a fault's local step, micro-batch and device. The rate of one kind does not change
the faults of another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from client_pipeline.link.base import DecoderLink, ForwardingLink
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.control_unit.fault_files import note_injected
from client_pipeline.runtime.fault_config import INJECTED_KINDS, FaultConfig

logger = logging.getLogger("collapipe.faults")

_SERVER_DRAW = 7
_MOMENTS = ("F", "G", "B")
_DUTY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """One fault that is to come."""

    kind: str
    step: int
    """Local step, from 1."""
    moment: str
    """Arrival at the control unit at which it strikes: see ``batch_run.Progress``."""
    place: float
    """Place in the step's micro-batches, from 0 to 1."""
    device_share: float
    """Place of the device in the plan, from 0 to 1."""


def draw_faults(config: FaultConfig, round_: int, cluster: int, local_steps: int) -> list[InjectedFault]:
    """Draw the faults of a cluster in a round; ``server`` is not among them."""
    faults = []
    for number, kind in enumerate(INJECTED_KINDS):
        draw = np.random.default_rng([config.seed, round_, cluster, number])
        hit, place, device_share = draw.random(3)
        step, moment = int(draw.integers(1, local_steps + 1)), _MOMENTS[int(draw.integers(len(_MOMENTS)))]
        if kind != "server" and hit < getattr(config, kind):
            faults.append(
                InjectedFault(kind=kind, step=step, moment=moment, place=float(place), device_share=float(device_share))
            )
    return faults


def server_dies(config: FaultConfig, round_: int) -> float | None:
    """Draw the kill of the server in a round: the share of the round's time after which it strikes, 0 to 1."""
    hit, place = np.random.default_rng([config.seed, round_, _SERVER_DRAW]).random(2)
    return float(place) if hit < config.server else None


class FaultInjector:
    """One control unit's faults.

    Parameters
    ----------
    config : the table
    cluster : its index
    local_steps : of a round
    folder : where each fault is noted before it comes; None: nowhere
    """

    def __init__(self, config: FaultConfig, cluster: int, local_steps: int, folder: Path | None = None) -> None:
        self.config = config
        self._folder = folder
        self._round = 0
        self._cluster, self._local_steps = cluster, local_steps
        self._due_faults: list[InjectedFault] = []
        self._start_times: dict[int, float] = {}
        self._link: DecoderLink | None = None
        self._slowing: list[subprocess.Popen[bytes]] = []
        self._shells: list[subprocess.Popen[bytes]] = []
        """Processes that hold a device, for this round or longer."""

    def begin_round(self, round_: int, link: DecoderLink) -> DecoderLink:
        """Draw the round's faults; returns the link that the round is to use."""
        self._start_times.clear()
        self._round = round_
        self._due_faults = draw_faults(self.config, round_, self._cluster, self._local_steps) if self.config.any else []
        self._link = link
        for fault in self._due_faults:
            logger.warning("cluster %s, round %s: faults to inject: %s", self._cluster, round_, fault)
        poisoned = [fault for fault in self._due_faults if fault.kind == "nan"]
        self._due_faults = [fault for fault in self._due_faults if fault.kind != "nan"]
        return _PoisonedLink(link, poisoned[0], self._note) if poisoned else link

    def end_round(self) -> None:
        """Release the devices that were slow."""
        for shell in self._slowing:
            shell.terminate()
        # Those that have ended are collected here, or they would stay as zombies.
        self._shells = [shell for shell in [*self._shells, *self._slowing] if shell.poll() is None]
        self._slowing = []

    def since(self, device: int) -> float | None:
        """Return the time at which a device's fault was injected in this round [s, monotonic]."""
        return self._start_times.get(device)

    def arrived(
        self, step: int, moment: str, micro_batch: int, num_micro_batches: int, pids: Mapping[int, int]
    ) -> None:
        """Inject the faults that are due at this moment.

        Parameters
        ----------
        step : local step
        moment, micro_batch : what has arrived at the control unit
        num_micro_batches : m
        pids : process of each device that the plan uses and that runs on this machine, by device
        """
        for fault in list(self._due_faults):
            is_due = fault.step == step and fault.moment == moment
            if is_due and micro_batch == int(fault.place * num_micro_batches):
                self._due_faults.remove(fault)
                self._strike(fault, pids)

    def _strike(self, fault: InjectedFault, pids: Mapping[int, int]) -> None:
        if fault.kind == "cluster":
            self._note(fault)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind in ("stream", "partition"):
            # A cluster that trains its decoder itself has no stream.
            if self._link is not None and self._link.is_remote:
                self._note(fault)
                self._link.cut(self.config.partition_seconds if fault.kind == "partition" else 0.0)
        elif devices := sorted(pids.keys() - self._start_times.keys()):
            device = devices[min(int(fault.device_share * len(devices)), len(devices) - 1)]
            self._note(fault, device)
            self._start_times[device] = time.monotonic()
            if fault.kind == "device":
                # It may have ended by itself.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[device], signal.SIGKILL)
            elif fault.kind == "freeze":
                self._shells.append(_shell(_FREEZE, pids[device], self.config.freeze_seconds))
            else:
                running = _DUTY_S / self.config.slow_factor
                self._slowing.append(_shell(_SLOW, pids[device], os.getpid(), _DUTY_S - running, running))

    def _note(self, fault: InjectedFault, device: int | None = None) -> None:
        note_injected(self._folder, fault.kind, self._round, cluster=self._cluster, device=device, step=fault.step)


_FREEZE = """kill -STOP $1 && sleep $2; kill -CONT $1"""
_SLOW = """
trap 'kill -CONT $1; exit' TERM
while kill -0 $2 && kill -STOP $1; do sleep $3; kill -CONT $1; sleep $4; done
kill -CONT $1
"""


def _shell(script: str, *arguments: float) -> subprocess.Popen[bytes]:
    """Run a script that outlives this process: a stopped device must continue even if the control unit is killed."""
    texts = (str(a) if isinstance(a, int) else f"{a:.6f}" for a in arguments)
    command = ["sh", "-c", script, "sh", *texts]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


class _PoisonedLink(ForwardingLink):
    """A link on which the activations of one micro-batch become NaN."""

    def __init__(self, link: DecoderLink, fault: InjectedFault, note: Callable[[InjectedFault], None]) -> None:
        super().__init__(link)
        self._fault, self._note = fault, note
        self._step, self._size = 0, 1

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        self._step, self._size = step.step, num_micro_batches
        self.link.begin_step(step, num_micro_batches, total_weight)

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        if self._step == self._fault.step and micro_batch == int(self._fault.place * self._size):
            self._note(self._fault)
            hidden_BTD = torch.full_like(hidden_BTD, torch.nan)
        self.link.send(micro_batch, hidden_BTD, mask_BT, targets)
