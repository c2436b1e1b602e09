"""``collapipe leakage``: how much of the text of a run can be read from its activations, and what noise does to that.

The attacker is the server: it knows the model, and is sent activations. Its own text is the validation set, what it
reads is the test set: sentences of the same kind as the clusters', that neither model nor attack were trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from client_pipeline.counted import counted
from client_pipeline.families.hugging_face import CLUSTER_TAIL
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.privacy import NoiseSource, private_activations, private_gradient
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.parts import Batch, ModelParts
from flower_app.config.run_config import RunConfig
from flower_app.leakage import inversion
from flower_app.leakage.inversion import Tokens
from flower_app.leakage.labels import label_rows, read_labels
from flower_app.leakage.membership import EXAMPLES, tell_members
from flower_app.leakage.updates import first_examples, read_update
from flower_app.runs.run_directory import find_run
from flower_app.saved_model import SavedModel, load_model
from flower_app.tasks.base import Evaluator, task
from flower_app.tasks.data.data_split import weighted_split
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.training.network import training_scenario

Say = Callable[[str], None]
_MOST_LABELS = 512
"""Labels that are attacked: each takes some backward passes through the output layer."""


@dataclass(frozen=True, kw_only=True)
class LeakageRequest:
    """Request of a leakage measurement."""

    noise: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    """Noise multipliers, as ``privacy.activation-noise``; the run's own is measured too."""
    clip: float = 0.0
    """Clip as ``privacy.activation-clip``; 0: the run's own, or the norm that half of the tokens stay under."""
    most_tokens: int = 20_000
    """Tokens that are looked at, of auxiliary text and of victims each."""
    seed: int = 0
    cut_only: bool = False
    """Attack behind the last TEB alone, where the server does; else after each."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not self.noise or not all(math.isfinite(z) and z >= 0 for z in self.noise):
            raise ValueError(f"--noise: expected multipliers of at least 0, found {self.noise}")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"--clip: expected a number of at least 0, found {self.clip}")
        if self.most_tokens < 1:
            raise ValueError(f"--tokens: expected at least 1, found {self.most_tokens}")


class _Enough(Exception):  # noqa: N818
    """Ends an evaluation early: enough tokens have been seen."""


@dataclass(frozen=True)
class ObservedParts(ModelParts):
    """Model whose activations are observed, or changed on their way to the head."""

    look: Callable[[Batch, list[Tensor]], None] = lambda batch, depths: None
    """Gets each batch, and the activations after 0, 1, ... L TEBs."""
    change: Callable[[Tensor, Tensor], Tensor] = lambda hidden, mask: hidden
    """Makes what the server gets of the activations at the cut and the mask."""
    cut: int = -1
    """TEBs before the cut; -1: all."""

    def encode(self, batch: Batch) -> Tensor:
        """Encode like the model; keep the batch and what was sent."""
        x_BTD = self.embedding(batch)
        mask, depths = self.mask_form(batch["attention_mask"], x_BTD.dtype), [x_BTD]
        cut = len(self.blocks) if self.cut < 0 else self.cut
        for number, block in enumerate(self.blocks):
            if number == cut:
                x_BTD = self.change(x_BTD, batch["attention_mask"])
            x_BTD = block(x_BTD, mask)
            depths.append(x_BTD)
        self.look(batch, depths)
        return self.change(x_BTD, batch["attention_mask"]) if cut == len(self.blocks) else x_BTD

    def encode_each(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Encode one batch after the other, so that the observer can stop at any of them."""
        return [self.encode(batch) for batch in batches]

    @classmethod
    def of(cls, parts: ModelParts, **more: Any) -> ObservedParts:
        """Observe a model."""
        return cls(**vars(parts), **more)


