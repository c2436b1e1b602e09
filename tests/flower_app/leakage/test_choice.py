"""``collapipe leakage --choose``: settings of a saved model under which no attack reads more than a share."""

import json

import pytest
from typer.testing import CliRunner

from client_pipeline.families.registry import family_named
from flower_app.cli.main import app
from flower_app.leakage import inversion
from flower_app.leakage.choice import NEAR_BEST, RECORD
from flower_app.leakage.measurement import ATTACKS
from flower_app.saved_model import load_model
from helpers.saved_runs import saved_run

pytestmark = pytest.mark.slow

TINY = {
    "data.num-examples": 400,
    "data.evaluation-examples": 60,
    "data.vocab-size": 300,
    "model.width": 32,
    "model.num-heads": 2,
    "model.feed-forward": 48,
    "model.encoder-layers": 3,
    "model.decoder-layers": 1,
    "costs": "model",
}
CAUSAL = {"task.name": "causal-lm", "model.family": "gpt2", "split.labels": "cluster"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 60)


def chosen(run_dir, *options):
    return CliRunner().invoke(app, ["leakage", str(run_dir), "--choose", *options])


def test_the_fastest_of_the_settings_that_fit_is_taken_and_tried_on_other_text(tmp_path):
    run_dir = saved_run(TINY | CAUSAL | {"runs-dir": str(tmp_path), "privacy.max-readable": 0.35})
    result = chosen(run_dir, "--noise", "0,3,100", "--codecs", "none,int4", "--json")
    assert result.exit_code == 0, result.output
    choice = json.loads(result.stdout)
    assert json.loads((run_dir / RECORD).read_text()) == choice
    # The server computes labels from the gradients of its states: they count as the tokens do.
    assert choice["attacks"] == [*ATTACKS, "labels"] and choice["max_readable"] == 0.35
    by_cut = {}
    for trial in choice["trials"]:
        worst = max(trial["read"].values())
        assert (trial["loss"] is None) == (worst > 0.35)
        by_cut.setdefault((trial["setting"]["cut"], trial["setting"]["codec"]), []).append(trial)
    # Every cut and codec, from the least noise on until the bound is met.
    assert set(by_cut) == {(cut, codec) for cut in (1, 2, 3) for codec in ("none", "int4")}
    for trials in by_cut.values():
        noises = [trial["setting"]["noise"] for trial in trials]
        assert noises == [0, 3, 100][: len(noises)]
        assert all(trial["loss"] is None for trial in trials[:-1])
    # Without noise a token is read from any depth, in four bits, too; and the labels are whatever the depth is.
    for trials in by_cut.values():
        assert max(trials[0]["read"][name] for name in ATTACKS) > 0.35 and trials[0]["read"]["labels"] > 0.99
    assert choice["chosen"]["read"]["labels"] <= 0.35
    fitting = [trial for trial in choice["trials"] if trial["loss"] is not None]
    near = [t for t in fitting if t["loss"] <= NEAR_BEST * min(each["loss"] for each in fitting)]
    assert choice["chosen"] in near and choice["chosen"]["round_s"] == min(trial["round_s"] for trial in near)
    assert choice["holds"] and choice["held_out"]["split"] == "test"
    assert set(choice["held_out"]["read"]) == set(choice["attacks"])
    assert max(choice["held_out"]["read"].values()) <= 0.35
    assert [each["examples"] for each in choice["updates"]][0] == 1
    # Fewer bytes and fewer TEBs take less virtual time; the keys give the cut again.
    seconds = {key: trials[0]["round_s"] for key, trials in by_cut.items()}
    assert seconds[1, "int4"] < seconds[1, "none"] and seconds[1, "none"] < seconds[3, "none"]
    keys, setting = choice["settings"], choice["chosen"]["setting"]
    assert keys["model.decoder-layers"] == 1 + 3 - setting["cut"]
    assert keys["compression.stream"] == setting["codec"]
    assert keys["privacy.activation-noise"] == keys["privacy.gradient-noise"] == setting["noise"] > 0
    assert keys["privacy.activation-clip"] == choice["chosen"]["clip"]
    assert keys["privacy.gradient-clip"] == choice["chosen"]["gradient_clip"] > 0
    spec = load_model(run_dir, "gpt2").spec
    assert family_named(spec.family).num_blocks(spec) == 3


def test_a_family_with_an_encoder_has_one_cut_and_the_table_gives_the_keys(tmp_path):
    more = {"task.name": "sequence-classification", "model.family": "bert", "runs-dir": str(tmp_path)}
    run_dir = saved_run(TINY | more)
    result = chosen(run_dir, "--noise", "0,100", "--codecs", "none", "--max-readable", "0.4")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "--set compression.stream=none --set privacy.activation-clip=" in text
    assert "the bound holds" in text and "(chosen)" in text
    assert "the update of one step of SGD names of its batch's tokens," in text and "% with 1 example," in text
    assert {trial["setting"]["cut"] for trial in json.loads((run_dir / RECORD).read_text())["trials"]} == {3}


@pytest.mark.parametrize(
    ("more", "options", "reason"),
    [
        (CAUSAL, (), "--max-readable: expected a share above 0 and below 1, found 0; give it, or set privacy.max"),
        (CAUSAL, ("--max-readable", "1.5"), "--max-readable: expected a share above 0 and below 1, found 1.5"),
        (CAUSAL, ("--max-readable", "0.01", "--noise", "0"), "--choose: no setting is read by less than 1 %, the best"),
        (CAUSAL, ("--max-readable", "0.5", "--codecs", "int3"), "expected one of none, fp16, int8, int4, int2, found"),
        (
            CAUSAL | {"split.labels": "server"},
            ("--max-readable", "0.5"),
            "--choose: the labels of task.name = causal-lm are text, and the server is sent all of it; set split",
        ),
        (
            {"split.labels": "cluster"},
            ("--max-readable", "0.5"),
            "--choose: expected a run whose server is sent activations, found strategy = collapipe, split.labels = clu",
        ),
    ],
)
def test_what_cannot_be_chosen_says_why_and_writes_nothing(tmp_path, more, options, reason):
    run_dir = saved_run(TINY | more | {"runs-dir": str(tmp_path), "model.encoder-layers": 1})
    result = chosen(run_dir, *options)
    assert result.exit_code != 0
    assert reason in " ".join(result.output.split())
    assert not (run_dir / RECORD).exists()
