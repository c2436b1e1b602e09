"""What a simulation's actors need is imported once, for all of them."""

import importlib.util
from dataclasses import replace

import pytest

from client_pipeline.partition.families import library_families
from flower_app.config.run_config import RunConfig
from flower_app.training.simulated_actors import worker_imports


def modules_of(**model):
    config = RunConfig()
    return worker_imports(replace(config, model=replace(config.model, **model)))


@pytest.mark.parametrize("family", library_families())
def test_the_librarys_module_of_each_family_is_there(family):
    (module,) = modules_of(family=family)
    assert importlib.util.find_spec(module) is not None


def test_adapters_bring_their_library_and_other_families_none():
    assert modules_of() == modules_of(family="package.module:Class") == []
    assert modules_of(trainable="lora") == ["peft"]
