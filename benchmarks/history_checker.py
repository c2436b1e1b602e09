"""Check of what a deployed run left behind: each step applied once, no round twice, nothing foreign.

The witnesses are independent of each other: the lines of ``rounds.jsonl``, the step counts that the optimizers of the
decoder and of each control unit keep in their checkpoints, and the number of examples that each control unit has drawn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """A control unit's newest checkpoint."""

    run: str
    """Name of the run in whose folder it lies."""
    round: int
    """Last round that it holds."""
    drawn: int
    """Examples drawn."""
    steps: tuple[int, ...]
    """Step counts of its optimizers."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Files that one run left behind."""

    run: str
    num_clusters: int
    local_steps: int
    batch_size: int
    lines: Sequence[Json]
    """Lines of ``rounds.jsonl``."""
    committed: int
    """Round of the newest checkpoint; 0: none."""
    decoder_steps: tuple[int, ...] = ()
    """Step counts of the decoder's optimizer in the newest checkpoint."""
    clusters: Mapping[int, ClusterFile] = field(default_factory=dict)
    status: str = "finished"


def problems(evidence: Evidence) -> list[str]:
    """Return the contradictions, in words; empty if all fits together."""
    return [
        *_of_rounds(evidence),
        *_of_the_decoder(evidence),
        *(
            text
            for cluster, file in sorted(evidence.clusters.items())
            for text in _of_a_cluster(evidence, cluster, file)
        ),
    ]


def _of_rounds(evidence: Evidence) -> Iterable[str]:
    numbers = [int(line["round"]) for line in evidence.lines]
    for number, times in sorted(Counter(numbers).items()):
        if times > 1:
            yield f"round {number} was committed {times} times"
    if sorted(set(numbers)) != list(range(1, len(set(numbers)) + 1)):
        yield f"rounds are missing: {sorted(set(range(1, max(numbers) + 1)) - set(numbers))}"
    if numbers != sorted(numbers):
        yield "rounds stand out of order"
    if numbers and evidence.committed > max(numbers):
        yield f"the checkpoint is of round {evidence.committed}, the last line of round {max(numbers)}"
    if evidence.status == "finished" and evidence.committed != len(set(numbers)):
        yield f"the run has finished {len(set(numbers))} rounds and committed {evidence.committed}"
    for line in evidence.lines:
        trained = [int(report["cluster"]) for report in line["clusters"]]
        both = set(trained) & {int(entry["cluster"]) for entry in line["failed"]}
        for cluster, times in sorted(Counter(trained).items()):
            if times > 1:
                yield f"round {line['round']}: cluster {cluster} counts {times} times"
            if not 0 <= cluster < evidence.num_clusters:
                yield f"round {line['round']}: there is no cluster {cluster}"
        if both:
            yield f"round {line['round']}: clusters {sorted(both)} have trained and failed"


def _of_the_decoder(evidence: Evidence) -> Iterable[str]:
    """Its optimizer counts every step; a round in which all clusters failed may have had some."""
    lines = [line for line in evidence.lines if line["round"] <= evidence.committed]
    most = evidence.local_steps * len(lines)
    least = evidence.local_steps * sum(bool(line["clusters"]) for line in lines)
    for steps in set(evidence.decoder_steps):
        if not least <= steps <= most:
            yield f"the decoder has taken {steps} steps in {len(lines)} rounds, expected {_between(least, most)}"
    if len(set(evidence.decoder_steps)) > 1:
        yield f"parts of the decoder have taken different numbers of steps: {sorted(set(evidence.decoder_steps))}"


def _of_a_cluster(evidence: Evidence, cluster: int, file: ClusterFile) -> Iterable[str]:
    """Check that a cluster trains each round that counts once, and none unasked."""
    where = f"cluster {cluster}"
    if file.run != evidence.run:
        yield f"{where}: its checkpoint is of run {file.run}, expected {evidence.run}"
    if not 0 <= cluster < evidence.num_clusters:
        yield f"{where}: there is no such cluster"
    if file.round > evidence.committed + 1:
        yield f"{where}: its checkpoint is of round {file.round}, the server's of {evidence.committed}"
    lines = [line for line in evidence.lines if line["round"] <= file.round]
    counted = sum(any(report["cluster"] == cluster for report in line["clusters"]) for line in lines)
    asked = counted + sum(any(entry["cluster"] == cluster for entry in line["failed"]) for line in lines)
    # The round under way when the run ended has no line.
    asked += max(file.round - len(evidence.lines), 0)
    for steps in sorted(set(file.steps)):
        if not counted * evidence.local_steps <= steps <= asked * evidence.local_steps:
            expected = _between(counted * evidence.local_steps, asked * evidence.local_steps)
            yield f"{where}: an optimizer has taken {steps} steps up to round {file.round}, expected {expected}"
    batches, rest = divmod(file.drawn, evidence.batch_size)
    if rest or not counted * evidence.local_steps <= batches <= asked * evidence.local_steps:
        yield f"{where}: it has drawn {file.drawn} examples up to round {file.round} in {asked} rounds"


def _between(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def read(run_dir: Path, cluster_folders: Mapping[int, Path], config: Mapping[str, Any]) -> Evidence:
    """Read what a run left behind.

    Parameters
    ----------
    run_dir : the server's
    cluster_folders : of each control unit's checkpoints of this run
    config : ``clusters``, ``local-steps`` and ``batch-size``
    """
    newest = max(run_dir.glob("checkpoint/round-*"), default=None)
    summary = run_dir / "summary.json"
    lines = run_dir / "rounds.jsonl"
    return Evidence(
        run=run_dir.name,
        num_clusters=int(config["clusters"]),
        local_steps=int(config["local-steps"]),
        batch_size=int(config["batch-size"]),
        lines=[json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [],
        committed=int(newest.name.removeprefix("round-")) if newest else 0,
        decoder_steps=_steps(newest / "decoder.safetensors") if newest else (),
        clusters={n: file for n, folder in cluster_folders.items() if (file := _cluster_file(folder)) is not None},
        status=str(json.loads(summary.read_text())["status"]) if summary.exists() else "",
    )


def _cluster_file(folder: Path) -> ClusterFile | None:
    newest = max(folder.glob("round-*.safetensors"), default=None)
    if newest is None:
        return None
    with safe_open(newest, framework="pt") as file:
        told = json.loads(file.metadata()["collapipe"])
    return ClusterFile(run=folder.parent.name, round=int(told["round"]), drawn=int(told["drawn"]), steps=_steps(newest))


def _steps(path: Path) -> tuple[int, ...]:
    """Step counts of all optimizer states in a file."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.endswith("/step")]
        return tuple(sorted({int(file.get_tensor(name)) for name in names}))
