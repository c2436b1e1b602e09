"""Devices without a TEB try one while the others train: who is asked, when, and what becomes of those that fail."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.partition import transformer
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime import device_pool, frozen_devices, shared_actor, spare_devices
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.device import DeviceActor
from client_pipeline.runtime.device_pool import DevicePool
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.spare_devices import SpareDevices
from helpers.scripted_ray import PENDING, ScriptedActor, ScriptedRay, ended
from helpers.tiny_models import CLASSIC, CONFIGS, VARIANTS, tiny_spec

SPEC = transformer.spec(vocab_size=20, width=8, num_heads=2, feed_forward=16, encoder_layers=2)
MADE_WITH = (SPEC, OptimizerConfig(name="sgd"), RuntimeConfig(timeout=30.0))
MACHINES = Placement(ray_address="10.0.0.1:6379", num_devices=3)
MASK = torch.ones(6, 5, dtype=torch.bool)
PLAN = ClusterPlan(delta=(2, 0, 0), order=(0,), m=2)


@pytest.fixture
def ray(monkeypatch):
    made = ScriptedRay()
    for module in (device_pool, frozen_devices, shared_actor, spare_devices):
        monkeypatch.setattr(module, "ray", made)
    return made


def tries(*times):
    return ScriptedActor(try_block=[(3, seconds) for seconds in times])


def test_devices_without_a_teb_try_one_and_the_median_is_told(ray):
    ray.next_actors = [tries(0.5, 0.1, 0.2), tries(1.0, 1.0, 4.0)]
    pool = DevicePool("cluster", *MADE_WITH, MACHINES)
    spare = SpareDevices(pool)
    assert spare.times() == {}
    spare.ask(PLAN, MASK)
    assert [options["name"] for _, options, _ in ray.made] == ["cluster/device-1", "cluster/device-2"]
    assert spare.times() == {"1": [[3, 3, 0.2]], "2": [[3, 3, 1.0]]}
    assert spare.times() == {}
    # Neither is taken for one that trains.
    assert pool.running == [] and pool.lost == {}


def test_the_micro_batch_is_the_first_one_of_the_run_in_every_round(ray):
    actor = tries(0.1)
    ray.next_actors = [actor]
    spare = SpareDevices(DevicePool("cluster", *MADE_WITH, MACHINES))
    plan = ClusterPlan(delta=(2, 0), order=(0,), m=4)
    for mask in (MASK, torch.ones(6, 9, dtype=torch.bool)):
        spare.ask(plan, mask)
        spare.times()
    masks = [mask for method, mask in actor.asked]
    assert [mask.shape for mask in masks] == [(2, 5), (2, 5)]


def test_who_has_not_answered_is_not_asked_again_and_not_waited_for(ray):
    slow = ScriptedActor(try_block=PENDING)
    ray.next_actors = [slow, tries(0.1)]
    spare = SpareDevices(DevicePool("cluster", *MADE_WITH, MACHINES))
    for _ in range(3):
        spare.ask(PLAN, MASK)
        assert "1" not in spare.times()
    assert len(slow.asked) == 1 and all(wait == 0 for wait in ray.waits_s)
    slow.answers["try_block"] = [(3, 0.3)]


def test_one_that_ended_is_started_anew_with_the_next_round(ray):
    ray.next_actors = [ScriptedActor(try_block=ended()), tries(0.1), tries(0.3)]
    spare = SpareDevices(DevicePool("cluster", *MADE_WITH, MACHINES))
    spare.ask(PLAN, MASK)
    assert spare.times() == {"2": [[3, 1, 0.1]]}
    spare.ask(PLAN, MASK)
    assert spare.times() == {"1": [[3, 1, 0.3]], "2": [[3, 1, 0.1]]}
    assert len(ray.made) == 3


def test_lost_devices_and_those_that_share_a_machine_are_left_alone(ray):
    lost = DevicePool("cluster", *MADE_WITH, MACHINES, absent=[1])
    ray.next_actors, made = [tries(0.1)], len(ray.made)
    spare = SpareDevices(lost)
    spare.ask(PLAN, MASK)
    assert spare.times().keys() == {"2"} and len(ray.made) == made + 1
    for placement in (Placement(), Placement(shared_actors=("a", "a", "a"))):
        ray.made.clear()
        spare = SpareDevices(DevicePool("cluster", *MADE_WITH, placement))
        spare.ask(PLAN, MASK)
        assert spare.times() == {} and ray.made == []


def test_one_that_is_needed_is_one_of_the_pool_and_all_end_with_it(ray):
    ray.next_actors = [tries(0.1), tries(0.2)]
    pool = DevicePool("cluster", *MADE_WITH, MACHINES)
    spare = SpareDevices(pool)
    spare.ask(PLAN, MASK)
    spare.times()
    needed = ScriptedActor()
    ray.next_actors = [needed]
    pool.start([1])
    assert pool.running == [1] and pool[1] is needed
    assert pool.spare(1) is needed
    ended_actors = []
    device_pool.end_actor, kept = ended_actors.append, device_pool.end_actor
    try:
        pool.close()
    finally:
        device_pool.end_actor = kept
    assert len(ended_actors) == 2


LORA = LoraConfig(rank=2)
MODELS = {"classic": CLASSIC, **{name: tiny_spec(name) for name in (*CONFIGS, *VARIANTS)}}
MODELS |= {f"{base} llama": replace(tiny_spec("llama"), lora=LORA, base_dtype=base) for base in ("float32", "nf4")}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_device_times_passes_through_a_teb_and_keeps_nothing(name):
    device = DeviceActor(MODELS[name], OptimizerConfig(), RuntimeConfig(threads=torch.get_num_threads()))
    state = torch.random.get_rng_state()
    times = device.try_block(MASK)
    assert len(times) == 3 and all(size == 6 and seconds > 0 for size, seconds in times)
    assert not device.stage.blocks and torch.equal(torch.random.get_rng_state(), state)


def test_a_device_that_trains_tries_nothing():
    device = DeviceActor(SPEC, OptimizerConfig(), RuntimeConfig(threads=torch.get_num_threads()))
    device.place([0], 0, None)
    assert device.try_block(MASK) == []
