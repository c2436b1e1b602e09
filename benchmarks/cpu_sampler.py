"""Processor time of a Python program by place: a thread looks every few milliseconds at each thread's use.

``sitecustomize`` starts it in every process of a run (:mod:`round_profile`). What a thread has used since the last look
counts for the functions that it is in now; threads that are not Python's do not count.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

LOOK_S = 0.005
WRITE_S = 1.0
FOLDER = "COLLAPIPE_CPU_SAMPLES"
"""Environment: the folder of the samples, a file for each process and second."""
_MOST_S = 0.5
"""More than that between two looks is another thread's that had the same number."""


def start() -> None:
    """Begin to look, if a folder is named."""
    if folder := os.environ.get(FOLDER):
        threading.Thread(target=_look, args=(Path(folder),), name="cpu-sampler", daemon=True).start()


def _look(folder: Path) -> None:
    sampler = threading.get_ident()
    used_by_thread: dict[int, float] = {}
    seconds: Counter[str] = Counter()
    write_at = time.monotonic() + WRITE_S
    while True:
        time.sleep(LOOK_S)
        for thread, frame in sys._current_frames().items():
            if thread == sampler:
                continue
            try:
                used = time.clock_gettime(time.pthread_getcpuclockid(thread))
            except OSError:
                continue  # it has ended
            spent = used - used_by_thread.get(thread, used)
            used_by_thread[thread] = used
            if not 0 < spent < _MOST_S:
                continue
            names = []
            here = frame
            while here is not None:
                place = "/".join(here.f_code.co_filename.split("/")[-3:])
                names.append(f"{place}:{here.f_code.co_qualname}")
                here = here.f_back
            seconds[";".join(reversed(names))] += spent
        if time.monotonic() > write_at:
            path = folder / f"{os.getpid()}-{time.time_ns()}.json"
            path.write_text(json.dumps({"at": time.time(), "seconds": seconds}))
            seconds.clear()
            write_at = time.monotonic() + WRITE_S
