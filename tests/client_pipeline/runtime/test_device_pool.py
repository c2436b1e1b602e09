"""Handles of a cluster's devices: who is there, who is at fault, and who has come back."""

import signal
from types import SimpleNamespace

import pytest
from ray import exceptions

from client_pipeline.partition import transformer
from client_pipeline.runtime import device_pool, frozen_devices, shared_actor
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.device import DeviceActor
from client_pipeline.runtime.device_pool import DevicePool
from client_pipeline.runtime.faults import FROZEN, KILLED, PARTED, DeviceFault, NotFinite, PipelineError
from client_pipeline.runtime.frozen_devices import GRACE_S
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.transport import TransportError
from helpers.scripted_ray import PENDING, PID, Reference, ScriptedActor, ScriptedRay, ended, failed

SPEC = transformer.spec(vocab_size=20, width=8, num_heads=2, feed_forward=16, encoder_layers=2)
MADE_WITH = (SPEC, OptimizerConfig(name="sgd"), RuntimeConfig(timeout=30.0))


@pytest.fixture
def ray(monkeypatch):
    made = ScriptedRay()
    for module in (device_pool, frozen_devices, shared_actor):
        monkeypatch.setattr(module, "ray", made)
    return made


@pytest.fixture
def pool(ray):
    return DevicePool("cluster", *MADE_WITH, Placement())


@pytest.fixture
def three(pool, ray):
    """A pool of three devices that run, and their actors."""
    actors = [ScriptedActor(alive=(PID + k, "here")) for k in range(3)]
    ray.next_actors = list(actors)
    pool.start(range(3))
    for actor in actors:
        actor.asked.clear()
    ray.made.clear()
    ray.waits_s.clear()
    return pool, actors


# Who is there.


def test_a_device_is_a_named_actor_that_outlives_who_made_it_and_answers_while_it_computes(ray):
    placement = Placement(ray_address="10.0.0.1:6379", num_devices=3, device_memory=(0.0, 0.0, 5e8))
    DevicePool("cluster", *MADE_WITH, placement).start([2])
    [(cls, options, arguments)] = ray.made
    assert cls is DeviceActor and arguments == (*MADE_WITH, 5e8)
    assert options.pop("resources").keys() == {"collapipe-device-2"}
    assert options == {
        "name": "cluster/device-2",
        "namespace": "collapipe",
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "concurrency_groups": {"liveness": 1},
    }


def test_devices_start_once_and_say_where_their_processes_are(three, ray):
    pool, _ = three
    assert pool.running == [0, 1, 2]
    assert pool.pids == {k: (PID + k, "here") for k in range(3)}
    pool.start([1, 0])
    assert ray.made == []
    assert pool.patience_s == device_pool.LEAST_S


def test_a_device_may_take_as_long_to_answer_as_it_took_to_start(ray, monkeypatch):
    times = iter([10.0, 27.0])
    monkeypatch.setattr(device_pool, "time", SimpleNamespace(monotonic=lambda: next(times)))
    pool = DevicePool("cluster", *MADE_WITH, Placement())
    pool.start([0])
    assert pool.patience_s == 17.0
    assert ray.waits_s == [30.0]


def test_of_those_that_have_nothing_to_do_alone_one_that_ended_is_made_anew(three, ray):
    pool, actors = three
    actors[0].ends()
    actors[1].ends()
    pool.start([0, 1, 2], busy={0})
    assert [options["name"] for _, options, _ in ray.made] == ["cluster/device-1"]
    assert actors[0].asked == [] and pool[0] is actors[0] and pool[1] is not actors[1]


def test_an_idle_device_that_stands_still_is_a_fault(three, ray):
    pool, actors = three
    actors[2].freezes()
    with pytest.raises(DeviceFault, match="cluster: device 2: no answer") as error:
        pool.start([0, 1, 2])
    assert (error.value.kind, error.value.devices) == (FROZEN, (2,))
    assert ray.made == []


