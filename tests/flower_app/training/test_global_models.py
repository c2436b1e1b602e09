"""The run's one model on the server: a head that is trained there is scored and saved as it is, without a copy."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from client_pipeline.families.families import build_parts
from flower_app.saved_model import read_model
from flower_app.tasks.base import Prepared, Score
from flower_app.training.global_models import GlobalModels
from helpers.tiny_models import CLASSIC
from strategies.records import to_arrays
from strategies.separate_models import cluster_prefix


class Evaluator:
    """Scores a model by the sum of its weights."""

    def evaluate(self, parts, split):
        sums = {part: float(sum(p.detach().sum() for p in getattr(parts, part).parameters())) for part in PARTS}
        return Score(metrics=sums, examples=1)


PARTS = ("embedding", "blocks", "head")


@pytest.fixture
def parts():
    return build_parts(CLASSIC, seed=1)


@pytest.fixture
def models(parts):
    prepared = Prepared(spec=CLASSIC, tokenizer_json="{}", evaluator=Evaluator(), cluster_sizes=(1,))
    return GlobalModels(prepared, parts, {}, 0)


def test_a_round_is_scored_with_the_head_as_it_is_now_and_leaves_it_so(models, parts, tmp_path):
    encoder = {name: torch.zeros_like(value) for name, value in parts.weights(head=False).items()}
    models.take(to_arrays(encoder))
    with torch.no_grad():
        for parameter in parts.head.parameters():
            parameter.fill_(0.5)
    metrics, _ = models.score("validation")
    assert metrics["blocks"] == metrics["embedding"] == 0
    assert metrics["head"] == 0.5 * sum(p.numel() for p in parts.head.parameters())
    models.save(tmp_path, {}, 1)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == dict(parts.named_parameters()).keys()
    # The kept model is scored at the end, whatever was trained since.
    with torch.no_grad():
        for parameter in parts.head.parameters():
            parameter.fill_(7.0)
    models.take_saved(tmp_path)
    assert models.score("test")[0] == metrics


def test_models_of_clusters_own_are_saved_and_scored_as_they_are(parts, tmp_path):
    prepared = Prepared(spec=CLASSIC, tokenizer_json="{}", evaluator=Evaluator(), cluster_sizes=(1, 1, 1))
    models = GlobalModels(prepared, parts, {}, 3)
    start = {name: torch.zeros_like(value) for name, value in parts.weights().items()}
    name = next(iter(start))
    own = [{key: value + n * n for key, value in start.items()} for n in range(3)]
    arrays = {cluster_prefix(n) + name: value for n, model in enumerate(own) for name, value in model.items()}
    models.take(to_arrays(arrays))
    metrics, _ = models.score("validation")
    assert metrics["head"] == pytest.approx(5 / 3 * sum(p.numel() for p in parts.head.parameters()))
    models.save(tmp_path, {}, 1)
    models.forget()
    models.take_saved(tmp_path)
    assert models.score("test")[0] == metrics
    for n, model in enumerate(own):
        stored = read_model(tmp_path, cluster=n).weights
        assert all(torch.equal(stored[name], value) for name, value in model.items())
    assert torch.equal(read_model(tmp_path).weights[name], own[0][name])
    with pytest.raises(ValueError, match="has saved models of clusters 0 to 2, found --cluster 3"):
        read_model(tmp_path, cluster=3)


def test_a_rounds_weights_are_never_copied_and_not_kept_until_a_later_evaluation(models, parts):
    arrays = to_arrays(parts.weights())
    name = next(iter(arrays))
    content = arrays[name].data
    holders = sys.getrefcount(content)
    first, second = models.whole(arrays), models.whole(arrays)
    assert {key: value.data_ptr() for key, value in first.items()} == {k: v.data_ptr() for k, v in second.items()}
    assert torch.equal(first[name], dict(parts.named_parameters())[name])
    del first, second
    models.take(arrays)
    assert sys.getrefcount(content) > holders
    models.forget()
    assert sys.getrefcount(content) == holders
