"""The README.md of an exported folder: use, base model, data, training and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline.families.hugging_face import AUTO_MODELS
from client_pipeline.partition.spec import CAUSAL_LM, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION, ModelSpec
from client_pipeline.weights.weight_files import model_file
from flower_app.config.run_config import RunConfig

CARD = "README.md"
_PIPELINES = {
    CAUSAL_LM: "text-generation",
    MASKED_LM: "fill-mask",
    SEQ2SEQ: "translation",
    SEQUENCE_CLASSIFICATION: "text-classification",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """All that a card says."""

    name: str
    """The run's directory; and the cluster, where the model is that one's own."""
    config: RunConfig
    spec: ModelSpec
    base_model: str
    """Folder or hub id of the model that the run began with; empty: none."""
    base_files: Sequence[tuple[str, str]]
    """Name and SHA-256 of its weights; empty: not known."""
    rounding: str
    """Sentence about the rounded base; empty: it is as its files have it."""
    summary: Mapping[str, Any]
    """The run's ``summary.json``; empty: it has not finished."""
    is_adapter: bool


def is_on_this_machine(source: str) -> bool:
    """Return whether a model or data set is a folder here, also one that is gone, and no hub id."""
    return bool(source) and (Path(source).is_absolute() or Path(source).exists())


def _public_name(source: str) -> str:
    # A folder's place is its owner's own business.
    return Path(source).name if is_on_this_machine(source) else source


def base_licence(base_model: str) -> str:
    """Return the licence that a model's own card names; empty: it is not known here."""
    from huggingface_hub import ModelCard

    file = model_file(base_model, CARD) if base_model else None
    if file is None:
        return ""
    try:
        data = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except (OSError, ValueError):
        return ""
    licence = getattr(data, "license_name", None) or getattr(data, "license", None)
    return licence if isinstance(licence, str) else ""


def model_card(facts: CardFacts) -> str:
    """Write the card."""
    from huggingface_hub import ModelCardData

    licence = base_licence(facts.base_model)
    header = ModelCardData(
        base_model=None if is_on_this_machine(facts.base_model) else facts.base_model or None,
        license=licence or None,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag=_PIPELINES.get(facts.spec.head),
        tags=["collapipe", *(["lora"] if facts.is_adapter else [])],
    ).to_yaml()
    sections = [
        f"---\n{header}\n---",
        f"# {facts.name}",
        "Trained by CollaPipe: the Transformer was cut into segments over clusters of devices.",
        "## Use",
        f"```python\n{_use(facts)}\n```",
        "## Base model",
        _base(facts, licence),
        "## Training",
        _table(_training(facts)),
        "## Scores",
        _scores(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _use(facts: CardFacts) -> str:
    loader = AUTO_MODELS[facts.spec.head]
    if not facts.is_adapter:
        return (
            f"from transformers import AutoTokenizer, {loader}\n\n"
            f'model = {loader}.from_pretrained("FOLDER")\ntokenizer = AutoTokenizer.from_pretrained("FOLDER")'
        )
    # A new head has the run's classes, which the base model's configuration does not know.
    labels = ', config=AutoConfig.from_pretrained("FOLDER")' if "num_labels" in facts.spec.config else ""
    return (
        f"import torch\nfrom peft import PeftModel\nfrom transformers import "
        f"{'AutoConfig, ' if labels else ''}AutoTokenizer, {loader}\n\n"
        f"base = {loader}.from_pretrained({_public_name(facts.base_model)!r}, dtype=torch.float32{labels})\n"
        'model = PeftModel.from_pretrained(base, "FOLDER")\ntokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    )


def _base(facts: CardFacts, licence: str) -> str:
    earlier_run = facts.config.model.from_
    start = f"Training began with the run {Path(earlier_run).name}." if earlier_run else ""
    if not facts.base_model:
        return f"None is known here. {start}" if start else "None: training began with random weights."
    note = start or facts.rounding
    lines = [f"`{_public_name(facts.base_model)}`, of type `{facts.spec.family}`. {note}".rstrip()]
    if licence:
        lines.append(f"Its licence: {licence}.")
    else:
        lines.append("Its licence is not known here: its card names none. Look it up before you pass this model on.")
    if facts.base_files:
        lines.append(_table([("file", "SHA-256"), *facts.base_files]))
    return "\n\n".join(lines)


def _training(facts: CardFacts) -> list[tuple[str, str]]:
    config, data, lora = facts.config, facts.config.data, facts.spec.lora
    rows = [("setting", "value"), ("task", config.task.name), ("data", _data(facts))]
    rows.append(("rounds", str(facts.summary.get("rounds", f"not finished, of {config.num_rounds}"))))
    if (scored := facts.summary.get("scored_round")) is not None:
        rows.append(("round of this model", str(scored)))
    rows += [
        ("strategy", config.strategy),
        ("clusters", str(config.num_clusters or f"as in the scenario {Path(config.scenario).name}")),
        ("optimizer steps a round", str(config.local_steps)),
        ("examples a step and cluster", str(config.batch_size * config.gradient_accumulation)),
        ("longest sequence [tokens]", str(data.max_length)),
        ("optimizer", f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}"),
    ]
    if lora is not None:
        head = "adapters in its blocks" if lora.freezes_head else "trained whole"
        rows.append(("adapters", f"r = {lora.rank}, alpha = {lora.alpha:g}, in {lora.targets or 'query and value'}"))
        rows += [("server's part", head), ("frozen matrices", facts.spec.base_dtype)]
    else:
        rows.append(("trained", "all weights"))
    return rows


def _data(facts: CardFacts) -> str:
    data = facts.config.data
    if data.source == "hub":
        return f"{_public_name(data.hub_id)}, split {data.train_split}"
    if data.source == "files":
        return ", ".join(Path(name).name for name in (data.train_source, data.train_target) if name)
    return f"{data.num_examples} generated examples"


def _scores(facts: CardFacts) -> str:
    metrics = facts.summary.get("metrics") or {}
    if not metrics:
        return "None: the run has not finished."
    values = [(name, f"{value:.6g}") for name, value in metrics.items() if isinstance(value, int | float)]
    # Where each cluster has a model of its own.
    means = "" if facts.config.traits.averages else ", means over the clusters' models"
    return f"On the run's test set, before the export{means}:\n\n" + _table([("metric", "value"), *values])


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Write rows of Markdown; the first is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])
