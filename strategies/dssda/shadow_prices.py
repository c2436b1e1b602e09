"""What more of a resource is worth in a round: the round is solved again with it, and both solves are certified.

The number of matched clusters stays min(N, J) of the round as it was: another channel is for whoever is best matched
with it, and does not make another cluster train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from strategies.dssda.answer import Answer
from strategies.dssda.instance import Cluster, Device, Instance
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import segment_table, segment_tables

GB, MHZ = 1e9, 1e6


class Price(NamedTuple):
    """Worth of one more unit of a resource."""

    resource: str
    """``memory`` (1 GB more), ``link`` or ``uplink`` (1 MHz more), ``channel``, ``device`` (one more), or
    ``replaced``."""
    cluster: int | None
    """None: of the whole network."""
    device: int | None
    """None: of the whole cluster."""
    objective: float
    """Change of the objective, by the two plans; infinite where there is no plan with it."""
    least: float
    """The change of the two optima is no less, and"""
    most: float
    """no more than this: by the certificates of both solves; infinite where one has none."""
    seconds: float
    """Change of the round's latency tau [s], which may grow where the objective falls."""


Plan = Callable[[Instance], Answer]
"""Planner of a round."""


def shadow_prices(instance: Instance, plan: Plan | None = None) -> list[Price]:
    """Solve a round with 1 GB, 1 MHz, a channel or a device more, and with each device as fast as the fastest.

    Parameters
    ----------
    instance : a round that has a plan
    plan : plans a round; None: :func:`~strategies.dssda.planner.plan_round`. What another one does not certify has
        infinite limits.

    Returns
    -------
    For each device ``memory``, ``link`` and ``replaced`` (by another of the network's fastest, with a link like its
    own); for each cluster ``uplink`` (all its channels) and ``device`` (another of its fastest); then ``channel``, with
    each cluster's mean gain and interference. Where the planner divides a band, ``uplink`` is of the whole band, and
    there is no ``channel``.

    Raises
    ------
    ValueError
        If the round has no plan.
    """
    tables = segment_tables(instance) if plan is None else []
    base = plan_round(instance, tables=tables) if plan is None else plan(instance)
    if base.objective is None:
        raise ValueError(f"shadow prices: expected a round with a plan, found {'; '.join(map(str, base.infeasible))}")

    def price(resource: str, cluster: int | None, device: int | None, changed: Instance) -> Price:
        if resource == "channel":
            answer = _with_matched(changed, instance.num_matched, plan or partial(plan_round, tables=tables))
        elif plan is not None:
            answer = plan(changed)
        else:
            # The other clusters' segments are known, and no channel changes any.
            known = [
                segment_table(changed, n) if n == cluster and resource != "uplink" else table
                for n, table in enumerate(tables)
            ]
            answer = plan_round(changed, tables=known)
        return Price(resource, cluster, device, *_change(base, answer))

    return [price(*entry) for entry in _changes(instance)]


def _changes(instance: Instance) -> Iterator[tuple[str, int | None, int | None, Instance]]:
    """Give the resource, its place, and the round with it."""
    clusters = instance.clusters

    def in_cluster(n: int, **values: Any) -> Instance:
        return replace(instance, clusters=(*clusters[:n], replace(clusters[n], **values), *clusters[n + 1 :]))

    def with_device(n: int, k: int, **values: float) -> Instance:
        own = clusters[n].devices
        return in_cluster(n, devices=(*own[:k], replace(own[k], **values), *own[k + 1 :]))

    fastest = max((device for c in clusters for device in c.devices), key=_speed)
    of_compute = {name: getattr(fastest, name) for name in ("phi", "f", "kappa", "mem", "Emax", "t0")}
    for n, cluster in enumerate(clusters):
        for k, device in enumerate(cluster.devices):
            yield "memory", n, k, with_device(n, k, mem=device.mem + GB)
            yield "link", n, k, with_device(n, k, B=device.B + MHZ)
            yield "replaced", n, k, with_device(n, k, **of_compute)
        yield "device", n, None, in_cluster(n, devices=(*cluster.devices, max(cluster.devices, key=_speed)))
        if instance.band_hz is None:
            yield "uplink", n, None, in_cluster(n, B=tuple(band + MHZ for band in cluster.B))
    if instance.band_hz is None:
        yield "channel", None, None, replace(instance, clusters=tuple(map(_with_channel, clusters)))
    else:
        yield "uplink", None, None, replace(instance, band_hz=instance.band_hz + MHZ)


def _speed(device: Device) -> float:
    return device.phi * device.f


def _with_channel(cluster: Cluster) -> Cluster:
    return _with_columns(cluster, lambda column: (*column, sum(column) / len(column)))


def _without_channel(cluster: Cluster, j: int) -> Cluster:
    return _with_columns(cluster, lambda column: column[:j] + column[j + 1 :])


def _with_columns(cluster: Cluster, of: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Cluster:
    return replace(cluster, h=of(cluster.h), I=of(cluster.I), B=of(cluster.B))


def _with_matched(instance: Instance, num_matched: int, plan: Plan) -> Answer:
    """Plan with so many clusters matched, which may be one channel less than there are."""
    if instance.num_matched == num_matched:
        return plan(instance)

    def without(j: int) -> Answer:
        parts = (_without_channel(cluster, j) for cluster in instance.clusters)
        return plan(replace(instance, clusters=tuple(parts)))

    # One channel is left out, whichever is the best to leave; the old ones alone have a plan.
    answers = [answer for j in range(instance.num_channels) if (answer := without(j)).objective is not None]
    best = min(answers, key=lambda answer: answer.objective or 0.0)
    bounds = [answer.lower_bound for answer in answers if answer.lower_bound is not None]
    return replace(best, lower_bound=min(bounds) if len(bounds) == len(answers) else None)


def _change(base: Answer, answer: Answer) -> tuple[float, float, float, float]:
    """Return the objective's change, the least and the most that it may be, and the change of the latency [s]."""
    infinite = float("inf")
    assert base.objective is not None and base.latency_s is not None
    if answer.objective is None or answer.latency_s is None:
        return infinite, infinite, infinite, infinite
    least = -infinite if answer.lower_bound is None else answer.lower_bound - base.objective
    most = infinite if base.lower_bound is None else answer.objective - base.lower_bound
    return answer.objective - base.objective, least, most, answer.latency_s - base.latency_s
