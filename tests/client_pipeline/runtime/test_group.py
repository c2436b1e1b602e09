"""The control unit's place in its cluster's group: when it is joined anew, and what ends a join."""

import threading
from types import SimpleNamespace

import pytest

from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices import group as group_module
from client_pipeline.runtime.devices.group import JOIN_S, Group
from client_pipeline.runtime.transport.faults import KILLED, DeviceFault
from helpers.recovery_cases import within


class Member:
    """Rank 0 of a group, as soon as a test lets it in."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Members:
    """Members that wait until a group may form, and each that joined."""

    def __init__(self):
        self.may_join = threading.Event()
        self.may_join.set()
        self.error = None
        self.made = []

    def __call__(self, address, rank):
        assert rank == 0 and self.may_join.wait(120)
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
    assert made.transport is None
    made.join((2, 0), 50.0)
    assert made.transport is members.made[0]
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
    assert members.made[1].closed.is_set() and made.transport is None
    made.leave()
    # Who has left joins the same ring anew.
    made.join((0, 2), 50.0)
    assert made.generation == 3 and made.transport is not None


def test_a_device_that_is_gone_is_named_and_who_joins_too_late_leaves(group):
    made, pool, members = group
    pool.error = DeviceFault("device 2 is gone", KILLED, (2,))
    members.may_join.clear()
    with pytest.raises(DeviceFault, match="device 2 is gone") as error:
        within(30.0, made.join, (2, 0), 50.0)
    assert error.value.kind == KILLED and made.transport is None
    members.may_join.set()
    assert within(30.0, until_made, members).closed.wait(120)


def until_made(members):
    while not members.made:
        threading.Event().wait(0.01)
    return members.made[0]