@dataclass
class Observation:
    """Activations of a split by depth, of tokens that are no mere marks of beginning and end."""

    marks: frozenset[int]
    most: int
    parts: ModelParts | None = None
    """Model whose labels stay in the clusters: what the server is sent of them is kept, too."""
    ends_only: bool = False
    """Keep activations before the first TEB and after the last alone."""
    depths: list[list[Tensor]] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    label_rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    """First batches, for the attack on membership."""

    def look(self, batch: Batch, depths: list[Tensor]) -> None:
        """Note a batch, with its activations after 0, 1, ... TEBs; raises when there are enough."""
        if sum(len(kept["input_ids"]) for kept in self.batches) < EXAMPLES:
            self.batches.append({key: value[:EXAMPLES] for key, value in batch.items()})
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        token_mask = mask & ~torch.isin(ids, torch.tensor(sorted(self.marks), dtype=ids.dtype))
        places = torch.arange(ids.shape[1]).expand_as(ids)
        self.ids.append(ids[token_mask])
        self.places.append(places[token_mask])
        self.lengths.append(mask.sum(dim=1))
        self.depths = self.depths or [[] for _ in depths]
        for number, (seen, hidden) in enumerate(zip(self.depths, depths, strict=True)):
            if not self.ends_only or number in (0, len(depths) - 1):
                seen.append(hidden[token_mask].float())
        if self.parts is not None and sum(len(rows[0]) for rows in self.label_rows) < _MOST_LABELS:
            self.label_rows.append(label_rows(self.parts, batch, depths[-1]))
        if sum(map(len, self.ids)) >= self.most:
            raise _Enough

    def tokens(self, depth: int) -> Tokens:
        """Return what was seen after so many TEBs."""
        parts = (torch.cat(pieces)[: self.most] for pieces in (self.depths[depth], self.ids, self.places))
        return Tokens(*parts)

    def halves(self) -> tuple[Observation, Observation]:
        """Split the tokens in two, the text of one before that of the other."""
        num_tokens = len(self.tokens(0))
        for pieces in (*self.depths, self.ids, self.places):
            # In one piece: the halves are views of it.
            pieces[:] = [torch.cat(pieces)]
        first, second = (Observation(self.marks, num_tokens) for _ in range(2))
        for half, part in ((first, slice(None, num_tokens // 2)), (second, slice(num_tokens // 2, num_tokens))):
            half.depths = [[whole[part]] for (whole,) in self.depths]
            half.ids, half.places = [self.ids[0][part]], [self.places[0][part]]
        return first, second


def measure_leakage(
    run: str | Path, request: LeakageRequest, say: Say = lambda text: None, allowed: Sequence[str] = ()
) -> dict[str, Any]:
    """Attack the activations of a run's model, and score the model under each noise.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such run, it has no model, or its data are not there any more.
    """
    from flower_app.config.sources import load_stored_config
    from flower_app.runs.run_directory import CONFIG

    run_dir = find_run(str(run))
    config = load_stored_config(run_dir / CONFIG, (), allowed)
    model = load_model(run_dir, config.model.family)
    evaluator = task(config.task).evaluator(config.data, model.tokenizer_json)
    stay = bool(model.spec.config.get(CLUSTER_TAIL))
    most, ends_only = request.most_tokens, request.cut_only
    auxiliary = observe(model, evaluator, "validation", most, ends_only=ends_only)
    victims = observe(model, evaluator, "test", most, with_labels=stay, ends_only=ends_only)
    num_depths = len(auxiliary.depths)
    report: dict[str, Any] = {
        "run_dir": str(run_dir),
        "auxiliary": {"split": "validation", "tokens": len(auxiliary.tokens(0))},
        "victims": {"split": "test", "tokens": len(victims.tokens(0))},
        "longest": int(torch.cat(victims.lengths).max()),
        "depth_of_the_cut": num_depths - 1,
        "without_looking": asdict(inversion.blind(auxiliary.tokens(0), victims.tokens(0))),
        "membership": _membership(model, config, victims.batches, request.seed),
        "updates": update_attacks(model, config, victims),
        "levels": [],
    }
    run_noise = [config.privacy.activation_noise] if config.privacy.on_activations else []
    for noise in sorted({*request.noise, *run_noise}):
        attacked = range(num_depths)[-1:] if request.cut_only else range(num_depths)
        say(f"noise {noise:g}: {counted(len(attacked), 'depth')}")
        depths = [attack(model, auxiliary, victims, depth, noise, config, request) for depth in attacked]
        metrics = scored(model, evaluator, noise, depths[-1]["clip"], request.seed)
        is_the_runs = config.privacy.on_activations and noise == config.privacy.activation_noise
        report["levels"].append({"noise": noise, "trained_with": is_the_runs, "metrics": metrics, "depths": depths})
    if stay:
        run_noise = [config.privacy.gradient_noise] if config.privacy.on_gradients else []
        levels = sorted({*request.noise, *run_noise})
        report["labels"] = [label_attack(model, victims, noise, config, request.seed) for noise in levels]
    return report


def _membership(model: SavedModel, config: RunConfig, others: Sequence[Batch], seed: int) -> dict[str, Any]:
    """The attack on membership; why there is none, where the clusters' data are not on this machine."""
    try:
        network = training_scenario(config)
        num_clusters = config.num_clusters or network.num_clusters
        data = weighted_split(config.data, network.first(num_clusters).data_shares)
        load = partial(task(config.task).cluster_data, data, model.tokenizer_json)
        # Of separate models the first one is attacked.
        trained_on = range(num_clusters if config.traits.averages else 1)
        clusters = [load(cluster, num_clusters, config.seed) for cluster in trained_on]
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    return asdict(tell_members(model.parts, clusters, others, seed))


def update_attacks(model: SavedModel, config: RunConfig, victims: Observation) -> list[dict[str, Any]]:
    """The attack on the update of one step, of one example and of as many as the run's batches have."""
    if not config.traits.uploads:
        return []
    batch, privacy = victims.batches[0], config.privacy
    head = not config.traits.decoder_on_server
    vocabulary = TextTokenizer.from_json(model.tokenizer_json).vocab_size
    readings = []
    for number in sorted({1, min(config.batch_size, len(batch["input_ids"]))}):
        some = first_examples(batch, number, model.spec.head)
        read = read_update(model.parts, some, vocabulary, config.optimizer.lr, privacy, victims.marks, head)
        noise = privacy.update_noise if privacy.on_updates else 0.0
        readings.append(asdict(read) | {"read": read.read, "noise": noise})
    return readings


def label_attack(
    model: SavedModel, victims: Observation, noise: float, config: RunConfig, seed: int, clip: float = 0.0
) -> dict[str, Any]:
    """The attack on labels by the gradients of the server's states, with that noise on these.

    ``clip`` is as ``privacy.gradient-clip``; 0: the run's own, or the norm that half of the gradients stay under.
    """
    states, gradients, labels = (torch.cat(pieces)[:_MOST_LABELS] for pieces in zip(*victims.label_rows, strict=True))
    clip = clip or config.privacy.gradient_clip or float(gradients.norm(dim=1).median())
    is_clipped = noise > 0 or config.privacy.on_gradients
    if is_clipped:
        privacy = PrivacyConfig(gradient_clip=clip, gradient_noise=noise, seed=seed)
        mask = torch.ones(1, len(gradients), dtype=torch.bool)
        gradients = private_gradient(gradients[None], mask, privacy, NoiseSource(seed), "labels")[0]
    found = read_labels(cast(nn.Module, model.parts.embedding.tail), states, gradients, labels)
    frequent = labels.bincount().argsort(descending=True)[: inversion.TOP]
    guessed = inversion.Recovered.of(frequent.expand(len(labels), -1), labels)
    return {
        "noise": noise,
        "trained_with": config.privacy.on_gradients and noise == config.privacy.gradient_noise,
        "tokens": len(labels),
        "clip": clip if is_clipped else None,
        "without_looking": asdict(guessed),
        **asdict(found),
    }


def observe(
    model: SavedModel,
    evaluator: Evaluator,
    split: str,
    most: int,
    *,
    with_labels: bool = False,
    ends_only: bool = False,
) -> Observation:
    """Run a model over a split until enough tokens are seen; ``with_labels``: what is sent of labels that stay, too."""
    tokenizer = TextTokenizer.from_json(model.tokenizer_json)
    marks = frozenset({tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id})
    observation = Observation(marks, most, model.parts if with_labels else None, ends_only)
    try:
        evaluator.evaluate(ObservedParts.of(model.parts, look=observation.look), split)
    except _Enough:
        pass
    return observation


def attack(
    model: SavedModel,
    auxiliary: Observation,
    victims: Observation,
    depth: int,
    noise: float,
    config: RunConfig,
    request: LeakageRequest,
    codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
) -> dict[str, Any]:
    """Every attack on the activations after ``depth`` TEBs, as if the model were cut there, and sent by ``codec``."""
    auxiliary_tokens, victim_tokens = auxiliary.tokens(depth), victims.tokens(depth)
    clip = request.clip or config.privacy.activation_clip or float(auxiliary_tokens.hidden_ND.norm(dim=1).median())
    clipped = noise > 0 or request.clip > 0 or config.privacy.on_activations
    privacy = PrivacyConfig(activation_clip=clip, activation_noise=noise, seed=request.seed)
    source, draw_numbers = NoiseSource(request.seed), count()

    def sent(tokens: Tokens, owner: str) -> Tokens:
        rows = tokens.hidden_ND[None]
        if clipped:
            mask = torch.ones(rows.shape[:2], dtype=torch.bool)
            rows = private_activations(rows, mask, privacy, source, owner, depth, next(draw_numbers))
        return Tokens(codec.decode(codec.encode(rows))[0], tokens.ids_N, tokens.places_N)

    pad_id = model.spec.config.get("pad_token_id")

    def embed(ids: Tensor) -> Tensor:
        # Some models look for a text's end by its padding, which is no victim.
        ids = ids if pad_id is None else ids.masked_fill(ids == pad_id, 0 if pad_id else 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        return cast(Tensor, model.parts.embedding(batch)).float()

    vocabulary = TextTokenizer.from_json(model.tokenizer_json).vocab_size
    # In evaluation mode, without gradients: what is observed was.
    model.parts.embedding.eval()
    victims_sent, embedded = sent(victim_tokens, "victims"), auxiliary.tokens(0).hidden_ND
    with torch.no_grad():
        auxiliary_sent = sent(auxiliary_tokens, "auxiliary")
        by_attack: dict[str, inversion.Recovered] = {
            "nearest": inversion.nearest(embed, vocabulary, auxiliary_sent, embedded, victims_sent),
            "linear": inversion.linear(embed, vocabulary, auxiliary_sent, embedded, victims_sent),
        }
    by_attack["learned"] = inversion.learned(partial(sent, auxiliary_tokens, "auxiliary"), victims_sent, request.seed)
    return {"depth": depth, "clip": clip if clipped else None} | {k: asdict(v) for k, v in by_attack.items()}


def scored(
    model: SavedModel,
    evaluator: Evaluator,
    noise: float,
    clip: float | None,
    seed: int,
    *,
    cut: int = -1,
    codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
    split: str = "test",
) -> dict[str, float]:
    """Metrics where the server gets what it would be sent after ``cut`` TEBs (-1: all)."""
    privacy = PrivacyConfig(activation_clip=clip or 0.0, activation_noise=noise, seed=seed)
    source, drawn = NoiseSource(seed), count()

    def change(hidden: Tensor, mask: Tensor) -> Tensor:
        if clip is not None:
            hidden = private_activations(hidden, mask.bool(), privacy, source, "score", next(drawn))
        return codec.decode(codec.encode(hidden))

    return evaluator.evaluate(ObservedParts.of(model.parts, change=change, cut=cut), split).metrics


ATTACKS = ("nearest", "linear", "learned")


def leakage_table(report: dict[str, Any]) -> Table:
    """The findings for people: best attack by depth and noise, and what the noise costs."""
    names: Sequence[str] = list(report["levels"][0]["metrics"])
    title = f"Tokens of the {report['victims']['split']} set that are read from activations"
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in ("noise", *(f"{depth['depth']} TEBs" for depth in report["levels"][0]["depths"]), *names):
        table.add_column(column, justify="right")
    for level in report["levels"]:
        best = [max((d[a]["top1"], d[a]["top5"]) for a in ATTACKS) for d in level["depths"]]
        cells = [f"{100 * first:.0f} / {100 * five:.0f}%" for first, five in best]
        noise = f"{level['noise']:g}" + (" (the run's)" if level["trained_with"] else "")
        table.add_row(noise, *cells, *(f"{level['metrics'][name]:.4g}" for name in names))
    without = report["without_looking"]
    table.caption = (
        f"First guess / first five, by the best of three attacks; without looking {100 * without['top1']:.0f} / "
        f"{100 * without['top5']:.0f}%. The server is sent the last column of TEBs; metrics are of the test set, with "
        "that noise on what it is sent."
    )
    if (membership := report["membership"]).get("members"):
        table.caption += (
            f" Membership: a training example has a smaller loss than a held-out one with probability "
            f"{membership['auc']:.2f} (0.5: nothing is told)."
        )
    if report["updates"]:
        texts = [f"{each['examples']}: {100 * each['read']:.0f}%" for each in report["updates"]]
        table.caption += (
            f" Tokens that the update of one step of SGD names, by the examples of its batch: {', '.join(texts)}."
        )
        if (told := report["updates"][0]["labels"]) is not None:
            table.caption += f" Of one example it names the label, too: {100 * told:.0f}%."
    if labels := report.get("labels"):
        guessed = labels[0]["without_looking"]
        texts = [f"{each['noise']:g}: {100 * each['top1']:.0f} / {100 * each['top5']:.0f}%" for each in labels]
        table.caption += (
            f" Labels, which stay in the clusters, read from gradients with noise {', '.join(texts)}; without looking "
            f"{100 * guessed['top1']:.0f} / {100 * guessed['top5']:.0f}%."
        )
    return table
