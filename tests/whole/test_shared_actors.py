"""Simulated devices and control units that share actors: the same training, bit for bit, and the same recovery."""

import os
import signal
import time
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from client_pipeline.runtime.arrangement import Arrangement
from flower_app.config.sources import load_config
from flower_app.launch.run_series import SeriesRun, train_series
from helpers.command_line import TINY, rounds
from helpers.recovery_cases import THREE, assert_equal, control_unit, faults, initial, once, train

pytestmark = pytest.mark.slow

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 3
devices = 2
seed = 3
[device]
flop-per-cycle = 20.0
frequency-ghz = { min = 0.3, max = 0.8 }
memory-gb = 1.2
[block]
memory-gb = 0.375
"""
APART = {"runtime.devices-per-actor": 1, "runtime.clusters-per-actor": 1}
ARRANGEMENTS = {
    "apart": APART,
    "automatic": {},
    "devices": APART | {"runtime.devices-per-actor": 4},
    "one-actor": {"runtime.devices-per-actor": 6, "runtime.clusters-per-actor": 3},
    # Devices that hand gradients over in 8 bits do so in memory, too.
    "apart-int8": APART | {"compression.activations": "int8"},
    "automatic-int8": {"compression.activations": "int8"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run for each arrangement, one after the other in one simulation: their directories, and the series' log."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "three.toml").write_text(SCENARIO)
    common = TINY | {"num-rounds": 2, "scenario": folder / "three.toml", "model.dropout": 0.1}
    series = [
        SeriesRun(
            name,
            replace(
                load_config(None, [f"{key}={value}" for key, value in (common | more).items()]),
                run_dir=str(folder / name),
            ),
        )
        for name, more in ARRANGEMENTS.items()
    ]
    train_series(series, folder / "session", print)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "other"),
    [("automatic", "apart"), ("devices", "apart"), ("one-actor", "apart"), ("automatic-int8", "apart-int8")],
)
def test_every_arrangement_trains_the_same(name, other, trained):
    found, expected = rounds(trained / name), rounds(trained / other)
    assert [line["train_loss"] for line in found] == [line["train_loss"] for line in expected]
    weights = [load_file(trained / n / "checkpoint" / "round-000002" / "weights.safetensors") for n in (name, other)]
    assert_equal(*weights)
    for line, expected_line in zip(found, expected, strict=True):
        assert line["virtual"] == expected_line["virtual"]
        for report, expected_report in zip(line["clusters"], expected_line["clusters"], strict=True):
            assert report["link_bytes"] == expected_report["link_bytes"]
            for device, entry in expected_report["devices"].items():
                assert report["devices"][device]["held_bytes"] == entry["held_bytes"] > 0
                # Of a process that others use, too, nothing is said.
                assert "peak_bytes" in entry and ("peak_bytes" in report["devices"][device]) == (name == "apart")


def test_another_number_of_bits_is_another_training(trained):
    """What the comparison above can see."""
    first, second = (rounds(trained / name)[-1]["train_loss"] for name in ("automatic", "automatic-int8"))
    assert first != second


@pytest.mark.usefixtures("local_ray", "end_actors")
def test_a_shared_actor_that_ends_costs_its_devices_a_step_and_changes_nothing():
    placement = Arrangement(device_actors=2).placement(0, 3)
    units = [control_unit("shared-quiet"), control_unit("shared-ends", placement=placement)]
    expected, _ = train(units[0], initial())
    pids = []

    def end():
        pool = units[1].pipeline.pool
        pids.append({device: pid for device, (pid, _) in pool.pids.items()})
        os.kill(pids[0][0], signal.SIGKILL)

    once(units[1], round_=2, step=2, kind="G", micro_batch=1, act=end)
    weights, results = train(units[1], initial(), plan=THREE)
    assert_equal(weights, expected)
    shared = {device for device, pid in pids[0].items() if pid == pids[0][0]}
    assert shared == {0, 2} and {who for kind, who, *_ in faults(results) if kind == "device"} == shared
    # The actor is soon there again, and with it both devices: from then on they take part.
    for number in range(3, 40):
        weights, [later] = train(units[1], weights, [number], plan=THREE)
        if joined := [fault["device"] for fault in later.report["faults"] if fault["kind"] == "joined"]:
            break
        time.sleep(1.0)
    assert set(joined) <= shared and units[1].pipeline.usable([0, 1, 2]) == [0, 1, 2]
    for unit in units:
        unit.close()
