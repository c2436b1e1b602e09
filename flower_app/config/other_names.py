"""Keys that Flower's users know by another name: ``num-server-rounds`` is ``num-rounds``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_NAMES = {"num-server-rounds": "num-rounds", "learning-rate": "optimizer.lr"}
"""Name that Flower's own apps use -> our key."""


def with_own_names(flat: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Put our keys for other names; ``place`` stands in the message.

    Raises
    ------
    ValueError
        If both names of a key are given.
    """
    for other, key in OTHER_NAMES.items():
        if other in flat and key in flat:
            raise _both(other, key, place, flat)
    return {OTHER_NAMES.get(key, key): value for key, value in flat.items()}


def without_other_names(flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Put our keys for other names in what Flower hands over, where every name has a value: 0 stands for none.

    Raises
    ------
    ValueError
        If both names of a key are given: ours with another value than its default.
    """
    result = {key: value for key, value in flat.items() if key not in OTHER_NAMES}
    for other, key in OTHER_NAMES.items():
        if flat.get(other):
            if result.get(key, defaults[key]) != defaults[key]:
                raise _both(other, key, "--run-config", flat)
            result[key] = flat[other]
    return result


def _both(other: str, key: str, place: str, flat: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"{other}: {place} gives {flat[other]!r}, and {key} = {flat[key]!r} too; both name one key: leave one out"
    )
