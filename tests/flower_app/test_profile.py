"""``collapipe profile``: what is measured becomes a scenario that loads, plans and gives the measured seconds back."""

import dataclasses
import json
from dataclasses import replace

import psutil
import pytest
from typer.testing import CliRunner

from client_pipeline.families import transformer
from client_pipeline.runtime.devices.measurement import (
    DeviceMeasurement,
    LinkMeasurement,
    Measurement,
    MeasurementError,
    PassTimes,
    measure,
)
from client_pipeline.system.costs import model_costs
from client_pipeline.system.latency import link_time, micro_batch_work, teb_time
from client_pipeline.system.radio import shannon_rate
from client_pipeline.system.scenario import load_scenario
from flower_app.cli.main import app
from flower_app.profile import Profile, scenario_text
from flower_app.verify import model_builder

TINY = transformer.spec(vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=2, decoder_layers=1)


def device(small_s, large_s, **changes):
    passes = {
        "small": PassTimes(samples=4, forward_s=small_s / 4, backward_s=small_s * 3 / 4),
        "large": PassTimes(samples=16, forward_s=large_s / 4, backward_s=large_s * 3 / 4),
    }
    return DeviceMeasurement(**{"node": "10.0.0.1", "frequency_hz": 2.3e9, "memory_bytes": 3.4e9} | passes | changes)


def link(first, second, rate_bit_s, latency_s=2e-4):
    return LinkMeasurement(first=first, second=second, rate_bit_s=rate_bit_s, latency_s=latency_s)


def test_two_sizes_part_the_overhead_from_the_samples():
    # 1 s and 0.5 s for each of 4 or 16 samples.
    found = device(3.0, 9.0)
    assert (found.overhead_s, found.sample_s) == (pytest.approx(1.0), pytest.approx(0.5))


MEASURED = Measurement(
    devices=[device(3.1, 9.3), device(6.0, 18.7, frequency_hz=1e9, memory_bytes=2.1e9), device(2.0, 6.1)],
    links=[link(0, 1, 9.4e8), link(1, 2, 3.1e7, 5e-3), link(2, 0, 2.6e10)],
)


def write(tmp_path, measured, spec, batch_size=16, length=32):
    costs = model_costs(spec, sequence_length=length, batch_size=batch_size)
    path = tmp_path / "measured.toml"
    path.write_text(
        scenario_text([measured], costs, costs, blocks=int(spec.config["encoder_layers"]), batch_size=batch_size)
    )
    return load_scenario(str(path)), costs


def modelled_s(scenario, k, samples, cluster=0):
    costs, found = scenario.costs, scenario.clusters[cluster][k]
    work = micro_batch_work(costs.o_f, costs.o_b, samples, costs.o_b_scaling)
    return float(teb_time(work, found.flop_per_cycle, found.frequency, costs.t0))


def rate(scenario, k):
    found = scenario.clusters[0][k]
    return float(
        shannon_rate(
            found.link_bandwidth_hz,
            found.link_power_w,
            found.link_gain,
            found.link_interference_w,
            scenario.noise_psd,
        )
    )


def test_the_scenario_gives_the_measured_seconds_and_rates_back(tmp_path):
    scenario, costs = write(tmp_path, MEASURED, model_builder("", 0)().spec)
    for k, measured in enumerate(MEASURED.devices):
        assert modelled_s(scenario, k, 16) == pytest.approx(measured.large.seconds, rel=1e-4)
        assert rate(scenario, k) == pytest.approx(MEASURED.links[k].rate_bit_s, rel=1e-4)
        assert scenario.clusters[0][k].memory == measured.memory_bytes
        assert scenario.clusters[0][k].frequency == measured.frequency_hz
    # The device with the least overhead: the smaller micro-batch fits, too.
    least = min(range(3), key=lambda k: MEASURED.devices[k].overhead_s)
    assert modelled_s(scenario, least, 4) == pytest.approx(MEASURED.devices[least].small.seconds, rel=1e-4)
    assert float(link_time(0.0, 1.0, scenario.costs.lat)) == 5e-3
    assert scenario.costs.block_memory == pytest.approx(costs.block_memory, rel=1e-5)
    assert scenario.costs.z_bits == pytest.approx(costs.z_bits, rel=1e-5)
    assert scenario.channels.speed_factor == ((1.0, 1.0),)


