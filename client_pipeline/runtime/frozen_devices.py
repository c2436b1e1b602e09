"""Finding the devices that froze or ended: by their silence when they are asked, and by what is left of a step.

A process that is stopped keeps its connections, so nothing breaks that would tell of it: whether a device is there is
asked, of a thread that does nothing else, and what it may take to answer is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from client_pipeline.runtime.faults import FROZEN, KILLED, PARTED, DeviceFault, NotFinite, PipelineError
from client_pipeline.runtime.transport import TransportError

GRACE_S = 2.0
"""Time for all devices to answer once a step has failed: the first to say so is rarely the one at fault."""


def lost_among(signs: Mapping[int, Any], wait_s: float) -> dict[int, str]:
    """How those devices are lost that do not say that they are there.

    Parameters
    ----------
    signs : reference to each device's answer, by device
    wait_s : how long to wait for all of them [s]
    """
    if not signs:
        return {}
    ready, _ = ray.wait(list(signs.values()), num_returns=len(signs), timeout=wait_s)
    lost_devices = {}
    for device, sign in signs.items():
        if sign not in ready:
            lost_devices[device] = FROZEN
            continue
        try:
            ray.get(sign)
        except ray.exceptions.RayActorError:
            lost_devices[device] = KILLED
    return lost_devices


def who_answered(signs: Mapping[int, Any]) -> dict[int, bool]:
    """Which devices have said by now that they are there, and (False) whose process has ended. Does not wait."""
    if not signs:
        return {}
    ready, _ = ray.wait(list(signs.values()), num_returns=len(signs), timeout=0)
    answered = {}
    for device, sign in signs.items():
        if sign in ready:
            try:
                ray.get(sign)
                answered[device] = True
            except ray.exceptions.RayError:
                answered[device] = False
    return answered


def fault_of_step(
    cluster: str,
    references: Mapping[int, Any],
    failed: BaseException | None,
    silent: Callable[[Mapping[int, Any]], dict[int, str]],
) -> PipelineError | None:
    """Find the device at fault in a step, if there is one.

    A device that ended comes first, then one that failed by itself, then one that is silent while others have lost a
    neighbour.

    Parameters
    ----------
    cluster : name in the messages
    references : what each device will answer
    failed : what a thread of the control unit has met; None while all is well there
    silent : asks devices whether they are there, see :func:`lost_among`
    """
    answered = _errors_of_answers(references, 0.0 if failed is None else GRACE_S)
    if failed is None and any(answered.values()):
        answered = _errors_of_answers(references, GRACE_S)
    faults = {device: error for device, error in answered.items() if error is not None}
    if ended := [d for d, error in faults.items() if isinstance(error, ray.exceptions.RayActorError)]:
        text = f"{cluster}: device {ended[0]}: its process ended: {faults[ended[0]]}"
        return DeviceFault(text, KILLED, tuple(ended))
    for device, error in faults.items():
        if not isinstance(error, TransportError):
            text = f"{cluster}: device {device}: it failed: {error}"
            return NotFinite(text) if isinstance(error, NotFinite) else PipelineError(text)
    lost = next(iter(faults.values()), failed if isinstance(failed, TransportError) else None)
    if lost is None:
        return None
    lost_by_device = silent(references)
    for kind, happened in ((KILLED, "its process ended"), (FROZEN, "no answer")):
        if lost_devices := tuple(device for device, how in lost_by_device.items() if how == kind):
            text = f"{cluster}: device {lost_devices[0]}: {happened}; a neighbour says: {lost}"
            return DeviceFault(text, kind, lost_devices)
    return DeviceFault(f"{cluster}: the devices lost each other: {lost}", PARTED)


def _errors_of_answers(references: Mapping[int, Any], wait_s: float) -> dict[int, BaseException | None]:
    """Devices that have answered within ``wait_s``, with their error if it was one."""
    ready, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=wait_s)
    error_by_device: dict[int, BaseException | None] = {}
    for device, reference in references.items():
        if reference in ready:
            try:
                ray.get(reference)
                error_by_device[device] = None
            except ray.exceptions.RayActorError as error:
                error_by_device[device] = error
            except ray.exceptions.RayTaskError as error:
                error_by_device[device] = error.cause or error
    return error_by_device
