"""A run directory as a run leaves it, with an untrained model; and a launcher that leaves one."""

from client_pipeline.families.families import build_parts
from flower_app.config.sources import load_config
from flower_app.launch.launcher import Outcome
from flower_app.runs.run_directory import (
    append_round,
    create_run_directory,
    read_run_config,
    write_config,
    write_summary,
)
from flower_app.saved_model import save_model
from flower_app.tasks.base import task

SMALL = {
    "data.num-examples": 60,
    "data.evaluation-examples": 4,
    "data.vocab-size": 300,
    "model.width": 8,
    "model.num-heads": 2,
    "model.feed-forward": 16,
    "model.decoder-layers": 1,
    "task.max-new-tokens": 5,
}
TWO_CLUSTERS = {
    "num-clusters": 2,
    "data.num-examples": 40,
    "data.evaluation-examples": 4,
    "data.vocab-size": 300,
    "model.width": 16,
    "model.num-heads": 2,
    "model.feed-forward": 32,
    "model.encoder-layers": 2,
    "model.decoder-layers": 1,
}
SUMMARY = {"status": "finished", "rounds": 2, "wall_s": 3.0, "metrics": {"bleu": 12.5}}


def save_untrained(run_dir):
    """Write the model that a run's training would begin with."""
    config = read_run_config(run_dir)
    chosen = task(config.task)
    prepared = chosen.prepare(config.data, config.model, config.seed, 1)
    if config.returns_states:
        prepared = prepared.with_tail(True)
    weights = build_parts(prepared.spec, 0).weights()
    save_model(run_dir, prepared.spec, weights, prepared.tokenizer_json, chosen.saved(config.data))


def saved_run(sets):
    """Make a run directory with such a model."""
    config = load_config(None, sets)
    run_dir = create_run_directory(config.runs_dir, config.name)
    write_config(run_dir, config)
    save_untrained(run_dir)
    return run_dir


class UntrainedLauncher:
    """Leaves a run as the real launcher does, without its programs."""

    def __init__(self, outcome=None):
        self.outcome = outcome or Outcome("finished", "", SUMMARY)

    def launch(self, order):
        for number in (1, 2):
            append_round(order.run_dir, {"round": number, "train_loss": 2.5, "metrics": {}})
            order.watch()
        if self.outcome.status == "finished":
            save_untrained(order.run_dir)
        write_summary(order.run_dir, **(self.outcome.summary or {"status": self.outcome.status}))
        return self.outcome
