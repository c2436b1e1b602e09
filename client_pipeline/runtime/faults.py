"""Who is at fault when a local step does not complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from client_pipeline.runtime.transport import TransportError

GRACE_S = 2.0
"""Time for all devices to answer once a step has failed: the first to say so is rarely the one at fault."""


class PipelineError(RuntimeError):
    """A local step did not complete; the message names the device and the cause."""


def device_fault(name: str, reports: Mapping[int, Any], failed: BaseException | None) -> PipelineError | None:
    """Find the device at fault, if there is one.

    A device that ended comes first, then one that failed by itself, then one that is silent while others have lost a
    neighbour.

    Parameters
    ----------
    name : of the pipeline, for the message
    reports : what each device will answer, by its index
    failed : what a thread of the control unit has met; None while all is well there
    """
    answered = _answered(reports, 0.0 if failed is None else GRACE_S)
    if failed is None and any(answered.values()):
        answered = _answered(reports, GRACE_S)
    faults = {device: error for device, error in answered.items() if error is not None}
    for device, error in faults.items():
        if isinstance(error, ray.exceptions.RayActorError):
            return PipelineError(f"{name}: device {device}: its process ended: {error}")
    for device, error in faults.items():
        if not isinstance(error, TransportError):
            return PipelineError(f"{name}: device {device}: it failed: {error}")
    lost = next(iter(faults.values()), failed if isinstance(failed, TransportError) else None)
    if lost is None:
        return None
    silent = [device for device in reports if device not in answered]
    if silent:
        return PipelineError(f"{name}: device {silent[0]}: no answer; a neighbour says: {lost}")
    return PipelineError(f"{name}: the devices lost each other: {lost}")


def _answered(reports: Mapping[int, Any], wait_s: float) -> dict[int, BaseException | None]:
    """Devices that have answered within ``wait_s``, with their error if it was one."""
    ready, _ = ray.wait(list(reports.values()), num_returns=len(reports), timeout=wait_s)
    answered: dict[int, BaseException | None] = {}
    for device, reference in reports.items():
        if reference in ready:
            try:
                ray.get(reference)
                answered[device] = None
            except ray.exceptions.RayActorError as error:
                answered[device] = error
            except ray.exceptions.RayTaskError as error:
                answered[device] = error.cause or error
    return answered
