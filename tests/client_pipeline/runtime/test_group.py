"""The control unit's place in its cluster's group: when it is joined anew, and what ends a join."""

import threading
from types import SimpleNamespace

import pytest

from client_pipeline.runtime import group as group_module
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.faults import KILLED, PARTED, DeviceFault
from client_pipeline.runtime.group import JOIN_S, Group
from helpers.recovery_cases import within


class Member:
    """Rank 0 of a group, as soon as a test lets it in."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Members:
    """What would join a group, and each member that did."""

    def __init__(self):
        self.may_join = threading.Event()
        self.may_join.set()
        self.error = None
        self.made = []

    def __call__(self, address, rank):
        assert rank == 0 and self.may_join.wait(30.0)
        if self.error:
            raise self.error
        self.made.append(Member())
        return self.made[-1]


class Pool:
    """Devices that are told to join."""

    name = "cluster"
    runtime = RuntimeConfig(timeout=120.0)
    pids = {device: (1000 + device, "here") for device in range(3)}

    def __init__(self):
        self.told = []
        self.error = None

    def __getitem__(self, device):
        def tell(address, rank):
            self.told.append((device, rank, address))
            return device

        return SimpleNamespace(connect=SimpleNamespace(remote=tell))

    def answers(self, joined, what):
        assert what == "joining the cluster's group"
        if self.error:
            raise self.error
        return joined


@pytest.fixture
def group(monkeypatch):
    members = Members()
    monkeypatch.setattr(group_module, "join_group", members)
    monkeypatch.setattr(group_module, "open_meeting", lambda host, timeout_s: SimpleNamespace(port=77))
    made = Group(Pool(), "10.0.0.1", "int8")
    yield made, made._pool, members
    members.may_join.set()


def test_devices_join_in_the_order_of_the_ring_behind_the_control_unit(group):
    made, pool, members = group
    assert not made.joined
    made.join((2, 0), 50.0)
    assert made.joined and made.transport is members.made[0]
    assert [(device, rank) for device, rank, _ in pool.told] == [(2, 1), (0, 2)]
    [address] = {address for *_, address in pool.told}
    assert (address.host, address.port, address.generation, address.size) == ("10.0.0.1", 77, 1, 3)
    assert (address.timeout_s, address.codec) == (50.0, "int8")


@pytest.mark.parametrize(("timeout_s", "join_s"), [(500.0, JOIN_S), (4.0, 4.0)])
def test_members_wait_for_each_other_no_longer_than_for_anything_else(group, timeout_s, join_s):
    made, pool, _ = group
    made.join((0,), timeout_s)
    assert pool.told[0][2].join_s == join_s


def test_the_same_ring_stays_and_another_one_is_another_group(group):
    made, pool, members = group
    made.join((2, 0), 50.0)
    made.join((2, 0), 50.0)
    assert len(members.made) == 1 and made.generation == 1
    made.join((0, 2), 50.0)
    assert members.made[0].closed.is_set() and made.transport is members.made[1] and made.generation == 2
    assert pool.told[-1][2].generation == 2
    made.leave()
    assert members.made[1].closed.is_set() and not made.joined
    made.leave()
    # Who has left joins the same ring anew.
    made.join((0, 2), 50.0)
    assert made.generation == 3 and made.joined


def test_members_that_do_not_find_each_other_are_nobodys_fault(group):
    made, _, members = group
    members.error = RuntimeError("rank 2 did not come")
    with pytest.raises(DeviceFault, match="cluster: joining the cluster's group: rank 2 did not come") as error:
        made.join((0,), 50.0)
    assert (error.value.kind, error.value.devices) == (PARTED, ())
    assert not made.joined


def test_a_device_that_is_gone_is_named_and_who_joins_too_late_leaves(group):
    made, pool, members = group
    pool.error = DeviceFault("device 2 is gone", KILLED, (2,))
    members.may_join.clear()
    with pytest.raises(DeviceFault, match="device 2 is gone") as error:
        within(30.0, made.join, (2, 0), 50.0)
    assert error.value.kind == KILLED and not made.joined
    members.may_join.set()
    assert within(30.0, until_made, members).closed.wait(30.0)


def until_made(members):
    while not members.made:
        threading.Event().wait(0.01)
    return members.made[0]


def test_a_control_unit_that_is_not_let_in_gives_up_in_time(group):
    made, _, members = group
    members.may_join.clear()
    with pytest.raises(TimeoutError):
        within(30.0, made.join, (0,), 0.05)
    assert not made.joined
