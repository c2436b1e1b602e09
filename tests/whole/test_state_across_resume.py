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


def parts(obj, given):
    return {name: plain(value) for name, value in vars(obj).items() if name not in given}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_saved_is_what_was(name):
    kept = KEPT[name]
    made = kept.make()
    kept.fill(made)
    saved = kept.save(made)
    if not any(isinstance(value, torch.Tensor | MovedBlock) for value in leaves(saved)):
        saved = json.loads(json.dumps(saved))
    assert parts(kept.read(kept.make(), saved), kept.given) == parts(made, kept.given)


@pytest.mark.parametrize("name", [name for name, kept in KEPT.items() if not dataclasses.is_dataclass(kept.make())])
def test_nothing_of_what_is_compared_is_as_it_was_made(name):
    """Else an attribute that nobody saves would be equal all the same."""
    kept = KEPT[name]
    fresh, made = kept.make(), kept.make()
    kept.fill(made)
    before, after = parts(fresh, kept.given), parts(made, kept.given)
    assert before.keys() == after.keys() and len(after) > 0
    assert [attribute for attribute, value in after.items() if value == before[attribute]] == []


@pytest.mark.parametrize("name", [name for name, kept in KEPT.items() if dataclasses.is_dataclass(kept.make())])
def test_no_field_of_a_record_has_its_default_value(name):
    example = KEPT[name].make()
    assert [
        field.name
        for field in dataclasses.fields(example)
        if field.default is not dataclasses.MISSING and getattr(example, field.name) == field.default
    ] == []


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and not isinstance(value, MovedBlock):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


def test_every_class_that_reads_what_it_saved_is_in_the_list():
    found = set()
    for package in ("client_pipeline", "strategies", "flower_app"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if any(f"def {name}(" in text for name in ("restore", "load_state", "from_dict")):
                found |= {node.name for node in ast.walk(ast.parse(text)) if reads_what_it_saved(node)}
    assert found and found - KEPT.keys() == set()


def reads_what_it_saved(node):
    if not isinstance(node, ast.ClassDef):
        return False
    methods = {entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)}
    return bool(methods & {"restore", "load_state"}) or {"to_dict", "from_dict"} <= methods
