"""Pieces of a message that are not there yet are looked for again soon, by the functions of the installed Flower."""

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid

from strategies.flower_internals import run_clientapp_module, supernode_module
from strategies.grid.piece_waits import FIRST_WAIT_S, look_again_soon


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (http_grid, "pull_objects"),
        (supernode_module, "pull_objects"),
        (run_clientapp_module, "pull_and_inflate_object_from_tree"),
    ],
)
def test_flowers_functions_wait_for_a_second_and_can_be_told_to_wait_less(module, function):
    parameters = inspect.signature(inspect.unwrap(getattr(module, function))).parameters
    # Once Flower itself looks as soon, this is superfluous.
    assert parameters["initial_backoff"].default > FIRST_WAIT_S
    copy = SimpleNamespace(**{function: getattr(module, function)})
    look_again_soon(copy, function)
    assert isinstance(getattr(copy, function), partial)
    assert getattr(copy, function).keywords["initial_backoff"] == FIRST_WAIT_S


def test_pieces_that_come_at_the_third_look_are_there():
    module, looks = SimpleNamespace(pull_objects=inflatable_utils.pull_objects), []
    look_again_soon(module, "pull_objects")
    look_again_soon(module, "absent")

    def pull(name):
        looks.append(name)
        if looks.count(name) < 3:
            raise ObjectUnavailableError(name)
        return name.encode()

    assert module.pull_objects(["a", "b"], pull_object_fn=pull) == {"a": b"a", "b": b"b"}
    assert sorted(looks) == ["a", "a", "a", "b", "b", "b"] and not hasattr(module, "absent")
