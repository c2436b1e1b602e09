"""Imports of large libraries without full garbage collections, which would look for garbage among their modules."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_YOUNG_ALONE = (20_000, 1_000, 1_000)
"""Without any collection an import of transformers would leave 8 MB of garbage."""


def quick_import(module: str) -> ModuleType:
    """Import one module so, if it is not there yet."""
    if module in sys.modules:
        # Not as it lies there: another thread may be in the midst of its import, and is waited for.
        return importlib.import_module(module)
    with quick_imports():
        return importlib.import_module(module)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import within: a tenth of the time goes, and of each later full collection the part that is about modules.

    torch and transformers make a million objects that stay as long as the process does. Python's collector looks at
    all of them again and again while they come, and in every full collection afterwards; here it looks at the young
    ones alone, and what is there at the end is no more looked at. Where the collector is off, or another thread imports
    so, nothing is done.
    """
    thresholds = gc.get_threshold()
    if not gc.isenabled() or thresholds == _YOUNG_ALONE:
        yield
        return
    gc.set_threshold(*_YOUNG_ALONE)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)
