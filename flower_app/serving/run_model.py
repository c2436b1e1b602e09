"""A run's model behind the door: in this process, or on devices of this machine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from client_pipeline.families.families import max_length
from client_pipeline.families.merged_weights import MergedWeights
from client_pipeline.families.registry import is_decoder_only, library_family
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, ModelSpec
from client_pipeline.serving.encoding import encoder_engine
from client_pipeline.serving.engine import Engine, Stages
from client_pipeline.serving.proof import check_answers
from client_pipeline.serving.saved_parts import AnsweringParts, answering_parts
from client_pipeline.serving.stages import LocalStages
from flower_app.saved_model import StoredModel
from flower_app.serving.served_model import Bounds, ServedModel
from flower_app.serving.translator import Translator
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.chat_template import ChatTemplate, own_template
from flower_app.tasks.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from client_pipeline.runtime.devices.answering_devices import DeviceStages

_MOST_TOKENS = 16384
"""Tokens whose keys and values are kept, where nothing else is asked for."""
_LONGEST_SOURCE = 1024
"""Tokens of a source text, where the model takes any number."""


@contextmanager
def served_run(
    run_dir: Path,
    stored: StoredModel,
    num_devices: int,
    threads: int,
    say: Callable[[str], None],
    most_tokens: int = 0,
    task: TaskConfig | None = None,
) -> Iterator[ServedModel]:
    """Bring a run's model up, with its adapters merged unless its layers are in few bits on devices.

    Parameters
    ----------
    run_dir : of the run; its name is the model's
    stored : what it has saved
    num_devices : devices of this machine, each a process; 0: all TEBs in this process
    threads : of each device
    say : gets a line for what fails and goes on
    most_tokens : tokens whose keys and values are kept; 0: :data:`_MOST_TOKENS`
    task : table ``[task]`` of the run, for the search of translations; None: its defaults

    Raises
    ------
    ValueError
        If the model writes no texts token by token, or would write others than the library's.
    """
    translates = stored.spec.head == SEQ2SEQ
    if not translates:
        check_served(stored.spec, run_dir)
    with _stages(stored, num_devices, threads) as (parts, stages):
        name = run_dir.name
        served: ServedModel
        if translates:
            bounds = Bounds(most_tokens=most_tokens or _MOST_TOKENS, longest=max_length(stored.spec) or _LONGEST_SOURCE)
            tokenizer = TextTokenizer.from_json(stored.tokenizer_json)
            engine = encoder_engine(parts, stages, say)
            served = Translator(name, engine, parts, tokenizer, bounds, task or TaskConfig())
        else:
            engine = Engine(parts.embedding, parts.head, stages, say)
            served = served_model(name, engine, stored.spec, stored.tokenizer_json, most_tokens)
        try:
            yield served
        finally:
            served.close()


def check_served(spec: ModelSpec, run_dir: Path) -> None:
    """Refuse a model that writes no texts token by token, or would write others than the library's.

    Raises
    ------
    ValueError
        Naming the run, and what is served.
    """
    if not is_decoder_only(spec.family) or spec.head != CAUSAL_LM:
        raise ValueError(
            f"{run_dir}: a decoder-only language model of the transformers library is served, or on one machine one "
            f"that translates, found {spec.family!r} with the head {spec.head}; use collapipe predict"
        )
    check_answers(spec)


def served_model(name: str, engine: Engine, spec: ModelSpec, tokenizer_json: str, most_tokens: int = 0) -> ServedModel:
    """Put a model that an engine runs behind the bounds of a door.

    Parameters
    ----------
    name : that clients ask for
    engine : runs its steps; the served model closes it
    spec : of the model
    tokenizer_json : text of its tokenizer
    most_tokens : tokens whose keys and values are kept; 0: :data:`_MOST_TOKENS`
    """
    tokenizer = TextTokenizer.from_json(tokenizer_json)
    bounds = Bounds(most_tokens=most_tokens or _MOST_TOKENS, longest=max_length(spec) or _MOST_TOKENS)
    chat = ChatTemplate.of(tokenizer) if own_template(tokenizer) else None
    return ServedModel(name, engine, library_family(spec.family).library_config(spec), tokenizer, chat, bounds)


@contextmanager
def _stages(stored: StoredModel, num_devices: int, threads: int) -> Iterator[tuple[ModelParts, Stages]]:
    """Bring up embedding and head, and the TEBs elsewhere."""
    if not num_devices:
        base = None if stored.base is None else stored.base.check()
        parts = MergedWeights(stored.spec, stored.weights, base).build()
        local = LocalStages(parts)
        try:
            yield parts, local
        finally:
            local.close()
        return
    from client_pipeline.runtime.ray.private_ray import private_ray

    model = answering_parts(stored.spec, stored.weights, stored.base)
    with private_ray(num_cpus=num_devices):
        stages = _on_devices(model, num_devices, threads)
        try:
            yield model.parts, stages
        finally:
            stages.close()


def _on_devices(model: AnsweringParts, num_devices: int, threads: int) -> DeviceStages:
    from client_pipeline.runtime.config import RuntimeConfig
    from client_pipeline.runtime.devices.answering_devices import DeviceStages
    from client_pipeline.runtime.devices.pipeline import Pipeline
    from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
    from client_pipeline.timetable.replanning import answering_plans, equal_devices

    num_blocks = len(model.parts.blocks)
    pipeline = Pipeline(
        name=f"collapipe/serve-{secrets.token_hex(4)}",
        spec=model.spec,
        optimizer=OptimizerConfig(name="sgd"),
        runtime=RuntimeConfig(threads=threads),
        frozen=model.frozen,
    )
    plan_for = answering_plans(equal_devices(num_devices, num_blocks), num_devices, num_blocks)
    return DeviceStages(pipeline, plan_for, num_devices, model.weights)
