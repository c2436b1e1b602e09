"""Names of a saved model's files, for programs that have not imported torch yet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from client_pipeline.documents import json_value
from client_pipeline.durable import begin_digest

MODEL_FOLDER = "model"
BASE_FILES = "base.json"
"""In the folder of the model: place of the frozen weights, if they are not among the others."""


def digest_early(run_dir: Path) -> None:
    """Begin the digests of a run's frozen weights: threads compute them while torch is imported.

    Mistakes are left to who reads the model.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        base = json_value((run_dir / MODEL_FOLDER / BASE_FILES).read_text(encoding="utf-8"))
        for path in [Path(base["source"], Path(file["name"]).name) for file in base["files"]]:
            if path.is_file():
                begin_digest(path)
