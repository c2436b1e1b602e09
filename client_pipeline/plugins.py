"""Classes of the user's own, named in a configuration as ``module:Class``."""

from __future__ import annotations

import importlib


def class_named(key: str, name: str) -> type:
    """Import the class that ``module:Class`` names.

    Parameters
    ----------
    key : of the configuration, for messages
    name : its value

    Raises
    ------
    ValueError
        If the module cannot be imported, or has no such class.
    """
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key}: {name!r}: cannot import {module_name}: {error}; expected module:Class, importable by all "
            "processes of the run (installed, or in a folder of PYTHONPATH)"
        ) from error
    named = getattr(module, class_name, None)
    if not isinstance(named, type):
        raise ValueError(f"{key}: {name!r}: expected module:Class, found {named!r} in {module_name}")
    return named