def test_a_network_counts_each_teb_as_the_costliest_and_its_speeds_are_those_of_the_measured_one(tmp_path):
    costs = model_costs(TINY, sequence_length=32, batch_size=16)
    costliest = dataclasses.replace(costs, o_f=3 * costs.o_f, o_b=2 * costs.o_b)
    files = [tmp_path / name for name in ("equal.toml", "unequal.toml")]
    for file, largest in zip(files, (costs, costliest), strict=True):
        file.write_text(scenario_text([MEASURED], costs, largest, blocks=2, batch_size=16))
    equal, unequal = (load_scenario(str(file)) for file in files)
    assert unequal.clusters == equal.clusters
    assert unequal.costs.o_f == pytest.approx(3 * equal.costs.o_f, rel=1e-4)
    assert unequal.costs.o_b == pytest.approx(2 * equal.costs.o_b, rel=1e-4)


def test_several_clusters_become_tables_of_their_own(tmp_path):
    slow = Measurement(
        devices=[device(5.0, 17.0, node="10.0.1.1"), device(6.0, 21.0, node="10.0.1.2")], links=[link(0, 1, 2.5e7)]
    )
    alone = Measurement(devices=[device(2.5, 8.0, node="10.0.2.1")], links=[])
    costs = model_costs(TINY, sequence_length=32, batch_size=16)
    text = scenario_text([MEASURED, slow, alone], costs, costs, blocks=2, batch_size=16)
    path = tmp_path / "measured.toml"
    path.write_text(text)
    scenario = load_scenario(str(path))
    assert [len(cluster) for cluster in scenario.clusters] == [3, 2, 1] and scenario.num_channels == 3
    for n, measured in enumerate((MEASURED, slow, alone)):
        for k, found in enumerate(measured.devices):
            planned = scenario.clusters[n][k]
            assert modelled_s(scenario, k, 16, n) == pytest.approx(found.large.seconds, rel=1e-4)
            assert (planned.memory, planned.frequency) == (found.memory_bytes, found.frequency_hz)
        for k in range(len(measured.devices) if measured.links else 0):
            assert scenario.clusters[n][k].link_bandwidth_hz == pytest.approx(measured.rate_after(k), rel=1e-4)
    head = "# 6 devices of 3 clusters, measured by collapipe profile on 10.0.0.1, 10.0.1.1, 10.0.1.2, 10.0.2.1; "
    assert text.startswith(head) and text.count("# Measured rates in Mbit/s.") == 1
    outcome = call("plan", "--scenario", path, "--json")
    assert outcome.exit_code == 0 and [len(c["delta"]) for c in json.loads(outcome.stdout)["clusters"]] == [3, 2, 1]