@pytest.mark.parametrize("answer", [PENDING, ended()], ids=["silent", "ended"])
def test_a_device_that_does_not_start_is_lost(pool, ray, answer):
    ray.next_actors = [ScriptedActor(), ScriptedActor(alive=answer)]
    with pytest.raises(DeviceFault, match="cluster: device 1: did not start within 30 s") as error:
        pool.start([0, 1])
    assert (error.value.kind, error.value.devices) == (KILLED, (1,))
    assert pool.running == [0] and pool.lost == {1: KILLED}


def test_those_that_do_not_say_that_they_are_there_are_lost_and_how(three, ray):
    pool, actors = three
    actors[0].ends()
    actors[2].freezes()
    assert pool.silent([0, 1, 2, 9]) == {0: KILLED, 2: FROZEN}
    assert pool.interrupt([0, 1, 2, 9], generation=4) == {0: KILLED, 2: FROZEN}
    assert actors[1].asked == [("alive",), ("interrupt", 4)]
    assert pool.interrupt([1], generation=4, wait_s=0.25) == {}
    assert ray.waits_s == [pool.patience_s, pool.patience_s, 0.25]
    assert pool.silent([]) == {} and len(ray.waits_s) == 3


def test_a_device_whose_process_ended_is_started_again_at_once(three, ray):
    pool, actors = three
    pool.lose(1, KILLED)
    assert pool.running == [0, 2] and pool.lost == {1: KILLED} and 1 not in pool.pids
    assert [options["name"] for _, options, _ in ray.made] == ["cluster/device-1"]
    assert pool.is_back(1)
    assert pool.running == [0, 1, 2] and pool.lost == {} and pool.pids[1] == (PID, "here")
    assert pool[1] is not actors[1]


def test_a_device_that_stands_still_is_back_when_it_answers(three, ray):
    pool, actors = three
    actors[1].freezes()
    pool.lose(1, FROZEN)
    assert pool.lost == {1: FROZEN} and ray.made == [] and actors[1].asked == [("alive",)]
    assert not pool.is_back(1)
    pool._lost[1].sign.value = (PID + 1, "here")
    assert pool.is_back(1)
    assert pool[1] is actors[1] and pool.lost == {}
    # Whoever looks does not wait.
    assert ray.waits_s == [0, 0]


def test_a_new_process_that_ends_too_is_made_once_more(pool, ray):
    ray.next_actors = [ScriptedActor(alive=ended()), ScriptedActor()]
    pool.miss(0)
    assert not pool.is_back(0)
    assert pool.lost == {0: KILLED} and len(ray.made) == 2
    assert pool.is_back(0)


def test_a_device_that_is_absent_from_the_beginning_is_lost_until_it_comes(ray):
    ray.next_actors = [ScriptedActor(alive=PENDING), ScriptedActor()]
    pool = DevicePool("cluster", *MADE_WITH, Placement(), absent=[4, 2])
    assert pool.lost == {2: KILLED, 4: KILLED}
    assert pool.is_back(2) and not pool.is_back(4)


# Waiting for answers.


def test_answers_come_by_device_however_late_each_is(three, ray):
    pool, _ = three
    late = Reference(PENDING)
    wait, looks = ray.wait, []

    def comes_at_the_third_look(references, **options):
        looks.append(len(references))
        if len(looks) == 3:
            late.value = "b"
        return wait(references, **options)

    ray.wait = comes_at_the_third_look
    assert pool.answers({1: late, 0: Reference("a")}, "asking") == {0: "a", 1: "b"}
    assert looks == [2, 1, 1]


def test_a_call_goes_to_each_device_with_its_number(three):
    pool, actors = three
    actors[2].answers["load"] = "loaded"
    found = pool.call([0, 2], lambda actor, device: actor.load.remote(device), "loading")
    assert found == {0: None, 2: "loaded"}
    assert [actor.asked for actor in actors] == [[("load", 0)], [], [("load", 2)]]


