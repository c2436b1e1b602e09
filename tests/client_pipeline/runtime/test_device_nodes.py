"""Nodes of a cluster's Ray that stand for its devices, and the check of their release."""

import socket

import pytest

from client_pipeline.runtime.devices import device_nodes as ray_nodes
from client_pipeline.runtime.devices.device_nodes import (
    check_answers,
    check_devices,
    code_digest,
    joined_devices,
    remedy_of,
    software,
    wait_for_devices,
)
from client_pipeline.runtime.ray.machine import machine_facts
from client_pipeline.runtime.ray.placement import RESERVED, Placement
from helpers.clocks import Clock
from helpers.scripted_ray import PENDING, Reference, ScriptedRay


def node(address, *names, alive=True):
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 1.0, **dict.fromkeys(names, 1.0)}}


class Nodes(ScriptedRay):
    """Nodes that come one look after the other, and what the device of each answers."""

    def __init__(self, *looks):
        super().__init__()
        self._looks = list(looks)
        self.answers = {}
        self.asked = []

    def nodes(self):
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def remote(self, **settings):
        def of(function):
            return _Ask(self, function, settings)

        return of


class _Ask:
    def __init__(self, ray, function, settings):
        self._ray, self._function, self._settings = ray, function, settings

    def options(self, resources):
        [self._resource] = resources
        self._ray.asked.append((self._function, self._settings, resources))
        return self

    def remote(self):
        return Reference(self._ray.answers[self._resource])


@pytest.fixture
def ray_of(monkeypatch):
    def use(*looks):
        made = Nodes(*looks)
        monkeypatch.setattr(ray_nodes, "ray", made)
        return made

    return use


@pytest.fixture
def clock(monkeypatch):
    made = Clock(now=0.0)
    monkeypatch.setattr(ray_nodes, "time", made)
    return made


def test_an_address_where_somebody_listens_passes_and_another_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_answers(address)
    with pytest.raises(OSError):
        check_answers(address)
    with pytest.raises(ValueError, match="Ray's address"):
        check_answers("10.0.0.1")


def test_two_nodes_cannot_be_the_same_device(ray_of):
    ray_of([node("10.0.0.1", "collapipe-device-1"), node("10.0.0.2", "collapipe-device-1")])
    with pytest.raises(ValueError, match=r"device 1: 10\.0\.0\.1 and 10\.0\.0\.2 both claim this number"):
        joined_devices()


ONE, TWO = node("10.0.0.1", "collapipe-device-0"), node("10.0.0.2", "collapipe-device-1")
MORE = node("10.0.0.9", "collapipe-device-9")


def test_devices_are_waited_for_until_all_have_joined_and_others_do_not_count(ray_of, clock):
    ray_of([MORE], [ONE, MORE], [TWO, ONE, MORE])
    found = wait_for_devices(2, timeout_s=240.0)
    assert list(found.items()) == [(0, "10.0.0.1"), (1, "10.0.0.2")]
    assert len(clock.slept) == 2


def test_devices_that_do_not_join_are_named_in_the_end(ray_of, clock):
    ray_of([ONE, MORE])
    with pytest.raises(ValueError, match=r"devices 1, 2 of 3 have not joined .* within 4 s \(joined: 0, 9\)"):
        wait_for_devices(3, timeout_s=4.0)
    assert 4.0 < clock.now <= 5.0


@pytest.mark.parametrize(("least", "goes_on"), [(None, False), (2, False), (1, True), (0, True)])
def test_a_cluster_goes_on_with_those_that_came_where_they_are_enough(ray_of, clock, least, goes_on):
    ray_of([ONE])
    if goes_on:
        assert wait_for_devices(2, timeout_s=4.0, least=least) == {0: "10.0.0.1"}
        # The others had their time.
        assert clock.now > 4.0
    else:
        with pytest.raises(ValueError, match="devices 1 of 2 have not joined"):
            wait_for_devices(2, timeout_s=4.0, least=least)