def test_files_of_several_clusters_are_joined_to_one_network(tmp_path):
    slow = Measurement(devices=[device(5.0, 17.0), device(6.0, 21.0)], links=[link(0, 1, 2.5e7)])
    spec = model_builder("", 0)().spec
    costs = model_costs(spec, sequence_length=32, batch_size=16)
    files = []
    for n, measured in enumerate((MEASURED, slow)):
        found = Profile(scenario=tmp_path / "x.toml", model=spec, costs=costs, measurements=(measured,))
        files += ["--measured", tmp_path / f"cluster-{n}.json"]
        files[-1].write_text(json.dumps(found.to_dict()))
    out = tmp_path / "network.toml"
    done = call("profile", *files, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert out.read_text() == scenario_text([MEASURED, slow], costs, costs, blocks=4, batch_size=16)
    assert [len(cluster["devices"]) for cluster in json.loads(done.stdout)["clusters"]] == [3, 2]
    other = call("profile", *files, "--length", 16, "--out", out)
    assert other.exit_code != 0 and "cluster-0.json: expected" in other.stderr and "--model, --length" in other.stderr
    both = call("profile", *files, "--address", "here:1", "--out", out)
    assert both.exit_code != 0 and "expected no --address beside it" in both.stderr
    files[1].write_text('{"devices": []}')
    broken = call("profile", *files, "--out", out)
    assert broken.exit_code != 0 and "cluster-0.json: expected what collapipe profile --json printed" in broken.stderr


def test_a_scenario_that_cannot_be_written_leaves_nothing_aside(tmp_path):
    spec = model_builder("", 0)().spec
    figures, out = tmp_path / "cluster.json", tmp_path / "network.toml"
    figures.write_text(
        json.dumps(
            Profile(
                scenario=out,
                model=spec,
                costs=model_costs(spec, sequence_length=32, batch_size=16),
                measurements=(MEASURED,),
            ).to_dict()
        )
    )
    out.mkdir()
    assert call("profile", "--measured", figures, "--out", out).exit_code != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.json", "network.toml"]


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_planner_plans_with_it(tmp_path, count):
    links = [[], [link(0, 1, 9.4e8)], MEASURED.links][count - 1]
    write(tmp_path, Measurement(devices=MEASURED.devices[:count], links=links), model_builder("", 0)().spec)
    outcome = call("plan", "--scenario", tmp_path / "measured.toml", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    assert answer["status"] == "optimal"
    assert sum(answer["clusters"][0]["delta"]) == 4


def test_real_devices_are_measured_planned_for_and_ended(local_ray, tmp_path):
    out = tmp_path / "here.toml"
    outcome = call("profile", "--devices", 3, "--length", 8, "--batch-size", 4, "--out", out, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    # Ray may say before it that a worker of an earlier test has ended.
    figures = json.loads(outcome.stdout[outcome.stdout.index("{") :])
    assert len(figures["devices"]) == len(figures["links"]) == 3
    assert [(f["first"], f["second"]) for f in figures["links"]] == [(0, 1), (1, 2), (2, 0)]
    scenario = load_scenario(str(out))
    for k, found in enumerate(figures["devices"]):
        assert (found["small"]["samples"], found["large"]["samples"]) == (1, 4)
        seconds = found["large"]["forward_s"] + found["large"]["backward_s"]
        assert seconds > 0 and found["memory_bytes"] > 0 and found["overhead_s"] >= 0
        assert modelled_s(scenario, k, 4) == pytest.approx(seconds, rel=1e-4)
        assert rate(scenario, k) == pytest.approx(figures["links"][k]["rate_bit_s"], rel=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
    assert call("plan", "--scenario", out).exit_code == 0
    own = {p.pid for p in psutil.Process().children(recursive=True)}
    left = [p for p in psutil.process_iter(["name"]) if p.pid in own and p.info["name"].startswith("ray::Measured")]
    assert not psutil.wait_procs(left, timeout=120)[1]


def test_a_device_that_fails_is_named(local_ray):
    broken = replace(TINY, config=TINY.config | {"feed_forward": -1})
    with pytest.raises(MeasurementError, match="device 0: "):
        measure(broken, length=4, batch_size=2, devices_per_node=1, timeout_s=240)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "0"), "--devices: expected at least 1, found 0"),
        (("--batch-size", "0"), "--batch-size: expected at least 1, found 0"),
        (("--length", "257"), "--length: expected at most the model's 256 positions, found 257"),
        (("--measured", "none.json"), "--measured: no file none.json; collapipe profile --json prints one"),
        (("--out", "measured.json"), "--out: expected a file that ends in .toml, as --scenario will"),
        (("--out", "no-such-folder/x.toml"), "--out: no folder"),
        (("--model", "no-such-folder/model"), "--model"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    outcome = call("profile", *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert not list(tmp_path.iterdir())