@pytest.mark.parametrize(
    ("error", "kind", "devices", "message"),
    [
        (failed(TransportError("gone")), PARTED, (), "cluster: asking: device 1: gone"),
        (ended(), PARTED, (), "cluster: asking: "),
    ],
)
def test_an_answer_that_a_lost_neighbour_took_away_is_a_fault_of_nobody(three, error, kind, devices, message):
    with pytest.raises(DeviceFault, match=f"^{message}") as fault:
        three[0].answers({1: Reference(error)}, "asking")
    assert (fault.value.kind, fault.value.devices) == (kind, devices)


def test_an_answer_that_does_not_come_is_the_fault_of_all_that_ended(three):
    pool, actors = three
    actors[2].ends()
    actors[0].freezes()
    with pytest.raises(DeviceFault, match="cluster: asking: device 2: its process ended") as fault:
        pool.answers({1: Reference(ended())}, "asking")
    assert (fault.value.kind, fault.value.devices) == (KILLED, (2,))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (failed(NotFinite("Inf")), NotFinite, "cluster: asking: device 1: Inf"),
        (failed(TypeError("no such thing")), PipelineError, "cluster: asking: device 1: no such thing"),
        (exceptions.ObjectLostError("0" * 56, None, ""), PipelineError, "cluster: asking: device 1: "),
    ],
)
def test_what_a_device_raises_itself_is_no_fault_to_play_again(three, error, kind, message):
    with pytest.raises(PipelineError, match=f"^{message}") as found:
        three[0].answers({1: Reference(error)}, "asking")
    assert type(found.value) is kind


class Deadline:
    most_s = 12.0

    def __init__(self, *, overdue, expired=False):
        self.overdue, self.expired = overdue, expired
        self.extended = 0

    def extend(self):
        self.extended += 1

    def progress(self):
        pass


def test_nobody_is_asked_before_a_wait_is_overdue(three):
    pool, actors = three
    actors[0].ends()
    pool.look_after([0, 1], Deadline(overdue=False), "asking")
    assert actors[0].asked == []


def test_a_wait_that_is_overdue_names_those_that_are_lost_alike(three):
    pool, actors = three
    for number, happens in ((0, "freezes"), (1, "ends"), (2, "freezes")):
        getattr(actors[number], happens)()
    with pytest.raises(DeviceFault, match="cluster: device 0: no answer, while asking") as fault:
        pool.look_after(range(3), Deadline(overdue=True), "asking")
    assert (fault.value.kind, fault.value.devices) == (FROZEN, (0, 2))
    with pytest.raises(DeviceFault, match="cluster: device 1: its process ended, while asking") as fault:
        pool.look_after([1], Deadline(overdue=True), "asking")
    assert (fault.value.kind, fault.value.devices) == (KILLED, (1,))


def test_a_wait_for_devices_that_are_there_goes_on_until_it_has_had_its_time(three):
    pool, _ = three
    pool.look_after([0, 1], deadline := Deadline(overdue=True), "asking")
    assert deadline.extended == 1
    with pytest.raises(PipelineError, match=r"cluster: asking: no answer from devices \[0, 1\] within 12 s") as error:
        pool.look_after([0, 1], deadline := Deadline(overdue=True, expired=True), "asking")
    assert not isinstance(error.value, DeviceFault) and deadline.extended == 0


def test_a_silent_device_is_found_while_its_answer_is_waited_for(three, monkeypatch):
    pool, actors = three
    actors[1].freezes()
    monkeypatch.setattr(device_pool, "ProgressDeadline", lambda most_s, first_s: Deadline(overdue=True))
    with pytest.raises(DeviceFault, match="device 1: no answer, while asking"):
        pool.answers({0: Reference("a"), 1: Reference(PENDING)}, "asking")


LOST_NEIGHBOUR = failed(TransportError("a neighbour is gone"))


