"""Models and cases that tests of tasks with a Hugging Face model share."""

from types import SimpleNamespace

import numpy as np

from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from flower_app.saved_model import save_model
from flower_app.tasks.base import TaskConfig, task


def options(**changes):
    """Give a ``[model]`` table of a tiny model."""
    values = {
        "family": "bert",
        "width": 32,
        "num_heads": 2,
        "key_value_heads": 0,
        "feed_forward": 64,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "dropout": 0.1,
        "norm": "pre",
        "label_smoothing": 0.0,
        "max_length": 40,
        "trainable": "full",
        "pretrained": "",
        "from_": "",
        "new_head": False,
    }
    return SimpleNamespace(**{**values, **changes})


def prepare(name, data, model=None, num_clusters=1, seed=0, **changes):
    """Prepare a task."""
    return task(TaskConfig(name=name, **changes)).prepare(data, model or options(), seed, num_clusters)


def train(name, found, data, steps, lr=3e-3, batch_size=32):
    """Train a prepared task in one process; returns the model."""
    parts = found.build(seed=0)
    share = task(TaskConfig(name=name)).cluster_data(data, found.tokenizer_json, 0, 1, 0)
    optimizer = PartOptimizer(dict(parts.named_parameters()), OptimizerConfig(lr=lr, warmup_steps=10))
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        batch = share.collate(rng.choice(len(share), batch_size, replace=False).tolist(), seed=step)
        (parts.loss_sum(batch) / target_weight(targets(batch))).backward()
        optimizer.apply(step)
    return parts


def save(folder, name, found, parts, data):
    """Save a model as a run does."""
    folder.mkdir(exist_ok=True)
    save_model(folder, parts.spec, parts.weights(), found.tokenizer_json, task(TaskConfig(name=name)).saved(data))
    return str(folder)
