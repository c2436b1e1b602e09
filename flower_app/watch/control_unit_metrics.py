"""Metrics of a control unit's machine for Prometheus, read from its folder alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from client_pipeline.runtime.control_unit.fault_files import recorded_faults, recorded_signs
from flower_app.node.round_notes import NOTES, RoundNotes, read_notes
from flower_app.watch.prometheus_text import Sample, exposition

_MEANINGS = {
    "collapipe_cu_in_round": "1 while the control unit trains a round.",
    "collapipe_cu_round": "The round under way; between rounds the newest that was trained.",
    "collapipe_cu_rounds_total": "Rounds of the run that were trained here.",
    "collapipe_cu_failed_rounds_total": "Rounds of the run that failed here.",
    "collapipe_cu_faults_total": "Faults by kind, over the rounds that are over.",
    "collapipe_cu_bytes_total": "Bytes by way: the decoder's stream up and down, and between devices.",
    "collapipe_cu_round_seconds": "Duration of the newest round that was trained.",
    "collapipe_cu_train_loss": "Loss of the newest round that was trained.",
    "collapipe_cu_round_faults": "Faults by kind of the round under way, so far.",
    "collapipe_cu_device_up": "1 if the device answers in the round under way, 0 if it is silent or has ended.",
    "collapipe_cu_device_missing_seconds": "Seconds since the device fell silent, or ended.",
    "collapipe_cu_device_memory_bytes": "Peak memory of the device in the newest round.",
    "collapipe_cu_device_busy_seconds": "Seconds of computation of the device in the newest round.",
    "collapipe_cu_device_blocks": "TEBs of the device in the newest round.",
}


def control_unit_metrics(checkpoints: Path, cluster: int) -> str:
    """Return all metrics of a control unit's newest run; without a run, the one that says that no round goes on."""
    labels = {"cluster": str(cluster)}
    files = [*checkpoints.glob(f"*/cluster-{cluster}/{NOTES}")]
    if not files:
        return exposition([Sample("collapipe_cu_in_round", {}, 0.0)], _MEANINGS, labels)
    folder = max(files, key=lambda file: file.stat().st_mtime).parent
    return exposition(_samples(read_notes(folder), folder), _MEANINGS, {**labels, "run": folder.parent.name})


def _samples(notes: RoundNotes, folder: Path) -> Iterator[Sample]:
    is_in_round = notes.is_in_round
    round_ = int((notes.under_way if is_in_round else notes.newest).get("round", 0))
    yield Sample("collapipe_cu_in_round", {}, float(is_in_round))
    yield Sample("collapipe_cu_round", {}, float(round_))
    yield Sample("collapipe_cu_rounds_total", {}, float(notes.rounds))
    yield Sample("collapipe_cu_failed_rounds_total", {}, float(notes.failed))
    for kind, number in sorted(notes.faults.items()):
        yield Sample("collapipe_cu_faults_total", {"kind": kind}, float(number))
    for way, number in sorted(notes.bytes.items()):
        yield Sample("collapipe_cu_bytes_total", {"way": way}, float(number))
    for name, metric in (("seconds", "round_seconds"), ("loss", "train_loss")):
        if notes.newest.get(name) is not None:
            yield Sample(f"collapipe_cu_{metric}", {}, float(notes.newest[name]))
    devices = notes.newest.get("devices", {})
    for device, spent in devices.items():
        for name, metric in (("bytes", "memory_bytes"), ("busy_s", "busy_seconds"), ("blocks", "blocks")):
            if spent.get(name) is not None:
                yield Sample(f"collapipe_cu_device_{metric}", {"device": device}, float(spent[name]))
    if is_in_round:
        yield from _present(folder, round_, set(devices))


def _present(folder: Path, round_: int, devices: set[str]) -> Iterator[Sample]:
    kinds = Counter(str(fault["kind"]) for fault in recorded_faults(folder, round_))
    for kind, number in sorted(kinds.items()):
        yield Sample("collapipe_cu_round_faults", {"kind": kind}, float(number))
    missing = {str(sign["device"]): sign for sign in recorded_signs(folder, round_)}
    for device in sorted(devices | missing.keys()):
        yield Sample("collapipe_cu_device_up", {"device": device}, float(device not in missing))
    for device, sign in missing.items():
        labels = {"device": device, "state": str(sign["state"])}
        yield Sample("collapipe_cu_device_missing_seconds", labels, max(time.time() - float(sign["since"]), 0.0))
