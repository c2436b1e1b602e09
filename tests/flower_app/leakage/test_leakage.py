"""The attacks on activations, on what is known to be readable and what is not, and the command on saved models."""

import json

import pytest
import torch
from typer.testing import CliRunner

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import with_tail
from client_pipeline.partition.parts import target_weight, targets
from flower_app.cli.main import app
from flower_app.leakage import inversion
from flower_app.leakage.inversion import Tokens
from flower_app.leakage.labels import read_labels
from flower_app.leakage.measurement import observe
from flower_app.leakage.membership import tell_members
from flower_app.runs.run_directory import read_run_config
from flower_app.saved_model import load_model
from flower_app.tasks.base import task
from helpers.decoder_only import small_spec
from helpers.saved_runs import saved_run

pytestmark = pytest.mark.slow

VOCABULARY, WIDTH, LONGEST = 300, 16, 12


@pytest.fixture(scope="module")
def world():
    """An embedding with places, text of a skewed distribution, and its embeddings."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH, generator=generator)
    places = torch.randn(LONGEST, WIDTH, generator=generator)

    def embed(ids_BT):
        return table[ids_BT] + places[: ids_BT.shape[1]]

    def text(number):
        ids = torch.multinomial(1 / torch.arange(1.0, VOCABULARY + 1), number, replacement=True, generator=generator)
        where = torch.randint(LONGEST, (number,), generator=generator)
        return Tokens(table[ids] + places[where], ids, where)

    return embed, text(3000), text(800)


def moved(tokens, change):
    return Tokens(change(tokens.hidden_ND), tokens.ids_N, tokens.places_N)


ATTACKS = {
    "nearest": lambda world, aux, seen: inversion.nearest(world[0], VOCABULARY, aux, world[1].hidden_ND, seen),
    "linear": lambda world, aux, seen: inversion.linear(world[0], VOCABULARY, aux, world[1].hidden_ND, seen),
    "learned": lambda world, aux, seen: inversion.learned(lambda: aux, seen),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_embeddings_themselves_are_read(world, attack):
    found = ATTACKS[attack](world, world[1], world[2])
    # A token that the auxiliary text lacks can be read by its embedding alone.
    assert found.top1 > (0.8 if attack == "learned" else 0.999) and found.top5 >= found.top1


def test_an_embedding_that_is_the_same_at_each_place_is_computed_for_one():
    table, asked = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3)), []

    def embed(ids_BT):
        asked.append(tuple(ids_BT.shape))
        return table[ids_BT]

    ids = torch.arange(VOCABULARY)
    tokens = Tokens(table[ids], ids, ids % LONGEST)
    assert inversion.nearest(embed, VOCABULARY, tokens, table[ids], tokens).top1 == 1.0
    assert asked == [(1, LONGEST), (VOCABULARY, 1)]


def test_a_shift_is_taken_off_a_linear_map_is_learned_and_a_bent_one_needs_a_network(world, monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 300)
    _, auxiliary, victims = world
    matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    changes = {
        "shifted": lambda h: h + 7.0,
        "turned": lambda h: h @ matrix,
        "bent": lambda h: torch.sin(2 * h) @ matrix,
    }

    def read(change, attack):
        return ATTACKS[attack](world, moved(auxiliary, changes[change]), moved(victims, changes[change])).top1

    assert read("shifted", "nearest") > 0.999
    assert read("turned", "nearest") < 0.2 and read("turned", "linear") > 0.999
    of_network = read("bent", "learned")
    assert of_network > read("bent", "linear") + 0.1
    # The same classifier without its bend.
    monkeypatch.setattr(inversion.nn, "GELU", torch.nn.Identity)
    assert of_network > read("bent", "learned") + 0.1


def test_of_noise_nothing_is_read_beyond_what_is_guessed_without_looking(world, monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 300)
    _, auxiliary, victims = world
    generator = torch.Generator().manual_seed(2)
    noise = [moved(t, lambda h: torch.randn(h.shape, generator=generator)) for t in (auxiliary, victims)]
    guessed = inversion.blind(auxiliary, victims)
    for attack in ATTACKS.values():
        found = attack(world, *noise)
        assert found.top1 < guessed.top1 + 0.05 and found.top5 < guessed.top5 + 0.05


TINY = {
    "data.num-examples": 400,
    "data.evaluation-examples": 60,
    "data.vocab-size": 300,
    "model.width": 32,
    "model.num-heads": 2,
    "model.feed-forward": 48,
    "model.encoder-layers": 2,
    "model.decoder-layers": 1,
    "task.max-new-tokens": 4,
}


@pytest.mark.parametrize(
    "more",
    [
        {"task.name": "translation"},
        {"task.name": "sequence-classification", "model.family": "bert"},
        {"task.name": "causal-lm", "model.family": "gpt2"},
    ],
    ids=lambda more: more["task.name"],
)
def test_a_run_is_attacked_by_depth_and_noise(tmp_path, monkeypatch, more):
    monkeypatch.setattr(inversion, "_STEPS", 60)
    run_dir = saved_run(TINY | more | {"runs-dir": str(tmp_path)})
    result = CliRunner().invoke(app, ["leakage", str(run_dir), "--noise", "0,100", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["depth_of_the_cut"] == 2 and [level["noise"] for level in found["levels"]] == [0, 100]
    clean, noisy = found["levels"]
    for attack in ("nearest", "linear"):
        assert clean["depths"][0][attack]["top1"] > 0.999
    guessed = found["without_looking"]
    for depth in noisy["depths"]:
        assert max(depth[a]["top1"] for a in ("nearest", "linear", "learned")) < guessed["top1"] + 0.1
        assert depth["clip"] > 0
    # Splitting alone hides next to nothing, even behind both TEBs.
    assert max(clean["depths"][2][a]["top1"] for a in ("nearest", "linear")) > 0.5
    assert noisy["metrics"].keys() == clean["metrics"].keys() and noisy["metrics"]["loss"] != clean["metrics"]["loss"]


def test_labels_that_stay_are_read_from_the_gradients_unless_these_have_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 5)
    more = {"task.name": "causal-lm", "model.family": "llama", "split.labels": "cluster", "runs-dir": str(tmp_path)}
    run_dir = saved_run(TINY | more)
    # A clip of activations is none of gradients, which are a thousandth as long.
    options = ["--noise", "0,100", "--clip", "1000", "--cut-only", "--json"]
    result = CliRunner().invoke(app, ["leakage", str(run_dir), *options])
    assert result.exit_code == 0, result.output
    clean, noisy = json.loads(result.stdout)["labels"]
    assert (clean["noise"], noisy["noise"]) == (0, 100)
    assert clean["top1"] >= 0.99 and clean["clip"] is None and clean["tokens"] > 100
    assert noisy["top1"] < noisy["without_looking"]["top1"] + 0.1 and 0 < noisy["clip"] < 10


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite"])
def test_a_label_is_named_by_its_gradient_whatever_the_tail(family):
    parts = build_parts(with_tail(small_spec(family), {}, True)[0], seed=0)
    tail, generator = parts.embedding.tail, torch.Generator().manual_seed(1)
    vocabulary, width = tail.lm_head.weight.shape
    states = torch.randn(40, width, generator=generator)
    labels = torch.randint(vocabulary, (40,), generator=generator)
    moved_states = states.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(tail.scores(tail.norm(moved_states[None]))[0], labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, moved_states)
    assert read_labels(tail, states, gradient, labels).top1 >= 0.975
    # Clipped to whatever length, it says the same.
    lengths = torch.rand(40, 1, generator=generator) + 0.1
    assert read_labels(tail, states, gradient * lengths, labels).top1 >= 0.95
    other = torch.randn(gradient.shape, generator=generator)
    assert read_labels(tail, states, other, labels).top1 < 0.2


@pytest.mark.parametrize("only", [[], ["--cut-only"]])
def test_the_table_has_a_row_for_every_noise_and_the_runs_own_is_marked(tmp_path, monkeypatch, only):
    monkeypatch.setattr(inversion, "_STEPS", 5)
    run_dir = saved_run(
        TINY | {"runs-dir": str(tmp_path), "privacy.activation-clip": 4.0, "privacy.activation-noise": 0.25}
    )
    result = CliRunner().invoke(app, ["leakage", str(run_dir), "--noise", "0", "--tokens", "200", *only])
    assert result.exit_code == 0, result.output
    assert "0.25 (the run's)" in result.output and "2 TEBs" in result.output and "bleu" in result.output
    assert ("1 TEBs" in result.output) == (not only)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "-1"], "--noise: expected multipliers of at least 0"),
        (["--clip", "-1"], "--clip: expected a number of at least 0"),
        (["--tokens", "0"], "--tokens: expected at least 1"),
        ([], "nowhere"),
    ],
)
def test_wrong_options_and_missing_runs_are_named(options, message):
    result = CliRunner().invoke(app, ["leakage", "nowhere", *options])
    assert result.exit_code == 2 and message in result.output


def test_examples_that_were_learnt_by_heart_are_told_from_others_of_their_kind(tmp_path):
    run_dir = saved_run(TINY | {"task.name": "causal-lm", "model.family": "gpt2", "runs-dir": str(tmp_path)})
    config, model = read_run_config(run_dir), load_model(run_dir)
    chosen = task(config.task)
    data = chosen.cluster_data(config.data, model.tokenizer_json, 0, 20, config.seed)
    evaluator = chosen.evaluator(config.data, model.tokenizer_json)
    others = observe(model, evaluator, "test", 20_000).batches
    assert sum(len(batch["input_ids"]) for batch in others) == 60
    fresh = tell_members(model.parts, [data], others)
    assert fresh.auc == pytest.approx(0.5, abs=0.15) and (fresh.members, fresh.others) == (len(data), 60)
    optimizer = torch.optim.Adam(model.parts.embedding.parameters(), lr=0.01)
    batch = data.collate(range(len(data)))
    with torch.enable_grad():
        for _ in range(60):
            optimizer.zero_grad()
            (model.parts.loss_sum(batch) / target_weight(targets(batch))).backward()
            optimizer.step()
    assert tell_members(model.parts, [data], others).auc > 0.9


def test_membership_of_data_that_are_elsewhere_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 5)
    run_dir = saved_run(TINY | {"task.name": "causal-lm", "model.family": "gpt2", "runs-dir": str(tmp_path)})

    def elsewhere(self, *arguments):
        raise FileNotFoundError("train.en: no such file")

    monkeypatch.setattr("flower_app.tasks.causal_lm.CausalLMTask.cluster_data", elsewhere, raising=False)
    result = CliRunner().invoke(app, ["leakage", str(run_dir), "--noise", "0", "--cut-only", "--json"])
    assert json.loads(result.stdout)["membership"] == {"error": "train.en: no such file"}


@pytest.mark.parametrize(("strategy", "members"), [("collapipe", 100), ("pipeline", 50)])
def test_members_are_what_the_attacked_model_was_trained_on(tmp_path, monkeypatch, strategy, members):
    """Of separate models, the first cluster's is attacked."""
    monkeypatch.setattr(inversion, "_STEPS", 5)
    more = {"scenario": "two-clusters", "data.num-examples": 100, "strategy": strategy, "runs-dir": str(tmp_path)}
    run_dir = saved_run(TINY | {"task.name": "causal-lm", "model.family": "gpt2"} | more)
    result = CliRunner().invoke(app, ["leakage", str(run_dir), "--noise", "0", "--cut-only", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["membership"]["members"] == members
