"""Faults of the server's own process: injected, and recorded by the process that goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from logging import WARNING
from pathlib import Path

from client_pipeline.runtime.control_unit.fault_files import note_injected
from client_pipeline.runtime.control_unit.fault_injection import server_dies
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.transport.faults import FaultRecord
from strategies.flower_names import log


class ServerFaults:
    """Faults of the process that runs the server app.

    Parameters
    ----------
    config : faults to inject
    run_dir : directory where they are noted
    completed : rounds that were done before this process began
    had_ended : True if these were all rounds of the run, which has more of them now
    """

    def __init__(self, config: FaultConfig, run_dir: Path, completed: int, *, had_ended: bool = False) -> None:
        self._config, self._run_dir, self._completed, self._had_ended = config, run_dir, completed, had_ended

    def begin_round(self, server_round: int, usual_s: float) -> None:
        """Kill this process in the midst of the round, if the round's draw says so."""
        # Not in a process' first round: the run that goes on would die in the same one for ever.
        share = server_dies(self._config, server_round)
        if share is not None and server_round > self._completed + 1:
            log(WARNING, "round %d: to be injected: the server is killed", server_round)

            def die(delay_s: float) -> None:
                time.sleep(delay_s)
                note_injected(self._run_dir, "server", server_round)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=die, args=(share * usual_s,), daemon=True).start()

    def records(self, server_round: int) -> list[FaultRecord]:
        """Return, once, that this process goes on where another ended too early."""
        if not self._completed or self._had_ended or server_round != self._completed + 1:
            return []
        return [
            FaultRecord(
                kind="server",
                cluster=None,
                round=server_round,
                recovered=True,
                reason=f"the run goes on from the checkpoint of round {self._completed}",
            )
        ]
