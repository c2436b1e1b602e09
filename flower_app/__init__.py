"""Composition: configuration, Flower client and server apps, tasks, command line; and ``train`` for Python."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_app.python_api import Run, TrainingFailed, train

__all__ = ["Run", "TrainingFailed", "train"]

_PACKAGES = ("client_pipeline", "strategies", "configs")
_LIBRARIES = ("flwr", "ray", "torch", "transformers", "tokenizers", "datasets", "safetensors", "rich", "typer", "click")


def __getattr__(name: str) -> Any:
    """Load what Python users ask for when they ask: Flower imports this package for every app, and --help waits."""
    if name in __all__:
        refuse_shadowing_files()
        from flower_app import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names of this module, those that are loaded when asked for included."""
    return sorted({*globals(), *__all__})


def refuse_shadowing_files() -> None:
    """Refuse to import a package beside this one, or a library, in whose place Python finds a file of the user's.

    Raises
    ------
    ImportError
        Naming the file.
    """
    root = Path(__file__).resolve().parents[1]
    for name in (*_PACKAGES, *_LIBRARIES):
        # That one is not installed, the import itself says.
        if (spec := find_spec(name)) is None:
            continue
        folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
        if not folders or (name in _PACKAGES and root / name not in folders):
            raise ImportError(
                f"{spec.origin or folders[0]} stands in the place of the package {name}, which CollaPipe needs; rename "
                "it, or start Python in another folder and leave that one out of PYTHONPATH"
            )
