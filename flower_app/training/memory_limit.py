"""What a limit of the devices' memory must find before any node is asked: a model that fits."""

from __future__ import annotations

import math

from client_pipeline.system.scenario import Scenario


def check_memory_limit(limit: str, costs: str, scenario: Scenario) -> None:
    """Refuse devices whose memory is a hard limit and does not hold the model.

    Parameters
    ----------
    limit : ``runtime.memory-limit``
    costs : the run's ``costs``
    scenario : the run's network; without costs of the model, which nobody knows before it is there, less is checked

    Raises
    ------
    ValueError
        With what a TEB needs, and what the devices have.
    """
    if limit == "none":
        return
    if costs != "model":
        raise ValueError(
            f"runtime.memory-limit: {limit} stops a device that needs more than was planned, so the plan must go by "
            f'what the model needs: expected costs = "model", found {costs!r}'
        )
    memory, num_blocks, batch_size = scenario.costs.memory, scenario.planner.num_blocks, scenario.planner.batch_size
    if memory is None:
        return
    block, beside = memory.block_memory(batch_size), memory.device_memory(batch_size)
    for number, devices in enumerate(scenario.clusters):
        held = [max(math.floor((device.memory - beside) / block), 0) for device in devices]
        if sum(held) < num_blocks:
            sizes = ", ".join(f"{device.memory / 1e6:.0f}" for device in devices)
            raise ValueError(
                f"runtime.memory-limit: cluster {number}: its devices of {sizes} MB hold {sum(held)} of the model's "
                f"{num_blocks} TEBs: a TEB needs {block / 1e6:.1f} MB ({memory.held_bytes / 1e6:.1f} of weights and "
                f"states, the rest for the activations of {batch_size} examples), and a device {beside / 1e6:.1f} MB "
                "beside them; lower batch-size or data.max-length, use fewer bits (model.base-dtype) or devices with "
                "more memory"
            )
