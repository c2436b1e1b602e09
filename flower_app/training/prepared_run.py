"""A run before any node is asked: configuration, task, model, network and plan, checked and complete."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client_pipeline.families.families import dropouts
from client_pipeline.families.hugging_face import CLUSTER_TAIL
from client_pipeline.families.proof import check_cut, check_packing
from client_pipeline.partition.parts import ModelParts
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.stage.memory import give_freed_memory_back, return_freed_memory
from client_pipeline.system.scenario import Scenario
from client_pipeline.weights.base_weights import BaseWeights, FrozenBase
from flower_app.config.privacy_checks import check_shared_matrices
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_first_round, check_slices, make_planner
from flower_app.runs import run_checkpoints
from flower_app.runs.run_inputs import input_digests
from flower_app.tasks.base import Prepared, Task, task
from flower_app.tasks.data.data_split import weighted_split
from flower_app.training.global_models import LARGE_BYTES
from flower_app.training.memory_limit import check_memory_limit
from flower_app.training.network import training_scenario
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.checkpoint import Checkpoint
from strategies.planning.planner import RoundPlanner


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Inputs of a training; :func:`prepare` makes them."""

    config: RunConfig
    run_dir: Path
    started: float
    """Start of this process's part of the run, on the clock of ``time.perf_counter`` [s]."""
    resumed: Checkpoint | None
    """Checkpoint that the run goes on from; None: it begins."""
    identity: RunIdentity
    inputs: dict[str, str]
    """SHA-256 of the files that it reads, by configuration key."""
    task: Task
    prepared_task: Prepared
    """Tokenizer, specification and evaluation; the specification has the run's adapters."""
    parts: ModelParts
    """The run's model with its first weights; the decoder's service trains its head."""
    scenario: Scenario
    """The network, of the run's clusters alone."""
    planner: RoundPlanner | None
    """Planner of the rounds; None for a strategy that plans nothing."""
    frozen: Mapping[str, Tensor]
    """Weights that are never trained, by global name: in memory, or a
    :class:`~client_pipeline.weights.base_weights.FrozenBase`."""
    frozen_digest: str
    """Their SHA-256 in hexadecimal; empty if there are none."""

    @property
    def num_clusters(self) -> int:
        """Number of clusters, N."""
        return self.scenario.num_clusters

    @property
    def completed(self) -> int:
        """Rounds that were done before this process began."""
        return self.resumed.round if self.resumed else 0

    @property
    def wall_before_s(self) -> float:
        """Duration of the run before this process began [s]."""
        return float(self.resumed.state["wall-s"]) if self.resumed else 0.0


