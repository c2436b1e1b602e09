"""The measured network: a round's problem with measured times, and predictions of a plan's time.

The problem of a round has times of a TEB and of a link that grow with a micro-batch's samples; each device gets its own
two numbers. A device that never trained has no measured time. It gets its declared time, scaled by the median ratio of
its cluster's devices, or of all clusters'. The problem leaves out the decoder's stream and a step's time beside its
pipeline; only the prediction has them. It is the event simulator's, on the action lists that the runtime executes, with
the decoder as the last stage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes, whole_blocks
from client_pipeline.system.radio import Array
from client_pipeline.timetable.event_simulator import simulate_pipeline
from strategies.dssda.instance import Cluster, Instance
from strategies.estimation.cluster_times import (
    DEVICE,
    LINK,
    OUTLET,
    STEP,
    STREAM,
    UPLOAD,
    ClusterTimes,
    Declared,
    NoticedChange,
)

_LEAST_S = 1e-12
"""Per sample: a rate of it is finite [s]."""


class Prediction(NamedTuple):
    """Predicted time of a cluster's round under a plan."""

    pipeline_s: float
    """One batch [s]."""
    train_s: float
    """All local steps [s]."""
    deviation: float
    """Relative standard deviation of the slowest stage."""


class MeasuredNetwork:
    """Measured times of all clusters.

    Parameters
    ----------
    num_clusters : N
    time_scale : of paced devices, whose links keep the sender busy; None: devices run as fast as they go
    """

    def __init__(self, num_clusters: int, time_scale: float | None = None) -> None:
        self.paced = time_scale is not None
        self._scale = 1.0 if time_scale is None else time_scale
        self.clusters = [ClusterTimes(self._scale) for _ in range(num_clusters)]

    def of(self, clusters: Sequence[int]) -> MeasuredNetwork:
        """Return some of the clusters, numbered anew."""
        part = MeasuredNetwork(0, self._scale if self.paced else None)
        part.clusters.extend(self.clusters[n] for n in clusters)
        return part

    def observe(
        self, round_: int, cluster: int, report: Mapping[str, Any], declared: Instance, planned_upload_s: float | None
    ) -> list[NoticedChange]:
        """Take the report of a cluster that trained; returns what has changed."""
        upload = self.upload_seconds(report)
        if upload is not None and self.paced:
            # The scenario changes the radio in every round: only the ratio to the planned time is followed.
            upload = upload / planned_upload_s if planned_upload_s else None
        return self.clusters[cluster].observe(
            round_,
            report,
            num_batches=declared.steps,
            declared=declared_times(declared, cluster),
            upload=upload,
        )

    def upload_seconds(self, report: Mapping[str, Any]) -> float | None:
        """Return the time of the weights down and the update up [s]; None if unknown."""
        if self.paced:
            paced_s = report.get("paced_s")
            return None if paced_s is None else max(float(paced_s) - float(report["train_s"]), 0.0) / self._scale
        exchange_s = report.get("exchange_s")
        if exchange_s is None:
            return None
        return float(
            max(float(exchange_s) - sum(float(report[key]) for key in ("prepare_s", "train_s", "collect_s")), 0.0)
        )

    def pipeline_seconds(self, report: Mapping[str, Any]) -> float:
        """Return the time of a report's batch, from the first device's first pass to its last [s]."""
        return float(report["measured"]["pipeline_s"]) / self._scale

    def train_seconds(self, report: Mapping[str, Any]) -> float:
        """Return the time of a report's local steps [s]."""
        return float(report["train_s"]) / self._scale

    def instance(self, declared: Instance) -> Instance:
        """Return a round's problem with measured times, each of them growing with the samples."""
        if not any(cluster.rounds for cluster in self.clusters):
            return declared
        per_sample = 1.0 if declared.o_b_scaling == "sample" else 1.0 / declared.b
        bits = 1.0 if declared.act_scaling == "sample" else 1.0 / declared.b
        # A deployment's upload is measured as a whole; else the median m stands for all.
        uploads = bits * statistics.median(declared.m_set) if declared.m_decides_upload else 1.0
        knows_uploads = not self.paced and any(cluster[UPLOAD, 0] for cluster in self.clusters)
        as_measured = replace(
            declared,
            o_b=declared.o_b * per_sample,
            o_b_scaling="sample",
            t0=0.0,
            z_bits=declared.z_bits * bits,
            g_bits=declared.g_bits * bits,
            act_scaling="sample",
            z_enc_bits=0.0 if knows_uploads else declared.z_enc_bits * uploads,
            lat=0.0,
        )
        return replace(
            as_measured,
            clusters=tuple(self._cluster(declared, as_measured, n) for n in range(declared.num_clusters)),
        )

    def _cluster(self, declared: Instance, as_measured: Instance, n: int) -> Cluster:
        cluster, believed = declared.clusters[n], declared_times(declared, n)
        work, bits = as_measured.o_f + as_measured.o_b, as_measured.z_bits + as_measured.g_bits
        away = self._away(declared, n)
        devices = []
        for k, device in enumerate(cluster.devices):
            teb, link = (self._time(n, kind, k, believed, declared) for kind in (DEVICE, LINK))
            speed = work / max(teb.sample_s, _LEAST_S)
            # A signal as strong as its interference: the rate is the bandwidth, as in the file of a profile.
            power = device.p if device.p > 0 else 1.0
            devices.append(
                replace(
                    device,
                    phi=speed / device.f,
                    t0=teb.fixed_s,
                    p=power,
                    B=max(bits, _LEAST_S) / max(link.sample_s, _LEAST_S),
                    h=1e6,
                    I=1e6 * power,
                    lat=link.fixed_s,
                    mem=0.0 if k in away else device.mem,
                )
            )
        return self._with_upload(replace(cluster, devices=tuple(devices)), as_measured, n)

    def count_on_lost(self, clusters: Iterable[int]) -> None:
        """Use lost devices again in clusters that have no plan without them, as with even or fixed segments.

        Such a cluster would never train again, and so never report that its devices are back. Its control unit plans
        anew if they are still lost.
        """
        for n in clusters:
            self.clusters[n].away.clear()

    def _away(self, declared: Instance, n: int) -> set[int]:
        """Return the lost devices if the others hold the TEBs; else none, and the cluster waits for all."""
        away = self.clusters[n].away
        left = [device.mem for k, device in enumerate(declared.clusters[n].devices) if k not in away]
        held = sum(whole_blocks(memory, declared.gamma0, declared.L) for memory in left)
        return away if held >= declared.L else set()

    def _time(
        self, n: int, kind: str, k: int, believed: Mapping[tuple[str, int], Declared], instance: Instance
    ) -> Declared:
        declared = self.clusters[n][kind, k]
        if declared is not None:
            return Declared(declared.fixed_s, declared.sample_s)
        ratio = statistics.median(self._ratios(n, kind, instance) or self._ratios(None, kind, instance) or [1.0])
        return Declared(ratio * believed[kind, k].fixed_s, ratio * believed[kind, k].sample_s)

    def _ratios(self, cluster: int | None, kind: str, instance: Instance) -> list[float]:
        """Return the ratios of measured to declared times, at a quarter of the batch."""
        samples = max(instance.b / 4, 1.0)
        ratios = []
        for n in range(instance.num_clusters) if cluster is None else [cluster]:
            believed = declared_times(instance, n)
            for (of, k), time in self.clusters[n].times.items():
                if of == kind and (of, k) in believed:
                    declared_s = believed[of, k].fixed_s + samples * believed[of, k].sample_s
                    ratios += [time.seconds(samples) / declared_s] if declared_s > 0 else []
        return ratios

    def _with_upload(self, cluster: Cluster, instance: Instance, n: int) -> Cluster:
        """Set the bits such that an upload takes its measured time; in a deployment alike on every channel."""
        times = [other[UPLOAD, 0] for other in ([self.clusters[n]] if self.clusters[n][UPLOAD, 0] else self.clusters)]
        known = [time.seconds(0.0) for time in times if time is not None]
        if not known:
            return cluster
        taken, up = statistics.median(known), cluster.up
        if self.paced:
            return replace(cluster, up=replace(up, t_bits=up.t_bits * taken))
        h, i, b = ((float(np.median(column)),) * len(column) for column in (cluster.h, cluster.I, cluster.B))
        one_channel = replace(cluster, h=h, I=i, B=b)
        rate = float(replace(instance, clusters=(one_channel,)).uplink_rate(0, up.Pmax, 0))
        return replace(one_channel, up=replace(up, t_bits=taken * rate))

    def predict(self, instance: Instance, n: int, plan: ClusterPlan) -> Prediction:
        """Predict the time of a cluster's local steps under a plan.

        Parameters
        ----------
        instance : measured, or declared as long as nothing is measured
        n : the cluster
        plan : of it
        """
        cluster, order, times = self.clusters[n], plan.devices, declared_times(instance, n)
        samples = np.array(micro_batch_sizes(instance.b, plan.m), dtype=np.float64)
        blocks = np.array([plan.delta[k] for k in order], dtype=np.float64)[:, None]
        share = instance.o_f / (instance.o_f + instance.o_b) if instance.o_f + instance.o_b > 0 else 0.5
        teb_s, link_s = (
            np.array([times[kind, k].fixed_s + times[kind, k].sample_s * samples for k in order])
            for kind in (DEVICE, LINK)
        )
        link_s[-1] = self._affine(cluster[OUTLET, 0], samples)
        decoder_s = self._affine(cluster[STREAM, 0], samples)[None, :]
        # The first input is there when the batch begins; each later one comes a link's time after the one before.
        input_s = np.cumsum(self._affine(cluster.inlet(order[0]), samples))
        stages = blocks * teb_s
        pipeline_s = simulate_pipeline(
            plan.schedule,
            np.vstack([share * stages, decoder_s]),
            np.vstack([(1 - share) * stages, np.zeros_like(decoder_s)]),
            link_s / 2,
            link_s / 2,
            np.vstack([instance.weight_share * (1 - share) * stages, np.zeros_like(decoder_s)]),
            links="blocking" if self.paced else "overlapping",
            answers_at_once=True,
            input_s=input_s - input_s[0],
        ).makespan * math.exp(cluster.model_error)
        beside = cluster[STEP, 0]
        beside_s = 0.0 if beside is None else beside.seconds(0.0)
        slowest = order[int(np.argmax(stages.sum(axis=1) + link_s.sum(axis=1)))]
        time = cluster[DEVICE, slowest]
        deviation = 1.0 if time is None else time.deviation(float(samples[0]))
        return Prediction(pipeline_s, instance.steps * (pipeline_s + beside_s), deviation)

    @staticmethod
    def _affine(time: Any, samples: Array) -> Array:
        return np.zeros_like(samples) if time is None else time.fixed_s + time.sample_s * samples

    def to_dict(self) -> list[Any]:
        """Return the times of all clusters as JSON values."""
        return [cluster.to_dict() for cluster in self.clusters]

    def restore(self, raw: Iterable[Mapping[str, Any]]) -> None:
        """Go on from :meth:`to_dict`."""
        self.clusters = [ClusterTimes.from_dict(cluster, self._scale) for cluster in raw]


def declared_times(instance: Instance, n: int) -> dict[tuple[str, int], Declared]:
    """Return the times of a cluster's TEBs and links as a round's problem declares them."""
    devices = instance.device_arrays(n)
    speed = devices.phi * devices.f
    of_batch = instance.o_b_scaling == "microbatch"
    bits = instance.z_bits + instance.g_bits
    times: dict[tuple[str, int], Declared] = {}
    for k in range(len(speed)):
        fixed_s = instance.t0 + float(devices.t0[k]) + (instance.o_b / speed[k] if of_batch else 0.0)
        sample_s = (instance.o_f + (0.0 if of_batch else instance.o_b)) / speed[k]
        times[DEVICE, k] = Declared(float(fixed_s), float(sample_s))
        link_s, latency_s = bits / float(devices.rate[k]), instance.lat + float(devices.lat[k])
        per_sample = instance.act_scaling == "sample"
        times[LINK, k] = Declared(latency_s + (0.0 if per_sample else link_s), link_s if per_sample else 0.0)
    return times
