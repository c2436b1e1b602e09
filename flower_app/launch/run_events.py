"""Messages about a run's events: a fault and its recovery in one line, and the command that continues a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_app.runs.run_directory import read_run_config

_HAPPENED = {
    "device": "lost its process",
    "freeze": "stands still",
    "link": "lost its neighbour",
    "slow": "fell behind",
    "joined": "is back",
    "stream": "lost its stream to the decoder",
    "nan": "computed numbers that are not finite",
    "cluster": "lost its control unit",
    "server": "the server app ended",
}


def fault_line(fault: Mapping[str, Any]) -> str:
    """Describe a fault in one line.

    Parameters
    ----------
    fault : of a round's line, as :class:`client_pipeline.runtime.transport.faults.FaultRecord` has it

    >>> fault_line({"round": 3, "cluster": 1, "device": 4, "kind": "device", "recovered": True, "seconds": 0.31})
    'round 3: cluster 1, device 4: lost its process; recovered in 0.3 s'
    """
    kind, text = str(fault.get("kind")), what_happened(fault)
    if kind in ("joined", "slow") and fault.get("recovered") and fault.get("seconds") is None:
        return text
    seconds = fault.get("seconds")
    if fault.get("recovered"):
        return f"{text}; recovered" + (f" in {seconds:.1f} s" if isinstance(seconds, int | float) else "")
    reason = str(fault.get("reason") or "")
    return f"{text}; not recovered" + (f": {reason}" if reason else "")


def what_happened(fault: Mapping[str, Any]) -> str:
    """Describe a fault that is not over yet."""
    places = [f"{name} {fault[name]}" for name in ("cluster", "device") if fault.get(name) is not None]
    kind = str(fault.get("kind"))
    return f"round {fault.get('round')}: {', '.join([*places]) or 'server'}: {_HAPPENED.get(kind, kind)}"


def resume_line(run_dir: Path, superlink: str = "") -> str:
    """Return the command that continues a run, or the reason why it cannot go on."""
    # Imported here, since torch would stay in the memory of the command that follows a run.
    from flower_app.config.strategy_choice import check_can_resume
    from flower_app.runs import run_checkpoints

    try:
        config = read_run_config(run_dir)
        check_can_resume(config)
        round_ = run_checkpoints.newest(run_dir, config).round
    except (ValueError, FileNotFoundError) as error:
        return f"it cannot be continued: {error}"
    run = run_dir.name if run_dir.parent == Path("runs").resolve() else str(run_dir)
    command = f"collapipe run --resume {run}" + (f" --superlink {superlink}" if superlink else "")
    return f"continue after round {round_}: {command}"
