"""Faults on purpose are noted before they come, and the soak finds each that is recorded twice or not at all."""

import importlib.util
from types import SimpleNamespace

import pytest

from client_pipeline.runtime import fault_injection
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.fault_files import note_injected, read_injected
from client_pipeline.runtime.fault_injection import FaultInjector, draw_faults
from helpers.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def soak_report():
    spec = importlib.util.spec_from_file_location("soak_report", BENCHMARKS / "soak_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fault(kind, round_, cluster=0, device=None, time=0.0):
    return {"kind": kind, "round": round_, "cluster": cluster, "device": device, "time": time}


class Stream:
    is_remote = True

    def __init__(self):
        self.cuts = []

    def cut(self, for_s):
        self.cuts.append(for_s)


@pytest.mark.parametrize(("kind", "lasts_s"), [("stream", 0.0), ("partition", 2.5)])
def test_a_cut_is_noted_with_its_place_and_once(tmp_path, kind, lasts_s):
    config, stream = FaultConfig(**{kind: 1.0}, partition_seconds=2.5, seed=3), Stream()
    injector = FaultInjector(config, 1, 2, tmp_path)
    [expected] = draw_faults(config, 7, 1, 2)
    injector.begin_round(7, stream)
    for step in (1, 2):
        for moment in "FGB":
            for micro_batch in range(4):
                injector.arrived(step, moment, micro_batch, 4, {})
    assert stream.cuts == [lasts_s]
    [noted] = read_injected(tmp_path)
    assert noted.pop("time") > 0
    assert noted == {"kind": kind, "round": 7, "cluster": 1, "device": None, "step": expected.step}


def test_a_cluster_without_a_stream_has_no_cut_to_note(tmp_path):
    injector = FaultInjector(FaultConfig(stream=1.0), 0, 1, tmp_path)
    injector.begin_round(1, SimpleNamespace(is_remote=False))
    for moment in "FGB":
        injector.arrived(1, moment, 0, 1, {})
    assert read_injected(tmp_path) == []


def test_lines_add_up_over_processes(tmp_path):
    for round_ in (1, 2):
        note_injected(tmp_path / "cluster-0", "cluster", round_, cluster=0)
    note_injected(None, "server", 3)
    assert [event["round"] for event in read_injected(tmp_path / "cluster-0")] == [1, 2]


def test_each_fault_is_to_be_recorded_once(soak_report):
    injected = [fault("device", 1, device=1), fault("device", 2, 1, 0), fault("cluster", 2), fault("stream", 3)]
    recorded = [fault("device", 1, device=1), fault("cluster", 2), fault("cluster", 2), fault("joined", 3)]
    found = soak_report.count(injected, recorded, [])
    missed = {kind: (entry["missed"], entry["not_injected"]) for kind, entry in found.items()}
    assert {kind: counts for kind, counts in missed.items() if any(counts)} == {
        "device": (1, 0),
        "cluster": (0, 1),
        "stream": (1, 0),
    }


def test_a_cut_that_lasts_is_a_partition_where_one_was_injected(soak_report):
    injected = [fault("partition", 1), fault("stream", 2), fault("partition", 2), fault("partition", 4)]
    recorded = [fault("stream", 1), fault("stream", 2), fault("stream", 2), fault("stream", 3)]
    found = soak_report.count(injected, recorded, [])
    assert {kind: (found[kind]["missed"], found[kind]["not_injected"]) for kind in ("stream", "partition")} == {
        "stream": (0, 1),
        "partition": (1, 0),
    }


def test_what_died_with_the_server_is_expected_of_the_round_that_is_trained_again(soak_report):
    injected = [
        fault("device", 4, device=0, time=10.0),
        fault("device", 5, device=1, time=20.0),
        fault("server", 5, cluster=None, time=21.0),
        fault("device", 5, device=1, time=40.0),
    ]
    recorded = [fault("device", 4, device=0), fault("server", 5, cluster=None), fault("device", 5, device=1)]
    found = soak_report.count(injected, recorded, [(4, 30.0)])
    assert found["device"]["died_with_server"] == 1
    assert all(entry["missed"] == entry["not_injected"] == 0 for entry in found.values())


@pytest.mark.slow
def test_large_process_ids_reach_the_shell_that_stops_them(tmp_path):
    fault_injection._shell(f'echo "$1 $2" > {tmp_path}/told', 1234567, 0.05).wait(timeout=20)
    assert (tmp_path / "told").read_text() == "1234567 0.050000\n"
