"""A cluster's devices: those that run, those at fault, those that have come back, and those without a TEB."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit import spare_devices
from client_pipeline.runtime.control_unit.spare_devices import SpareDevices
from client_pipeline.runtime.devices import device_pool, frozen_devices, shared_actor
from client_pipeline.runtime.devices.device import DeviceActor
from client_pipeline.runtime.devices.device_pool import DevicePool
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.transport.faults import FROZEN, KILLED, DeviceFault, PipelineError
from helpers.scripted_ray import PENDING, PID, Reference, ScriptedActor, ScriptedRay, ended
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


@pytest.fixture
def three(ray):
    """A pool of three devices that run, and their actors."""
    actors = [ScriptedActor(alive=(PID + k, "here")) for k in range(3)]
    ray.next_actors = list(actors)
    pool = DevicePool("cluster", *MADE_WITH, Placement())
    pool.start(range(3))
    for record in (ray.made, ray.waits_s, *(actor.asked for actor in actors)):
        record.clear()
    return pool, actors


def test_a_device_is_a_named_actor_that_answers_while_it_computes(ray, monkeypatch):
    times = iter([10.0, 27.0])
    monkeypatch.setattr(device_pool, "time", SimpleNamespace(monotonic=lambda: next(times)))
    pool = DevicePool("cluster", *MADE_WITH, replace(MACHINES, device_memory=(0.0, 0.0, 5e8)))
    pool.start([2])
    [(cls, options, arguments)] = ray.made
    assert cls is DeviceActor and arguments == (*MADE_WITH, 5e8)
    [(resource, share)] = options.pop("resources").items()
    # An actor of the run before may still be there.
    assert resource == "collapipe-device-2" and 0 < share <= 0.5
    named = {"name": "cluster/device-2", "namespace": "collapipe", "lifetime": "detached", "get_if_exists": True}
    assert options == {**named, "num_cpus": 0, "concurrency_groups": {"liveness": 1}}
    # It may take as long to answer as it took to start.
    assert pool.patience_s == 17.0 and ray.waits_s == [30.0]


def test_devices_start_once_and_an_idle_one_that_ended_is_made_anew(three, ray):
    pool, actors = three
    assert pool.running == [0, 1, 2] and pool.pids == {k: (PID + k, "here") for k in range(3)}
    pool.start([1, 0])
    assert ray.made == [] and pool.patience_s == device_pool.LEAST_S
    actors[0].asked.clear()
    actors[0].ends()
    actors[1].ends()
    pool.start([0, 1, 2], busy={0})
    assert [options["name"] for _, options, _ in ray.made] == ["cluster/device-1"]
    assert actors[0].asked == [] and pool[0] is actors[0] and pool[1] is not actors[1]
    actors[2].freezes()
    with pytest.raises(DeviceFault, match="cluster: device 2: no answer") as error:
        pool.start([0, 1, 2], busy={0})
    assert (error.value.kind, error.value.devices, len(ray.made)) == (FROZEN, (2,), 1)
    ray.next_actors = [ScriptedActor(), ScriptedActor(alive=PENDING)]
    with pytest.raises(DeviceFault, match="cluster: device 4: did not start within 30 s") as error:
        pool.start([3, 4])
    assert (error.value.kind, error.value.devices, pool.lost) == (KILLED, (4,), {4: KILLED})
    assert pool.running == [0, 1, 2, 3]


def test_a_lost_device_is_back_when_its_process_or_a_new_one_answers(three, ray):
    pool, actors = three
    pool.lose(1, KILLED)
    assert pool.running == [0, 2] and pool.lost == {1: KILLED} and 1 not in pool.pids
    assert [options["name"] for _, options, _ in ray.made] == ["cluster/device-1"]
    assert pool.is_back(1) and pool.lost == {} and pool.pids[1] == (PID, "here") and pool[1] is not actors[1]
    actors[2].answers["alive"] = frozen = PENDING
    pool.lose(2, FROZEN)
    assert pool.lost == {2: FROZEN} and len(ray.made) == 1 and not pool.is_back(2) and frozen is PENDING
    # Looking takes no time.
    assert ray.waits_s == [0, 0]
    ray.next_actors = [ScriptedActor(alive=ended()), ScriptedActor()]
    pool.lose(0, KILLED)
    assert not pool.is_back(0) and pool.lost == {0: KILLED, 2: FROZEN} and len(ray.made) == 3
    assert pool.is_back(0)


def deadline(*, overdue=True, expired=False):
    made = SimpleNamespace(most_s=12.0, overdue=overdue, expired=expired, extended=[], progress=lambda: None)
    made.extend = lambda: made.extended.append(1)
    return made


def test_devices_are_asked_for_a_sign_when_a_wait_is_overdue(three, ray, monkeypatch):
    pool, actors = three
    pool.look_after([0, 1], waiting := deadline(), "asking")
    assert waiting.extended == [1]
    with pytest.raises(PipelineError, match=r"cluster: asking: no answer from devices \[0, 1\] within 12 s") as error:
        pool.look_after([0, 1], waiting := deadline(expired=True), "asking")
    assert not isinstance(error.value, DeviceFault) and waiting.extended == []
    actors[0].asked.clear()
    for number, happens in ((0, "freezes"), (1, "ends"), (2, "freezes")):
        getattr(actors[number], happens)()
    pool.look_after([0, 1], deadline(overdue=False), "asking")
    assert actors[0].asked == [] and ray.waits_s[-1] == pool.patience_s
    assert pool.interrupt([0, 1, 2, 9], 4, wait_s=0.25) == {0: FROZEN, 1: KILLED, 2: FROZEN} and ray.waits_s[-1] == 0.25
    monkeypatch.setattr(device_pool, "ProgressDeadline", lambda most_s, first_s: deadline())
    with pytest.raises(DeviceFault, match="cluster: device 0: no answer, while asking") as fault:
        pool.answers({k: Reference(PENDING) for k in range(3)}, "asking")
    assert (fault.value.kind, fault.value.devices) == (FROZEN, (0, 2))
    with pytest.raises(DeviceFault, match="cluster: device 1: its process ended, while asking"):
        pool.look_after([1], deadline(), "asking")


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
