"""Names that Flower's users know: ``num-server-rounds`` and ``learning-rate``."""

import pytest

from flower_app.config.other_names import OTHER_NAMES
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import config_of, load_config, read_sets


def test_both_names_of_a_key_mean_the_same(tmp_path):
    (tmp_path / "mine.toml").write_text("num-server-rounds = 7\nlearning-rate = 0.5\n")
    for config in (
        load_config(None, ["num-server-rounds=7", "learning-rate=0.5"]),
        load_config(None, {"num-server-rounds": 7, "learning-rate": 0.5}),
        load_config(str(tmp_path / "mine.toml")),
        config_of({"num-server-rounds": 7, "learning-rate": 0.5}, tmp_path),
        RunConfig.from_flat({"num-server-rounds": 7, "learning-rate": 0.5}),
    ):
        assert (config.num_rounds, config.optimizer.lr, config.optimizer.total_steps) == (7, 0.5, 28)
        # What is written down has our own names.
        assert not OTHER_NAMES.keys() & config.to_flat().keys()


def test_both_names_at_once_are_an_error(tmp_path):
    with pytest.raises(ValueError) as error:
        read_sets(["num-server-rounds=7", "num-rounds=7"])
    assert str(error.value) == (
        "num-server-rounds: --set gives 7, and num-rounds = 7 too; both name one key: leave one out"
    )
    (tmp_path / "mine.toml").write_text("learning-rate = 0.5\n[optimizer]\nlr = 1.0\n")
    with pytest.raises(ValueError, match=r"learning-rate: .*mine.toml gives 0.5, and optimizer.lr = 1.0 too"):
        load_config(str(tmp_path / "mine.toml"))


def test_what_flower_hands_over_has_every_name_and_0_stands_for_none():
    everything = RunConfig().to_flat() | {"num-server-rounds": 0, "learning-rate": 0.0}
    assert RunConfig.from_flat(everything) == RunConfig()
    assert RunConfig.from_flat(everything | {"num-server-rounds": 2}).num_rounds == 2
    with pytest.raises(ValueError, match="--run-config gives 2, and num-rounds = 3 too"):
        RunConfig.from_flat(everything | {"num-server-rounds": 2, "num-rounds": 3})
