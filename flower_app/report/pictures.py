"""Report and trace of a run. A picture that fails never fails the run."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger("flwr.collapipe.pictures")


def write_pictures(run_dir: Path) -> Path | None:
    """Write ``report.html``, ``trace.json`` and ``receipt.json`` of a run that has at least one round.

    Returns
    -------
    The report; None if there is none, with the reason in the log.
    """
    if not (run_dir / "rounds.jsonl").is_file():
        return None
    try:
        # Plotting takes seconds to import.
        from flower_app.report.chrome_trace import write_trace
        from flower_app.report.page import write_report
        from flower_app.report.receipt_section import write_receipt

        write_trace(run_dir)
        write_receipt(run_dir)
        return write_report([run_dir])
    except Exception as error:
        logger.warning("report of %s: %s: %s", run_dir, type(error).__name__, error)
        return None
