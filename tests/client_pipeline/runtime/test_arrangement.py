"""Actors of a simulation: the devices that share one, and the reasons."""

import re
from collections import Counter

import pytest

from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.ray.arrangement import Arrangement, arrange

DEFAULT = [6, 6, 6]


def actors(num_devices=DEFAULT, cores=2, paced=False, faults=None, **runtime):
    arrangement, _ = arrange(
        RuntimeConfig(**runtime), FaultConfig(**(faults or {})), paced=paced, num_devices=num_devices, cores=cores
    )
    return arrangement.device_actors, arrangement.cluster_actors


@pytest.mark.parametrize(
    ("num_devices", "cores", "expected"),
    [
        (DEFAULT, 2, (2, 2)),
        (DEFAULT, 1, (1, 1)),
        (DEFAULT, 17, (17, 3)),
        # As many cores as devices: sharing would gain nothing.
        (DEFAULT, 18, (0, 0)),
        ([2], 2, (0, 0)),
        ([3], 2, (2, 1)),
        ([10] * 100, 8, (8, 8)),
    ],
)
def test_by_default_there_is_an_actor_for_each_core(num_devices, cores, expected):
    assert actors(num_devices, cores) == expected


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ({"devices_per_actor": 1}, (0, 0)),
        ({"devices_per_actor": 1, "clusters_per_actor": 3}, (0, 1)),
        ({"devices_per_actor": 5}, (4, 2)),
        ({"devices_per_actor": 100}, (1, 2)),
        ({"clusters_per_actor": 1}, (2, 0)),
        ({"clusters_per_actor": 2}, (2, 2)),
    ],
)
def test_keys_say_how_many_share_at_most(runtime, expected):
    assert actors(**runtime) == expected


@pytest.mark.parametrize("fault", ["device", "freeze", "slow"])
def test_what_ends_or_stops_single_devices_keeps_them_apart(fault):
    assert actors(faults={fault: 0.1}) == (0, 0)
    with pytest.raises(ValueError, match=r"runtime.devices-per-actor = 3: faults.device, .*; set .* to 1, or to 0"):
        actors(faults={fault: 0.1}, devices_per_actor=3)
    assert actors(faults={fault: 0.1}, devices_per_actor=1) == (0, 0)


def test_what_ends_control_units_keeps_them_apart():
    assert actors(faults={"cluster": 0.1}) == (2, 0)
    with pytest.raises(ValueError, match=r"runtime.clusters-per-actor = 2: faults.cluster end"):
        actors(faults={"cluster": 0.1}, clusters_per_actor=2)


def test_cut_streams_and_poison_keep_nobody_apart():
    assert actors(faults={"stream": 0.1, "nan": 0.1}) == (2, 2)


def test_every_pipeline_runs_over_as_many_actors_as_there_can_be():
    for sizes, count in ((DEFAULT, 2), ([10] * 100, 8), ([3, 4, 1], 3), ([2, 2], 4)):
        arrangement = Arrangement(device_actors=count, cluster_actors=min(count, len(sizes)))
        assert len(arrangement.actors) == count
        load = Counter()
        for cluster, size in enumerate(sizes):
            placement = arrangement.placement(cluster, size)
            assert len(placement.shared_actors) == size and placement.shared_actor in arrangement.actors
            # Of any neighbours, too: plans take devices that are fast, wherever they stand.
            for first in range(size):
                taken = placement.shared_actors[first : first + count]
                assert len(set(taken)) == len(taken)
            load.update(placement.shared_actors)
        assert set(load) <= set(arrangement.actors) and max(load.values()) - min(load.values()) <= len(sizes)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"faults": {"nan": 0.1}}, "faults strike at a micro-batch"),
        ({"paced": True}, "each device has an actor of its own (devices are paced)"),
        ({"num_devices": [2]}, "each device has an actor of its own (2 devices on 2 cores)"),
        ({"devices_per_actor": 1}, "each device has an actor of its own (runtime.devices-per-actor)"),
    ],
)
def test_micro_batches_are_fused_only_where_devices_share_actors_and_no_fault_strikes(settings, reason, count):
    text = f"runtime.fused-micro-batches = {count}: {reason}; set runtime.fused-micro-batches to 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        actors(**settings, fused_micro_batches=count)
    assert actors(fused_micro_batches=count) == actors()
