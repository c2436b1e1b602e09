"""The devices of a cluster as the stages of a model that answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from torch import Tensor

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.devices.device_pool import WATCH_INTERVAL_S
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.stage.answering import AnswerStep
from client_pipeline.runtime.transport.deadline import LEAST_S, ProgressDeadline
from client_pipeline.runtime.transport.faults import DeviceFault

_TRIES = 3
"""Times that devices may be lost while they are brought up."""


class DeviceStages:
    """Stages on the devices of a pipeline; a step goes from device to device without the control unit.

    Parameters
    ----------
    pipeline : the cluster's
    plan_for : gives the plan for the devices that are there; raises ``ValueError`` if they cannot hold the TEBs
    num_devices : K
    weights : of each TEB, what is not frozen
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan_for: Callable[[Sequence[int]], ClusterPlan],
        num_devices: int,
        weights: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        self._pipeline, self._plan_for, self._num_devices, self._weights = pipeline, plan_for, num_devices, weights
        self._threads = ThreadPoolExecutor(num_devices, thread_name_prefix="answers")
        self._is_closed = threading.Event()
        self._start()
        threading.Thread(target=self._keep_awake, name="awake", daemon=True).start()

    @property
    def num_stages(self) -> int:
        """Devices that have a segment."""
        return len(self._pipeline.segments)

    def run(self, step: AnswerStep, x_RTD: Tensor) -> Future[Tensor]:
        """Pass new tokens through all TEBs; the future fails where a device does."""
        return self._threads.submit(self._run, [segment.device for segment in self._pipeline.segments], step, x_RTD)

    def _run(self, devices: Sequence[int], step: AnswerStep, x_RTD: Tensor) -> Tensor:
        pool, states = self._pipeline.pool, x_RTD
        for device in devices:
            # States go from device to device. A call that waits for another's answer would keep back life signs behind
            # it: Ray sends the calls of an actor in their order.
            reference: Any = pool[device].answer.remote(step, states)
            deadline = ProgressDeadline(self._pipeline.runtime.timeout, first_s=LEAST_S)
            while not ray.wait([reference], timeout=WATCH_INTERVAL_S, fetch_local=False)[0]:
                pool.look_after([device], deadline, "answering")
            states = reference
        answer: Tensor = pool.answers({devices[-1]: states}, "answering")[devices[-1]]
        return answer

    def drop(self, requests: Sequence[str]) -> None:
        """Forget the keys and values of requests."""
        actors = self._pipeline.pool.handles()
        for segment in self._pipeline.segments:
            # One that is lost has forgotten them.
            if segment.device in actors:
                actors[segment.device].forget.remote(list(requests))

    def _keep_awake(self) -> None:
        """Call the devices now and then, as long as nobody asks: without a call they end themselves."""
        while not self._is_closed.wait(self._pipeline.runtime.actor_idle / 4):
            for actor in self._pipeline.pool.handles().values():
                actor.forget.remote([])

    def bring_up(self) -> None:
        """Bring all TEBs up on the devices that are left.

        Raises
        ------
        RuntimeError
            If they cannot hold the TEBs, or are lost again and again.
        """
        self._pipeline.give_up_silent()
        self._start()

    def _start(self) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                plan = self._plan_for(self._pipeline.usable(range(self._num_devices)))
                self._pipeline.apply_plan(plan)
                self._pipeline.load(self._weights)
                for segment in self._pipeline.segments:
                    self._pipeline.pool[segment.device].forget.remote(None)
                return
            except ValueError as error:
                raise RuntimeError(str(error)) from error
            except DeviceFault:
                if not tries_left:
                    raise
                self._pipeline.give_up_silent()

    def close(self) -> None:
        """End the devices."""
        self._is_closed.set()
        self._threads.shutdown(wait=False)
        self._pipeline.close()
