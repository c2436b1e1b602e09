"""Detection of devices that froze or ended: by a missing life sign, and by the errors of a step.

A stopped process keeps its connections, so no error shows that it is stopped. A thread that does nothing else gives
the life sign, and the wait for it is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from client_pipeline.runtime.transport.faults import FROZEN, KILLED, PARTED, DeviceFault, NotFinite, PipelineError
from client_pipeline.runtime.transport.transport import TransportError

GRACE_S = 2.0
"""Time for all devices to answer once a step has failed: the first to say so is rarely the one at fault."""


def lost_among(signs: Mapping[int, Any], wait_s: float) -> dict[int, str]:
    """Return the kind of loss of each device that gives no life sign.

    Parameters
    ----------
    signs : reference to each device's answer, by device
    wait_s : how long to wait for all of them [s]
    """
    errors = errors_of_answers(signs, wait_s)
    lost_devices = [device for device in signs if device not in errors or errors[device] is not None]
    return {device: KILLED if device in errors else FROZEN for device in lost_devices}


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
    silent : asks devices for a life sign, see :func:`lost_among`
    """
    answered = errors_of_answers(references, 0.0 if failed is None else GRACE_S)
    if failed is None and any(answered.values()):
        answered = errors_of_answers(references, GRACE_S)
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


def errors_of_answers(references: Mapping[int, Any], wait_s: float) -> dict[int, BaseException | None]:
    """Return the devices that answer within ``wait_s`` seconds, each with its error, or None for a result."""
    if not references:
        return {}
    ready, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=wait_s)
    error_by_device: dict[int, BaseException | None] = {}
    for device, reference in references.items():
        if reference in ready:
            try:
                ray.get(reference)
                error_by_device[device] = None
            except ray.exceptions.RayTaskError as error:
                error_by_device[device] = error.cause or error
            except ray.exceptions.RayError as error:
                error_by_device[device] = error
    return error_by_device
