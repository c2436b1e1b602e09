from flower_app.report.sinks import TensorBoardLog

RECORD = {
    "train_loss": 3.5,
    "lr": 0.001,
    "metrics": {"bleu": 12.5},
    "bytes_down": 1000,
    "bytes_up": 2000,
    "round_s": 1.5,
    "clusters": [{"cluster": 0, "devices": {"3": {"idle_bytes": 100, "peak_bytes": 350}, "4": {"blocks": 2}}}],
    "failed": [{"cluster": 1, "reason": "gone"}],
    "plan": {"left_out": []},
    "virtual": {
        "latency_s": 120.0,
        "energy_j": 80.0,
        "gamma_max": 2.5,
        "clusters": [
            {"cluster": 0, "train_s": 90.0, "uplink_s": 20.0, "waiting_s": 10.0, "gamma": 2.25, "queue": 0.5,
             "uplink_energy_j": 5.0, "device_energy_j": [1.0, 2.0], "link_bytes": [3.0, 4.0]},
            {"cluster": 1, "train_s": None, "gamma": 2.75, "queue": 0.0},
        ],
    },
}  # fmt: skip


def read_back(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_scalars_of_each_round_are_read_back(tmp_path):
    log = TensorBoardLog(tmp_path, start_round=1)
    log.write({"round": 1, **RECORD})
    log.write({"round": 2, **RECORD, "train_loss": 3.0, "metrics": {}})
    log.close()
    found = read_back(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 3.5), (2, 3.0)]
    assert found["validation/bleu"] == [(1, 12.5)]
    last = {tag: values[-1][1] for tag, values in found.items()}
    assert last["virtual/latency_s"] == 120.0
    assert last["virtual/energy_j"] == 80.0
    assert last["train_s/cluster_0"] == 90.0
    assert last["gamma/cluster_1"] == 2.75
    assert last["queue/cluster_0"] == 0.5
    assert last["device_energy_j/cluster_0"] == 3.0
    assert last["link_bytes/cluster_0"] == 7.0
    assert last["messages/bytes_up"] == 2000
    assert last["memory_bytes/cluster_0_device_3"] == 250
    assert last["round/failed"] == 1
    assert "train_s/cluster_1" not in found
    assert "memory_bytes/cluster_0_device_4" not in found


def test_a_resumed_run_replaces_the_rounds_that_it_repeats(tmp_path):
    first = TensorBoardLog(tmp_path, start_round=1)
    for number in (1, 2, 3):
        first.write({"round": number, "train_loss": 9.0})
    first.close()
    second = TensorBoardLog(tmp_path, start_round=3)
    second.write({"round": 3, "train_loss": 1.0})
    second.close()
    assert read_back(tmp_path / "tensorboard")["train/loss"] == [(1, 9.0), (2, 9.0), (3, 1.0)]
