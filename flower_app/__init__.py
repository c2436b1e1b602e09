"""Composition: configuration, Flower client and server apps, tasks, command line; and ``train`` for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_app.python_api import Run, TrainingFailed, train

__all__ = ["Run", "TrainingFailed", "train"]


def __getattr__(name: str) -> Any:
    """Load what Python users ask for when they ask: Flower imports this package for every app, and --help waits."""
    if name in __all__:
        from flower_app import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names of this module, those that are loaded when asked for included."""
    return sorted({*globals(), *__all__})
