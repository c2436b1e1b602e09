"""Classes of the user's own, named in a configuration as ``module:Class``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable


def class_named(key: str, name: str, kind: type) -> type:
    """Import the class that ``module:Class`` names.

    Parameters
    ----------
    key : of the configuration, for messages
    name : its value
    kind : what the class must be: a base, or a protocol whose names it must have

    Raises
    ------
    ValueError
        If the module cannot be imported, has no such class, or the class is of another kind.
    """
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        raise ValueError(
            f"{key}: {name!r}: cannot import {module_name}: {error}; expected module:Class, importable by all "
            "processes of the run (installed, or in a folder of PYTHONPATH)"
        ) from error
    named = getattr(module, class_name, None)
    if not isinstance(named, type):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(
            f"{key}: {name!r}: expected module:Class, found {named!r} in {module_name}, whose classes are "
            f"{', '.join(classes) or 'none'}"
        )
    if misfit := _misfit(named, kind):
        raise ValueError(
            f"{key}: {name!r}: expected a class of {kind.__module__}.{kind.__qualname__}, found one that {misfit}"
        )
    return named


def is_within(module: str, allowed: Iterable[str]) -> bool:
    """Return whether a module is one of ``allowed``, or lies in one of these packages."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _misfit(named: type, kind: type) -> str:
    """Return the reason why a class is not of the kind; empty if it is."""
    absent = set(getattr(named, "__abstractmethods__", ()))
    if getattr(kind, "_is_protocol", False):
        members = {*vars(kind), *inspect.get_annotations(kind)}
        absent |= {member for member in members if not member.startswith("_") and not hasattr(named, member)}
    elif not issubclass(named, kind):
        return "is not derived from it; derive it"
    return f"lacks {', '.join(sorted(absent))}; add what is missing" if absent else ""
