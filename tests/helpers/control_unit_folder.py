"""A control unit's folder in the midst of its second round, as its node leaves it, and the metrics of it."""

from client_pipeline.link.cluster_news import SILENT, LifeSign
from client_pipeline.runtime.control_unit import fault_files
from client_pipeline.runtime.transport.faults import FaultRecord
from flower_app.node.round_notes import noted_round
from flower_app.watch.control_unit_metrics import control_unit_metrics

REPORT = {
    "loss": 0.5,
    "link_bytes": 300,
    "stream_bytes": {"up": 20, "down": 10},
    "devices": {
        "0": {"blocks": 2, "busy_s": 1.5, "held_bytes": 4096},
        "1": {"blocks": 1, "busy_s": 0.5},
    },
    "faults": [{"kind": "device"}, {"kind": "device"}, {"kind": "stream"}],
}


def control_unit_text(folder):
    """Have a round end and another one begin, in which device 1 is lost and device 0 silent."""
    checkpoints = folder / "checkpoints"
    of_run = checkpoints / "the-run" / "cluster-2"
    with noted_round(of_run, 1) as report:
        report |= REPORT
    with noted_round(of_run, 2) as report:
        record = FaultRecord(kind="device", cluster=2, round=2, recovered=True, device=1)
        fault_files.keep(of_run, 2, [record], [LifeSign(0, SILENT, 3.0)])
        text = control_unit_metrics(checkpoints, 2)
        report |= REPORT
    return text
