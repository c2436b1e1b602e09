"""The project's modules among those that are imported, where an app may bring others of the same names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_PACKAGES = ("flower_app", "strategies", "client_pipeline")


def our_modules() -> dict[str, ModuleType]:
    """Return them by name."""
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in _PACKAGES}


def forget_our_modules() -> None:
    """Have each imported anew by whoever needs it next, from wherever it is found then."""
    for name in our_modules():
        del sys.modules[name]
    importlib.invalidate_caches()
