"""Decisions and learning of the server.

``strategies.CollaPipe`` is the Flower strategy; it is imported when it is asked for, so that the planner needs neither
Flower nor torch.
"""

from typing import Any

__all__ = ["CollaPipe"]


def __getattr__(name: str) -> Any:
    if name == "CollaPipe":
        from strategies.collapipe import CollaPipe

        return CollaPipe
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
