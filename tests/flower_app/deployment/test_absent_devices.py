"""A device machine that is down keeps a cluster neither from starting its control unit again nor from resuming."""

import json
import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit import actors, fault_files
from client_pipeline.runtime.control_unit.actors import (
    ControlUnitAbsent,
    ControlUnitLost,
    restart_control_unit,
    start_control_unit,
    train_round,
)
from client_pipeline.runtime.devices import device_nodes
from client_pipeline.runtime.devices.device_nodes import joined_devices
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.ray.ray_folder import short_folder
from client_pipeline.runtime.transport.faults import FaultRecord
from client_pipeline.system.scenario import load_scenario
from flower_app import client_app
from flower_app.deployment.ray_node import RayNode
from flower_app.launch.superlink import flower_environment
from flower_app.node import kept_setup
from helpers.actor_cases import order, setup_of
from helpers.running_programs import free_block, running
from helpers.tiny_models import CLASSIC, NUM_BLOCKS
from strategies.clusters import ClusterState
from strategies.records import ARRAYS, CONFIG, ROUND_KEY, to_arrays


@contextmanager
def device_machine(ray, host, device, log):
    """A node of the test run's own Ray that says it is a device."""
    temp = Path(short_folder()) / f"collapipe-absent-{os.getpid()}-{device}"
    # Ray would put this machine's outer address in the place of 127.0.0.1, where a private Ray does not listen.
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    head = f"[::ffff:127.0.0.1]:{port}"
    node = RayNode(host=host, head=head, devices=(device,), first_port=free_block(), object_store_mb=80, temp=temp)
    environment = {**flower_environment(temp / "flower"), "PYTHONPATH": os.environ["PYTHONPATH"]}
    environment |= {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    try:
        with running(node.command(), environment, log, lambda: device in joined_devices()):
            yield
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_goes_on_without_the_machine_that_is_down_and_asks_one_without_a_teb_what_one_takes(
    local_ray, end_actors, monkeypatch, tmp_path
):
    monkeypatch.setattr(actors, "DEVICES_TIMEOUT_S", 0.1)
    here = local_ray.get_runtime_context().get_node_id()
    host = next(node["NodeManagerAddress"] for node in local_ray.nodes() if node["NodeID"] == here)
    place = Placement(ray_address="here", host=host, num_devices=2)
    setup = replace(setup_of("actors-absent"), placement=place)

    def trained(number):
        report = train_round("actors-absent", 0, order(number), 240, place).report
        return sorted(report["devices"]), [(fault["kind"], fault["device"]) for fault in report["faults"]]

    with device_machine(local_ray, host, 0, tmp_path / "d0.log"):
        # Before a run begins somebody can still start what is missing.
        with pytest.raises(ValueError, match=r"devices 1 of 2 have not joined .* start them with collapipe join"):
            start_control_unit(setup)
        pid = start_control_unit(replace(setup, resume_round=1))["pid"]
        assert trained(2) == (["0"], [("device", 1)])
        assert trained(3) == (["0"], [])

        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ControlUnitLost):
            trained(4)
        restart_control_unit(replace(setup, resume_round=4, lost_at=time.time()))
        assert trained(5) == (["0"], [("joined", None), ("device", 1)])

        with device_machine(local_ray, host, 1, tmp_path / "d1.log"):
            deadline, number, faults = time.monotonic() + 120, 6, []
            while not faults:
                assert time.monotonic() < deadline
                devices, faults = trained(number)
                number += 1
            assert devices == ["0", "1"] and faults == [("joined", 1)]

            # Both machines are another run's from now on.
            start_control_unit(replace(setup_of("actors-spare"), placement=place))
            check_a_spare_machine(place)


def check_a_spare_machine(place):
    """Device 1 has no TEB: it says what one takes there, and then gets some."""
    number, spare, deadline = 0, {}, time.monotonic() + 240
    while not spare:
        assert time.monotonic() < deadline
        number += 1
        one = replace(order(number), plan=ClusterPlan(delta=(NUM_BLOCKS, 0), order=(0,), m=2))
        report = train_round("actors-spare", 0, one, 240, place).report
        assert report["devices"].keys() == {"0"}
        spare = report["measured"]["spare"]
    [[samples, count, seconds]] = spare.pop("1")
    assert not spare and samples == 4 and count == 3 and 0 < seconds < 60
    both = replace(order(number + 1), plan=ClusterPlan(delta=(1, NUM_BLOCKS - 1), order=(0, 1), m=2))
    report = train_round("actors-spare", 0, both, 240, place).report
    assert report["devices"].keys() == {"0", "1"} and report["measured"]["spare"] == {} and not report["faults"]


def test_without_any_device_a_control_unit_says_so(local_ray, monkeypatch):
    monkeypatch.setattr(device_nodes, "joined_devices", dict)
    lost = replace(setup_of("actors-none"), placement=Placement(ray_address="here", num_devices=2), lost_at=0.0)
    with pytest.raises(ControlUnitAbsent, match=r"cannot start again: devices 0, 1 of 2 have not joined"):
        restart_control_unit(lost)


def test_what_a_lost_control_unit_had_recorded_outlives_that_no_device_is_left(monkeypatch, tmp_path):
    # The error of the new start once took the place of the loss, and the records went with it.
    def lose(*_):
        raise ControlUnitLost("cluster-0: the control unit's process ended")

    monkeypatch.setattr(client_app, "train_round", lose)
    monkeypatch.setattr(device_nodes, "joined_devices", dict)
    monkeypatch.setattr(actors, "join_ray", lambda placement: None)
    record = FaultRecord(kind="device", cluster=0, device=1, round=3, recovered=True)
    fault_files.keep(tmp_path, 3, [record])
    told = {"num-clusters": 1, "spec": CLASSIC.to_json(), "tokenizer": "", "resume-round": 0, "plans": ""}
    kept_setup.write(tmp_path, told, {})
    state = ClusterState(
        cluster=0,
        node_id=7,
        devices=load_scenario("edge-boxes").clusters[0],
        block_memory=1.0,
        num_examples=7,
    )
    kept = {
        "spec": told["spec"],
        "num-blocks": NUM_BLOCKS,
        "plans": "",
        "cluster": json.dumps(state.to_dict()),
        "folder": str(tmp_path),
    }
    context = Context(
        run_id=1,
        node_id=7,
        node_config={"partition-id": 0, "ray-address": "here:1", "host": "here"},
        state=RecordDict({client_app.STATE: ConfigRecord(kept)}),
        run_config={},
    )
    content = RecordDict({CONFIG: ConfigRecord({ROUND_KEY: 3}), ARRAYS: to_arrays({})})
    with pytest.raises(ControlUnitLost, match="process ended; .* cannot start again: devices 0, 1") as lost:
        client_app._train(SimpleNamespace(content=content), context)
    assert [fault["kind"] for fault in lost.value.faults] == ["device", "cluster"]
