"""Which nodes of a cluster's Ray stand for its devices, and whether they can run what the control unit runs."""

import socket

import pytest
from ray import exceptions

from client_pipeline.runtime import device_nodes as ray_nodes
from client_pipeline.runtime.device_nodes import (
    check_answers,
    check_devices,
    code_digest,
    device_nodes,
    device_software,
    joined_devices,
    software,
    wait_for_devices,
)
from client_pipeline.runtime.machine import machine_facts
from client_pipeline.runtime.placement import Placement
from helpers.scripted_ray import PENDING, Reference, ScriptedRay, failed


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
    """Time that passes while somebody sleeps."""

    class Clock:
        now = 0.0
        slept = 0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds
            self.slept += 1

    made = Clock()
    monkeypatch.setattr(ray_nodes, "time", made)
    return made


def test_an_actor_goes_to_its_device_where_devices_are_nodes_and_keeps_nobody_out():
    assert Placement().device_options(3) == {} and not Placement().spread
    spread = Placement(ray_address="10.0.0.1:6379")
    [(name, share)] = spread.device_options(3)["resources"].items()
    # An actor of the run before may still be there.
    assert spread.spread and name == "collapipe-device-3" and 0 < share <= 0.5


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_an_address_without_a_host_is_not_asked(monkeypatch, address):
    monkeypatch.setattr(socket, "create_connection", None)
    check_answers(address)


def test_an_address_where_somebody_listens_passes_and_another_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_answers(address)
    with pytest.raises(OSError):
        check_answers(address)
    with pytest.raises(ValueError, match="Ray's address"):
        check_answers("10.0.0.1")


def test_nodes_stand_for_the_devices_that_they_name(ray_of):
    ray_of(
        [
            node("10.0.0.1"),
            node("10.0.0.2", "collapipe-device-12"),
            node("10.0.0.3", "collapipe-device-0", "collapipe-device-3"),
            node("10.0.0.4", "collapipe-device-5", alive=False),
            node("10.0.0.5", "collapipe-device-x", "other-device-7", "collapipe-device-8-spare"),
        ]
    )
    assert joined_devices() == {12: "10.0.0.2", 0: "10.0.0.3", 3: "10.0.0.3"}
    assert device_nodes()[12]["Resources"]["collapipe-device-12"] == 1.0


def test_two_nodes_cannot_be_the_same_device(ray_of):
    ray_of([node("10.0.0.1", "collapipe-device-1"), node("10.0.0.2", "collapipe-device-1")])
    with pytest.raises(ValueError, match=r"device 1: 10\.0\.0\.1 and 10\.0\.0\.2 both claim this number"):
        joined_devices()


ONE, TWO = node("10.0.0.1", "collapipe-device-0"), node("10.0.0.2", "collapipe-device-1")
MORE = node("10.0.0.9", "collapipe-device-9")


def test_devices_are_waited_for_until_all_have_joined_and_others_do_not_count(ray_of, clock):
    ray_of([MORE], [ONE, MORE], [TWO, ONE, MORE])
    found = wait_for_devices(2, timeout_s=60.0)
    assert list(found.items()) == [(0, "10.0.0.1"), (1, "10.0.0.2")]
    assert clock.slept == 2


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


def test_nobody_is_needed_where_a_cluster_has_no_devices(ray_of, clock):
    ray_of([])
    assert wait_for_devices(0, timeout_s=4.0) == {} and clock.slept == 0
    with pytest.raises(ValueError, match=r"devices 0 of 1 .*\(joined: none\)"):
        wait_for_devices(1, timeout_s=4.0)


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


def test_a_process_says_its_code_and_the_versions_that_matter():
    import ray
    import torch

    found = software()
    assert found.pop("code") == code_digest()
    assert found == machine_facts() and found["python"].startswith("3.")
    assert (found["ray"], found["torch"]) == (ray.__version__, torch.__version__)


def test_each_device_is_asked_on_its_own_node_without_a_processor(ray_of):
    ray = ray_of([])
    ray.answers = {"collapipe-device-0": {"code": "x"}, "collapipe-device-4": PENDING}
    found = device_software({0: "10.0.0.1", 4: "10.0.0.2"}, timeout_s=7.0)
    assert found == {0: {"code": "x"}, 4: "no answer within 7 s"}
    # A device need not offer any.
    assert [(function, settings) for function, settings, _ in ray.asked] == [(software, {"num_cpus": 0})] * 2
    assert all(0 < share <= 0.5 for *_, resources in ray.asked for share in resources.values())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failed(ImportError("no torch")), "ImportError: no torch"),
        (exceptions.RuntimeEnvSetupError("broken"), "RuntimeEnvSetupError: "),
    ],
)
def test_a_device_that_cannot_answer_says_why(ray_of, error, message):
    ray_of([]).answers = {"collapipe-device-0": error}
    assert device_software({0: "10.0.0.1"})[0].startswith(message)


def test_all_devices_answer_within_one_time(ray_of, monkeypatch, clock):
    ray = ray_of([])
    ray.answers = {f"collapipe-device-{k}": PENDING for k in range(3)}
    timeouts, get = [], ray.get

    def slow(reference, timeout):
        timeouts.append(timeout)
        clock.now += 4.0
        return get(reference, timeout)

    monkeypatch.setattr(ray, "get", slow)
    device_software(dict.fromkeys(range(3), "10.0.0.1"), timeout_s=6.0)
    assert timeouts == [6.0, 2.0, 0.1]


def test_devices_of_the_same_release_pass_and_another_is_refused_with_both_digests(ray_of):
    ray = ray_of([])
    ray.answers = {"collapipe-device-0": software(), "collapipe-device-1": {**software(), "code": "feed"}}
    assert check_devices({0: "10.0.0.1"}) == {0: machine_facts()}
    with pytest.raises(ValueError, match=rf"device 1 at 10\.0\.0\.2: another .*\(code feed, here {code_digest()}\)"):
        check_devices({0: "10.0.0.1", 1: "10.0.0.2"})


def test_a_device_that_does_not_answer_cannot_run_the_product(ray_of):
    ray_of([]).answers = {"collapipe-device-1": PENDING}
    with pytest.raises(ValueError, match=r"device 1 at 10\.0\.0\.2: cannot run CollaPipe: no answer within 3 s"):
        check_devices({1: "10.0.0.2"}, timeout_s=3.0)