def digest_of(monkeypatch, root):
    monkeypatch.setattr(ray_nodes, "__file__", str(root / "client_pipeline" / "runtime" / "placement.py"))
    return code_digest.__wrapped__()


def test_the_digest_is_that_of_the_packages_sources_whatever_lies_around_them(monkeypatch, tmp_path):
    folder = tmp_path / "client_pipeline" / "runtime"
    folder.mkdir(parents=True)
    (folder / "placement.py").write_bytes(b"a = 1\nb = 2\n")
    (folder.parent / "plan.py").write_bytes(b"c = 3\n")
    before = digest_of(monkeypatch, tmp_path)
    assert len(before) == 16
    # Line ends, other files and other packages do not count.
    (folder / "placement.py").write_bytes(b"a = 1\r\nb = 2\r\n")
    (folder / "note.txt").write_text("x")
    (tmp_path / "beside.py").write_text("x")
    assert digest_of(monkeypatch, tmp_path) == before
    (folder.parent / "plan.py").rename(folder.parent / "plans.py")
    renamed = digest_of(monkeypatch, tmp_path)
    (folder.parent / "plans.py").write_bytes(b"c = 4\n")
    assert len({before, renamed, digest_of(monkeypatch, tmp_path)}) == 3


def test_devices_of_the_same_release_pass_and_another_is_refused_with_both_digests(ray_of):
    ray = ray_of([])
    ray.answers = {"collapipe-device-0": software(), "collapipe-device-1": {**software(), "code": "feed"}}
    assert check_devices({0: "10.0.0.1"}) == {0: machine_facts()}
    with pytest.raises(ValueError, match=rf"device 1 at 10\.0\.0\.2: another .*\(code feed, here {code_digest()}\)"):
        check_devices({0: "10.0.0.1", 1: "10.0.0.2"})


def test_a_device_that_does_not_answer_is_busy_or_stands_still(ray_of):
    """Another release was to be installed on it."""
    ray_of([]).answers = {"collapipe-device-1": PENDING}
    silence = r"^device 1 at 10\.0\.0\.2: no answer within 3 s; it is busy, or a program on it stands still: look there"
    with pytest.raises(ValueError, match=silence):
        check_devices({1: "10.0.0.2"}, timeout_s=3.0)


@pytest.mark.parametrize("answer", ["ModuleNotFoundError: No module named 'flwr'", "AttributeError: no 'software'"])
def test_a_device_that_cannot_import_the_product_needs_the_same_release(answer):
    assert remedy_of(answer) == "install the same release there"
    assert "stands still" in remedy_of("WorkerCrashedError: The worker died")


def test_a_device_that_has_left_its_address_is_named_at_once(ray_of):
    """After 120 s a wrong remedy was given: to install the same release on a machine whose address had changed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        away = node("127.0.0.1", "collapipe-device-1") | {"NodeManagerPort": port}
        ray_of([away]).answers = {"collapipe-device-1": PENDING}
        with pytest.raises(
            ValueError, match=rf"device 1 at 127\.0\.0\.1: .*nobody answers at 127\.0\.0\.1:{port} .*--host"
        ):
            check_devices({1: "127.0.0.1"})


def test_devices_of_a_placement_are_in_this_ray_unless_it_names_one_or_hosts_them_together():
    alone = Placement()
    assert (alone.spread, alone.num_devices, alone.shared_actor) == (False, 0, "")
    assert (alone.shared_actor_of(3), alone.memory_of(3), alone.device_options(3)) == ("", 0.0, {})
    spread = Placement(ray_address="10.0.0.1:6379", num_devices=2, device_memory=(1e6, 2e6))
    assert spread.spread and spread.memory_of(1) == 2e6
    [(_, share)] = spread.device_options(1)["resources"].items()
    # A share so small that an actor which takes a crashed one's place finds room.
    assert spread.device_options(0) != spread.device_options(1) and 0 < share == RESERVED <= 0.01
    assert Placement(shared_actors=("a", "b")).shared_actor_of(1) == "b"
