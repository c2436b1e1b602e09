"""State across a resume: what an object saves is what another one of its class has after reading it."""

import ast
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from client_pipeline.runtime.stage.moved_block import MovedBlock
from helpers.kept_objects import KEPT
from helpers.repository import ROOT
from strategies.registry import STOCK_KEEPS


def plain(value):
    """A value as nested lists, to be compared whatever it is made of."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, nn.Module):
        return plain(value.state_dict())
    if type(value).__module__ in ("_thread", "threading"):
        return None
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def parts(obj, kept):
    return {name: plain(value) for name, value in kept.attributes(obj).items() if name not in kept.given}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Objects that are kept in files write them to the working directory."""
    monkeypatch.chdir(tmp_path)


def filled(kept):
    made = kept.make()
    kept.fill(made)
    return made


def read_again(kept, made):
    saved = kept.save(made)
    if not any(isinstance(value, torch.Tensor | MovedBlock) for value in leaves(saved)):
        saved = json.loads(json.dumps(saved))
    return kept.read(kept.make(), saved)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_saved_is_what_was(name):
    kept = KEPT[name]
    made = filled(kept)
    assert parts(read_again(kept, made), kept) == parts(made, kept)


@pytest.mark.parametrize("name", [name for name, kept in KEPT.items() if kept.step])
def test_the_step_after_a_resume_is_that_without_one(name):
    """Rounds of control units and steps of server optimizers are compared where these are tested."""
    kept = KEPT[name]
    made = filled(kept)
    resumed = read_again(kept, made)
    expected = plain(kept.step(made))
    assert plain(kept.step(resumed)) == expected


@pytest.mark.parametrize("name", [name for name, kept in KEPT.items() if not kept.is_record])
def test_nothing_of_what_is_compared_is_as_it_was_made(name):
    """Else an attribute that nobody saves would be equal all the same."""
    kept = KEPT[name]
    before, after = parts(kept.make(), kept), parts(filled(kept), kept)
    assert before.keys() == after.keys() and len(after) > 0
    assert [attribute for attribute, value in after.items() if value == before[attribute]] == []


@pytest.mark.parametrize("name", [name for name, kept in KEPT.items() if kept.is_record])
def test_no_field_of_a_record_has_its_default_value(name):
    example = KEPT[name].make()
    assert [field for field, default in defaults(example).items() if getattr(example, field) == default] == []


def defaults(example):
    if not dataclasses.is_dataclass(example):
        return getattr(example, "_field_defaults", {})
    fields = dataclasses.fields(example)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and not isinstance(value, MovedBlock):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


PARTS = {"TrainedBlock": "Stage"}
"""Classes whose state is saved as a part of another's."""
OF_EACH_SIGN = ("Checkpoint", "ControlUnit", "DataOrder", "FedYogi", "Releases", "RoundClock", "RunStanding", "Stage")
"""One class for each sign of a saved state."""
SIGNS = ("def restore(", "def load_state(", "def go_to(", "def from_dict(", "def state(", "Checkpoint(")
FROM_A_CHECKPOINT = {"resumed", "wall_before_s", "sealed", "read_checkpoint", "load_state"}
"""Names in a class that begins with what another one read, or has a file of its own."""


def test_every_class_with_saved_state_is_in_the_list():
    classes = {name for name, keeps in STOCK_KEEPS.items() if keeps == "memory"}
    for package in ("client_pipeline", "strategies", "flower_app"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if any(sign in text for sign in (*SIGNS, *FROM_A_CHECKPOINT)):
                classes |= {node.name for node in ast.walk(ast.parse(text)) if has_saved_state(node)}
    assert {*OF_EACH_SIGN, *PARTS} <= classes
    assert {PARTS.get(name, name) for name in classes} - KEPT.keys() == set()


def has_saved_state(node):
    if not isinstance(node, ast.ClassDef):
        return False
    methods = {entry.name: entry for entry in node.body if isinstance(entry, ast.FunctionDef)}
    reads = methods.keys() & {"restore", "load_state", "go_to"} or {"to_dict", "from_dict"} <= methods.keys()
    gives = "state" in methods and len(methods["state"].args.args) - len(methods["state"].args.defaults) == 1
    is_checkpoint = node.name.endswith("Checkpoint") and "NamedTuple" in map(ast.unparse, node.bases)
    return bool(reads or gives or is_checkpoint or FROM_A_CHECKPOINT & {*names_of_others(node)})


def names_of_others(node):
    """Names that a class uses, without its own attributes."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") != "self":
            yield part.attr
