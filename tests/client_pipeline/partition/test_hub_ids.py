"""A path that is mistyped is an error, and no question to the hub."""

import pytest

from client_pipeline.partition.families import read_library_config
from client_pipeline.partition.hub_ids import check_source
from flower_app.tasks.tables import read_hub
from flower_app.tasks.tokenizer import load_tokenizer


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder of models, from which the program is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "bert-tiny").mkdir(parents=True)


@pytest.mark.parametrize(
    "value", ["/models/bert-tiny", "./bert-tinny", "../x", "~/nowhere", "models/bert-tinny", "a/b/c", "bert/", "m.json"]
)
def test_what_looks_like_a_path_is_one_or_an_error(value, models):
    """It became the name of a model of somebody else's, which was asked for on the hub, at no certain revision."""
    readers = {
        "model.pretrained": read_library_config,
        "data.tokenizer": load_tokenizer,
        "data.hub-id": lambda source: read_hub(source, ""),
    }
    for key, read in readers.items():
        with pytest.raises(
            (FileNotFoundError, ValueError), match=f"{key}: .* looks like a path, and /.* does not exist"
        ):
            read(value)


def test_folders_and_hub_ids_pass(models):
    for value in (
        "models/bert-tiny",
        "bert-base-uncased",
        "google/bert_uncased_L-2_H-128_A-2",
        "Helsinki-NLP/opus-2.0",
    ):
        check_source(value, "model.pretrained")
