"""All that programs of a run send each other, recorded: labels are in it where the server has them, and else not."""

import json

import pytest
import torch

from client_pipeline.partition.parts import IGNORED_LABEL
from flower_app.runs.run_directory import find_run, read_run_config
from flower_app.saved_model import load_model
from flower_app.tasks.base import task
from helpers.capture import found_in, recorded_loopback
from helpers.chat_cases import save_chat_model
from helpers.command_line import collapipe_here, sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHORT = {"num-rounds": 1, "local-steps": 2, "evaluate-every": 0, "scenario": "two-clusters"}
ROWS = [
    {"instruction": f"{a} or {b}?", "input": "", "output": f"the {a} and the {b}"}
    for a in ("dog", "king", "cow")
    for b in ("boy", "letter", "house", "tree")
]
LEAST = 4
"""Tokens that are looked for in one piece: fewer may be there by chance."""


def pieces(run):
    """Bytes of what is predicted of each training example, as numbers of any size."""
    config, found = read_run_config(run), {}
    for cluster in range(2):
        data = task(config.task).cluster_data(config.data, load_model(run).tokenizer_json, cluster, 2, config.seed)
        for example in range(len(data)):
            labels = data.collate([example])["labels"][0]
            ids = labels[labels != IGNORED_LABEL][:8]
            if len(ids) >= LEAST:
                for dtype in (torch.int16, torch.int32, torch.int64):
                    found[cluster, example, dtype] = ids.to(dtype).numpy().tobytes()
    return found


def trained(folder, name, labels):
    if name == "instruction":
        (folder / "alpaca.json").write_text(json.dumps(ROWS * 5))
        save_chat_model(folder / "model", "chatml", positions=64)
        collapipe_here("init", "alpaca.json", "--pretrained", "model", cwd=folder)
        given = ["--config", "collapipe.toml"]
        more = {"task.evaluate-generate": ""}
    else:
        given, more = [], {"task.name": name, "data.num-examples": 300}
        more |= {"model.family": "llama"} if name == "causal-lm" else {}
    collapipe_here("run", *given, *sets(**SHORT, **more, **{"split.labels": labels}), cwd=folder)
    return find_run("latest", folder / "runs")


@pytest.mark.parametrize("name", ["causal-lm", "instruction", "translation"])
@pytest.mark.parametrize("labels", ["server", "cluster"])
def test_labels_leave_a_cluster_only_where_the_server_has_them(tmp_path, name, labels):
    record = tmp_path / "loopback.packets"
    with recorded_loopback(record):
        run = trained(tmp_path, name, labels)
    patterns = pieces(run)
    assert len(patterns) > 100 and record.stat().st_size > 100_000
    found = found_in([record], patterns)
    assert len(found) >= 10 if labels == "server" else not found