def prepare(config: RunConfig, run_dir: Path) -> PreparedRun:
    """Load what a run needs, and check what can be checked without its nodes.

    Parameters
    ----------
    config : the run's; with ``resume`` its directory is put back to its newest checkpoint
    run_dir : its directory

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the key or file at fault; or what keeps the run from going on.
    InfeasibleRound
        If no cluster has a plan.
    """
    torch.set_num_threads(config.runtime.server_threads)
    # A TEB that is drawn for an evaluation would stay in the heap, and the next one beside it.
    return_freed_memory(LARGE_BYTES)
    started = time.perf_counter()
    resumed = run_checkpoints.reopened(run_dir, config) if config.resume else None
    identity = resumed.identity if resumed else run_checkpoints.new_identity(run_dir, config)
    inputs = input_digests(config)
    run_task, prepared_task, num_clusters = prepare_task(config)
    check_cut(prepared_task.spec)
    if config.data.packing:
        check_packing(prepared_task.spec)
    # The masks of dropout are drawn for each micro-batch.
    cached, fused = config.compression.cache_gb, config.runtime.fused_micro_batches
    for key, value, plain in (("runtime.fused-micro-batches", fused, 1), ("compression.cache-gb", cached, 0)):
        if value > plain and (rates := dropouts(prepared_task.spec)):
            rate_texts = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
            raise ValueError(
                f"{key} = {value:g}: expected a model without dropout, found {rate_texts}; set {key} to {plain}, or "
                "dropout to 0"
            )
    parts = prepared_task.build(config.seed)
    scenario = training_scenario(config, prepared_task.spec).first(num_clusters)
    check_shared_matrices(
        config.privacy,
        traits=config.traits,
        local_steps=config.local_steps,
        family=config.model.family,
        # What the control unit has of the head is sent to nobody between the steps.
        shared=() if config.returns_states else parts.tied.values(),
    )
    PrivacyAccountant(config.privacy, {})  # says at once if there is no library to account with
    planner = make_planner(config, scenario)
    check_memory_limit(config.runtime.memory_limit, config.costs, scenario, config.planner.schedule)
    if planner is not None:
        plans = check_first_round(planner).plans
        check_slices(config, prepared_task.spec, plans)
    frozen = parts.frozen_weights() if parts.base is None else parts.base
    source = config.model.pretrained or config.model.from_
    # The planner's libraries and the digests, too, leave memory behind that the head and its scores would stand beside.
    give_freed_memory_back()
    return PreparedRun(
        config=config,
        run_dir=run_dir,
        started=started,
        resumed=resumed,
        identity=identity,
        inputs=inputs,
        task=run_task,
        prepared_task=prepared_task,
        parts=parts,
        scenario=scenario,
        planner=planner,
        frozen=frozen,
        frozen_digest=frozen_digest(frozen, resumed.state if resumed else None, source),
    )


def prepare_task(config: RunConfig) -> tuple[Task, Prepared, int]:
    """Return a run's task, what it has prepared (its specification with the run's adapters), and the clusters' number.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the key or file at fault.
    """
    network = training_scenario(config)
    num_clusters = config.num_clusters or network.num_clusters
    run_task = task(config.task)
    config.selection.check_metric(run_task.scores)
    data = weighted_split(config.data, network.first(num_clusters).data_shares)
    prepared = run_task.prepare(data, config.model, config.seed, num_clusters)
    # A tokenizer that was trained here leaves 150 MB behind.
    give_freed_memory_back()
    if config.returns_states or prepared.spec.config.get(CLUSTER_TAIL):
        prepared = prepared.with_tail(config.returns_states)
    return run_task, replace(prepared, spec=config.adapted(prepared.spec)), num_clusters


def frozen_digest(frozen: Mapping[str, Tensor], resumed: Mapping[str, Any] | None, source: str) -> str:
    """Return the SHA-256 of a run's frozen weights in hexadecimal; empty if there are none.

    Adapters belong to the very weights that they were trained on.

    Parameters
    ----------
    frozen : by name
    resumed : a checkpoint's state, of which ``frozen`` is what this function gave when the run began; None: it begins
    source : where the weights come from, for the message

    Raises
    ------
    ValueError
        If the run began with other weights.
    """
    if not frozen:
        digest = ""
    elif isinstance(frozen, BaseWeights):
        # Of their files' digests: nobody reads a whole model for it.
        digest = hashlib.sha256(json.dumps([frozen.files, dict(frozen.places)]).encode()).hexdigest()
    elif isinstance(frozen, FrozenBase):
        digest = hashlib.sha256(frozen.to_json().encode()).hexdigest()
    else:
        hashed = hashlib.sha256()
        for name, value in sorted(frozen.items()):
            hashed.update(name.encode())
            hashed.update(value.contiguous().numpy().tobytes())
        digest = hashed.hexdigest()
    expected = digest if resumed is None else resumed.get("frozen", "")
    if expected != digest:
        raise ValueError(
            f"resume: the frozen weights are not those that the run began with (SHA-256 {digest[:12]}, expected "
            f"{expected[:12]}): {source or 'the model'} has changed; put it back, or start the run anew"
        )
    return digest