@pytest.mark.parametrize(
    ("answers", "met", "kind", "devices", "message"),
    [
        # All is well, or the thread of the control unit alone has failed.
        ((PENDING, None), None, None, (), ""),
        ((None, None), ValueError("own"), None, (), ""),
        # The first to say so is rarely the one at fault.
        ((LOST_NEIGHBOUR, ended()), None, KILLED, (1,), "device 1: its process ended"),
        ((ended(), ended()), None, KILLED, (0, 1), "device 0: its process ended"),
        ((failed(TypeError("x")), ended()), None, KILLED, (1,), "device 1: its process ended"),
        ((LOST_NEIGHBOUR, failed(TypeError("x"))), None, PipelineError, (), "device 1: it failed: x"),
        ((LOST_NEIGHBOUR, failed(NotFinite("Inf"))), None, NotFinite, (), "device 1: it failed: Inf"),
        ((LOST_NEIGHBOUR, PENDING), None, PARTED, (), "the devices lost each other: a neighbour is gone"),
        ((PENDING, PENDING), TransportError("cut"), PARTED, (), "the devices lost each other: cut"),
    ],
)
def test_a_device_that_ended_comes_before_one_that_failed_and_that_before_a_lost_neighbour(
    three, answers, met, kind, devices, message
):
    fault = three[0].fault_of({k: Reference(answer) for k, answer in enumerate(answers)}, met)
    if kind is None:
        assert fault is None
        return
    assert str(fault).startswith(f"cluster: {message}")
    if isinstance(kind, str):
        assert (type(fault), fault.kind, fault.devices) == (DeviceFault, kind, devices)
    else:
        assert type(fault) is kind


@pytest.mark.parametrize(
    ("happens", "kind", "message"), [("ends", KILLED, "its process ended"), ("freezes", FROZEN, "no answer")]
)
def test_who_is_silent_while_others_lost_a_neighbour_is_at_fault(three, happens, kind, message):
    pool, actors = three
    getattr(actors[2], happens)()
    fault = pool.fault_of({0: Reference(LOST_NEIGHBOUR), 2: Reference(PENDING)}, None)
    assert (fault.kind, fault.devices) == (kind, (2,))
    assert str(fault) == f"cluster: device 2: {message}; a neighbour says: a neighbour is gone"


def test_a_fault_waits_a_moment_for_the_one_that_is_at_the_bottom_of_it(three, ray):
    pool, _ = three
    late = Reference(ended(), late=True)
    assert pool.fault_of({0: Reference(LOST_NEIGHBOUR), 1: late, 2: Reference("done")}, None).devices == (1,)
    assert ray.waits_s == [0.0, GRACE_S]
    ray.waits_s.clear()
    assert pool.fault_of({0: Reference(LOST_NEIGHBOUR), 1: late}, TransportError("cut")).devices == (1,)
    assert ray.waits_s == [GRACE_S]


def test_while_all_is_well_nobody_waits(three, ray):
    assert three[0].fault_of({0: Reference("done"), 1: Reference(PENDING)}, None) is None
    assert ray.waits_s == [0.0]


# The end.


def test_all_are_ended_and_those_that_hear_nobody_by_the_system(three, ray, monkeypatch):
    pool, actors = three
    signals = []
    monkeypatch.setattr(device_pool.os, "kill", lambda pid, number: signals.append((pid, number)))
    actors.append(ScriptedActor(alive=(PID + 9, "elsewhere")))
    ray.next_actors = actors[-1:]
    pool.start([3])
    pool.lose(1, FROZEN)
    pool.lose(3, FROZEN)
    pool.close()
    assert all(actor.killed for actor in actors)
    assert signals == [(PID + 1, signal.SIGKILL)]
    assert pool.running == [] and pool.lost == {}


def test_a_process_that_is_gone_already_does_not_disturb_the_end(three, monkeypatch):
    def gone(pid, number):
        raise ProcessLookupError

    pool, actors = three
    monkeypatch.setattr(device_pool.os, "kill", gone)
    pool.lose(1, FROZEN)
    pool.close()
    assert all(actor.killed for actor in actors)
