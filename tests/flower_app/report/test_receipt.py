"""The receipt of a run: what was predicted beside what was counted, and nothing that has one side alone."""

import json

import pytest

from flower_app.report.data import RunData
from flower_app.report.receipt_section import RECEIPT, receipt, receipt_section, write_receipt
from flower_app.runs.run_directory import append_round


def a_round(number, predicted_s=None, **virtual):
    cluster = {"cluster": 0, "uplink_bytes": 100.0, "link_bytes": [30.0, 10.0], "device_memory_bytes": [50.0, 80.0]}
    report = {
        "cluster": 0,
        "link_bytes": 44,
        "stream_bytes": {"up": 7, "down": 5},
        "devices": {"0": {"held_bytes": 45}, "1": {"held_bytes": 88}},
    }
    plan = {} if predicted_s is None else {"predictions": [{"predicted_train_s": predicted_s, "measured_train_s": 4.0}]}
    return {
        "round": number,
        "bytes_up": 90,
        "plan": plan,
        "clusters": [report],
        "virtual": {"clusters": [cluster | virtual, {"cluster": 1, "selected": False}]},
    }


def run(*rounds):
    return RunData(label="mine", rounds=rounds, timeline=None)


def test_figures_with_two_sides_are_compared():
    data = run(a_round(1), a_round(2, predicted_s=5.0))
    lines = {line["what"]: line for line in receipt(data, "scenario")}
    # The first round's seconds were not predicted.
    assert lines["local steps of the slowest cluster"]["error"] == pytest.approx(-0.2)
    assert (lines["uploads"]["predicted"], lines["uploads"]["real"]) == (200, 180)
    # A model's costs count the activations on the streams.
    assert receipt(data, "model")[1]["real"] == 180 + 14
    assert lines["between devices"]["error"] == pytest.approx(0.1)
    assert (lines["most that a device holds"]["predicted"], lines["most that a device holds"]["real"]) == (80, 88)


def test_memory_is_of_one_device_on_both_sides():
    data = run(a_round(1, device_memory_bytes=[95.0, 80.0]))
    assert receipt(data, "model")[-1] == {
        "what": "most that a device holds",
        "unit": "byte",
        "predicted": 80,
        "real": 88,
        "error": pytest.approx(0.1),
    }
    # A device that no plan has used took another's place.
    assert receipt(run(a_round(1, device_memory_bytes=[95.0, 0.0])), "model")[-1]["what"] == "between devices"


def test_what_has_one_side_is_left_out():
    assert [line["what"] for line in receipt(run(a_round(1, uplink_bytes=None, link_bytes=None)), "model")] == [
        "most that a device holds"
    ]
    assert receipt(run(), "model") == [] and receipt(run({"round": 1}), "model") == []
    assert "uploads" not in [line["what"] for line in receipt(run(a_round(1) | {"bytes_up": 0}), "scenario")]
    assert receipt_section(run({"round": 1})) == []


def test_the_section_says_whose_costs_were_predicted(tmp_path):
    [section] = receipt_section(run(a_round(1)), costs="scenario")
    assert "Predictions are of the scenario's model" in section and "+10.0%" in section
    [section] = receipt_section(run(a_round(1)), "a<b", 2, "model")
    assert 'id="receipt-2"' in section and "a&lt;b: Receipt" in section and "scenario" not in section
    assert "texts of planner.length tokens" in section
    append_round(tmp_path, a_round(1))
    (tmp_path / "config.toml").write_text('costs = "model"')
    assert json.loads(write_receipt(tmp_path).read_text()) == receipt(run(a_round(1)), "model")
    assert (tmp_path / RECEIPT).is_file()
