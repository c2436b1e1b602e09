"""The files that a run reads besides its configuration: one that goes on must find them as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from client_pipeline.durable import file_digest
from client_pipeline.run_identity import config_digest
from client_pipeline.system.scenario import scenario_content
from flower_app.config.run_config import RunConfig
from flower_app.tasks.data.corpus import DataConfig, count_files
from flower_app.tasks.data.texts import matching_files

_SPLITS = ("train", "validation", "test")


def input_digests(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the scenario, the plan, the chat template and the data files that are here, by configuration key."""
    digests = {"scenario": hashlib.sha256(scenario_content(config.scenario)).hexdigest()}
    if config.plan:
        digests["plan"] = file_digest(Path(config.plan))
    if Path(config.task.chat_template).is_file():
        digests["task.chat-template"] = file_digest(Path(config.task.chat_template))
    for key, paths in _data_files(config.data, _SPLITS, None):
        digests[key] = _joint_digest(paths)
    return digests


def data_digest(data: DataConfig, cluster: int) -> str:
    """SHA-256 of a cluster's training files; empty where it has none."""
    digests = {key: _joint_digest(paths) for key, paths in _data_files(data, ("train",), cluster)}
    return config_digest(digests) if digests else ""


def check_inputs(old_digests: Mapping[str, str], new_digests: Mapping[str, str]) -> None:
    """Refuse to go on with other files than a run began with."""
    for key in sorted(old_digests.keys() | new_digests.keys()):
        expected, digest = old_digests.get(key, ""), new_digests.get(key, "")
        if expected != digest:
            raise ValueError(
                f"resume: {key}: the file is not the one that the run began with (expected SHA-256 "
                f"{expected[:12] or 'of no file'}, found {digest[:12] or 'no file'}); put it back as it was, or "
                "start a new run"
            )


def _data_files(data: DataConfig, splits: tuple[str, ...], cluster: int | None) -> Iterator[tuple[str, list[Path]]]:
    if data.source == "hub" and Path(data.hub_id).is_dir():
        yield "data.hub-id", sorted(path for path in Path(data.hub_id).rglob("*") if path.is_file())
    if data.source != "files":
        return
    for split in splits:
        for side in ("source", "target"):
            name = str(getattr(data, f"{split}_{side}"))
            names = [name]
            if "{cluster}" in name:
                numbers = range(count_files(data)) if cluster is None else (cluster,)
                names = [name.replace("{cluster}", str(number)) for number in numbers]
            paths = [file for each in names if each for file in matching_files(Path(data.path) / each)]
            if paths:
                yield f"data.{split}-{side}", paths


def _joint_digest(paths: list[Path]) -> str:
    digests = [file_digest(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
