"""``collapipe verify``: the split model against the whole one, for any supported model and any cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from client_pipeline.families import transformer
from client_pipeline.families.families import (
    build_over,
    build_parts,
    dropouts,
    head_of,
    max_length,
    read_library_config,
    without_dropout,
)
from client_pipeline.families.fresh_base import FreshBase
from client_pipeline.families.hugging_face import SERVER_LAYERS, spec_from_config
from client_pipeline.families.pretrained import load_pretrained, load_pretrained_weights, with_tail
from client_pipeline.families.proof import check_cut, parts_difference
from client_pipeline.families.registry import check_base_dtype, family_named, is_decoder_only, library_family
from client_pipeline.families.sliceable import check_token_slices
from client_pipeline.partition.parts import Batch, ModelParts, part_weights
from client_pipeline.partition.plan import ClusterPlan, read_plans, uniform_plan
from client_pipeline.partition.spec import CAUSAL_LM, LoraConfig, ModelSpec
from client_pipeline.runtime.control_unit.verification import Verification, random_batch, verify_split
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.weight_files import weight_folder
from flower_app.config.run_config import RunConfig
from flower_app.config.split_config import CLUSTER, SERVER, SplitConfig
from flower_app.training.network import MOST_EXAMPLES


def verify(
    *,
    model: str = "",
    plan_file: Path | None = None,
    segments: Sequence[int] = (),
    micro_batches: int = 8,
    schedule: str = "gpipe",
    token_slices: int = 1,
    batch_size: int = 32,
    length: int = 32,
    seed: int = 0,
    base_dtype: str = "",
    server_layers: int = 0,
    labels: str = SERVER,
) -> Verification:
    """Compare one training step of the split and of the whole model on a random batch, on a Ray of its own.

    Parameters
    ----------
    model : folder or hub id of a Hugging Face model, or empty for the default run's Transformer. A folder with
        a ``config.json`` and no weights gives random weights.
    plan_file : ``collapipe-plan/1``; the first cluster's plan counts
    segments : TEBs of each segment, where there is no plan file; empty: the uniform plan
    micro_batches, schedule, token_slices : of the plan, where there is no plan file. Token slices have no dropout:
        both models drop nothing where there is more than one
    batch_size : b
    length : T
    seed : of weights, batch and dropout
    base_dtype : with adapters over the folder's files, whose matrices in the TEBs are held in this type; empty: without
    server_layers : last layers of a decoder-only model that are the server's
    labels : ``split.labels``: with ``cluster`` closing norm, output layer and loss are the control unit's

    Raises
    ------
    ValueError, FileNotFoundError
        For a model that cannot be split or a plan that does not fit.
    """
    for name, value in (("length", length), ("batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"--{name}: expected at least 1, found {value}")
    if batch_size > MOST_EXAMPLES:
        raise ValueError(f"--batch-size: expected at most {MOST_EXAMPLES:,}, found {batch_size}; lower it")
    build = adapted_builder(model, seed, base_dtype) if base_dtype else model_builder(model, seed)
    if server_layers or SplitConfig(labels=labels).labels == CLUSTER:
        build = _cut_elsewhere(build, server_layers, labels == CLUSTER, base_dtype)
    spec = build().spec
    longest = max_length(spec) or length
    if length > longest:
        raise ValueError(f"--length: expected at most the model's {longest} positions, found {length}")
    num_blocks = family_named(spec.family).num_blocks(spec)
    plan = _plan(plan_file, segments, micro_batches, schedule, num_blocks, batch_size, token_slices)
    plan.check(num_blocks=num_blocks, batch_size=batch_size, location=str(plan_file or "plan"))
    if plan.token_slices > 1:
        check_token_slices(without_dropout(spec), f"--token-slices {plan.token_slices}")
        if base_dtype:
            build = adapted_builder(model, seed, base_dtype, drops=False)
        else:
            build = _dropping_nothing(build)
    batch = random_batch(spec, batch_size, length, seed)
    _check_against_the_library(build, spec, batch)
    return verify_split(build, plan, batch, seed=seed)


def _check_against_the_library(build: Callable[[], ModelParts], spec: ModelSpec, batch: Batch) -> None:
    """Compare a decoder-only model's parts, in one process, with the library's whole model: small, and as it is.

    Over a base in few bits there is no whole model of the library's; then the small one alone is compared.

    Raises
    ------
    ValueError
        With what differs.
    """
    check_cut(spec)
    if not is_decoder_only(spec.family):
        return
    parts = (_dropping_nothing(build) if dropouts(spec) else build)()
    if parts.reference is not None and (difference := parts_difference(parts, batch)):
        raise ValueError(f"--model: model type {spec.family!r} cannot be split: {difference}")


def model_builder(model: str, seed: int) -> Callable[[], ModelParts]:
    """Return what builds the model with equal weights each time.

    Raises
    ------
    ValueError
        If the model cannot be split; the message lists the supported families.
    """
    if not model:
        config = RunConfig().model
        spec = transformer.spec(
            vocab_size=1000,
            width=config.width,
            num_heads=config.num_heads,
            feed_forward=config.feed_forward,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            dropout=0.1,
        )
        return lambda: build_parts(spec, seed)
    try:
        model_config = read_library_config(model)
        head = head_of(model_config)
        if _has_no_weights(model):
            spec = spec_from_config(model_config, head)
            library_family(spec.family).library_config(spec)
            return lambda: build_parts(spec, seed)
        load_pretrained(model, head, seed=seed)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--model: {error}") from error
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    return lambda: load_pretrained(model, head, seed=seed)


def _cut_elsewhere(
    build: Callable[[], ModelParts], server_layers: int, of_cluster: bool, base_dtype: str
) -> Callable[[], ModelParts]:
    """Return what builds the same decoder-only model with other layers on the server, and its tail there or here."""
    spec = build().spec
    if not is_decoder_only(spec.family) or spec.head != CAUSAL_LM or base_dtype:
        raise ValueError(
            "--server-layers and --labels cluster: expected a decoder-only language model without --base-dtype, found "
            f"{spec.family!r} with the head {spec.head}; leave them out"
        )
    plain = replace(spec, config=spec.config | {SERVER_LAYERS: server_layers})
    spec = with_tail(plain, {}, of_cluster)[0]
    return lambda: library_family(spec.family).split(build().reference, spec)


def _dropping_nothing(build: Callable[[], ModelParts]) -> Callable[[], ModelParts]:
    """Return what builds the same model without dropout."""

    def build_plain() -> ModelParts:
        parts = build()
        plain = build_parts(without_dropout(parts.spec), seed=0)
        plain.load(parts.weights())
        return plain

    return build_plain


def adapted_builder(model: str, seed: int, base_dtype: str, drops: bool = True) -> Callable[[], ModelParts]:
    """Return what builds a pretrained model with adapters that are no longer zero, over its files.

    Raises
    ------
    ValueError
        If it cannot be split, its files do not hold embedding and TEBs as they are used, or the type is unknown.
    """
    check_base_dtype(base_dtype, "lora", model, "")
    try:
        spec, base, head = _base_and_head(model, seed)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--model: {error}") from error
    if base is None:
        raise ValueError(
            f"--base-dtype: {model} has embedding or TEBs that are converted or computed, and not as they are used in "
            "its safetensors files; verify it without --base-dtype"
        )
    adapted = replace(spec if drops else without_dropout(spec), lora=LoraConfig(), base_dtype=base_dtype)

    def build() -> ModelParts:
        parts = build_over(adapted, base, head, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in parts.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.02, generator=generator)
        return parts

    return build


def _base_and_head(model: str, seed: int) -> tuple[ModelSpec, FrozenBase | None, Mapping[str, Tensor]]:
    """Return spec, frozen base and head: from the model's files, or drawn where a folder has a config alone."""
    config = read_library_config(model)
    head = head_of(config)
    if _has_no_weights(model) and is_decoder_only(config.model_type):
        spec = spec_from_config(config, head)
        drawn = FreshBase(spec, seed)
        return spec, drawn, drawn.part("head.")
    spec, weights = load_pretrained_weights(model, head, seed=seed)
    return spec, weights.base, part_weights(weights, "head")


def _has_no_weights(model: str) -> bool:
    # Weights in another form are refused where the configuration is read.
    return Path(model).is_dir() and weight_folder(model) is None


def _plan(
    plan_file: Path | None,
    segments: Sequence[int],
    m: int,
    schedule: str,
    num_blocks: int,
    batch_size: int,
    token_slices: int,
) -> ClusterPlan:
    if plan_file is not None:
        if segments:
            raise ValueError("--plan and --segments: give one of them; a plan file brings its own segments")
        return read_plans(plan_file)[0]
    if segments:
        order = tuple(range(len(segments)))
        return ClusterPlan(delta=tuple(segments), order=order, m=m, schedule=schedule, token_slices=token_slices)
    even = uniform_plan(
        speed=[1.0] * 3, memory=[1.0] * 3, block_memory=1.0 / num_blocks, num_blocks=num_blocks, batch_size=batch_size
    )
    return replace(even, m=min(m, batch_size), schedule=schedule, token_slices=token_slices)
