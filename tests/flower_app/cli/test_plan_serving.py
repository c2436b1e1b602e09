"""``collapipe plan --for serving``."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from flower_app.cli.main import app
from helpers.command_line import collapipe_here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=2, vocab_size=97)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size, max_position_embeddings=128)).save_pretrained(folder)
    return folder


def planned(model, tmp_path, *more):
    words = ["plan", "--for", "serving", "--scenario", "two-clusters", "--model", model, "--length", "32", "--json"]
    return json.loads(collapipe_here(*words, *more, cwd=tmp_path))


def test_several_requests_are_spread_where_that_writes_more(model, tmp_path):
    found = planned(model, tmp_path, "--requests", "6")
    for cluster in found["clusters"]:
        one, several = cluster["one"], cluster["several"]
        assert sum(one["delta"]) == sum(several["delta"]) == 6
        assert one["tokens_per_s"] == pytest.approx(1 / one["token_s"])
        assert several["tokens_per_s"] >= one["tokens_per_s"]
    # A single one does not wait for links.
    assert [cluster["one"]["delta"].count(0) for cluster in found["clusters"]] == [5, 5]
    assert planned(model, tmp_path, "--requests", "1")["clusters"][0]["several"] == found["clusters"][0]["one"]


def test_keys_and_values_that_do_not_fit_are_said_by_numbers(model, tmp_path):
    words = ["plan", "--for", "serving", "--scenario", "two-clusters", "--model", str(model), "--length", "32"]
    outcome = CliRunner().invoke(app, [*words, "--requests", "1000", "--tokens", "100000"])
    assert outcome.exit_code == 3 and "hold 0 TEBs" in outcome.stdout and "--requests" in outcome.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--for", "serving", "--scenario", "two-clusters"], "no model"),
        (["--for", "cooking", "--scenario", "two-clusters"], "training or serving"),
        (["--for", "serving", "--scenario", "two-clusters", "--model", "x", "--requests", "0"], "at least 1"),
    ],
)
def test_what_does_not_go_together_is_said(words, expected):
    outcome = CliRunner().invoke(app, ["plan", *words])
    assert outcome.exit_code == 2 and expected in outcome.output
