"""Least values of a configuration's numbers."""

from __future__ import annotations


def check_least(prefix: str, config: object, **least: float) -> None:
    """Raise ``ValueError`` naming the first field of a configuration that is under its least value."""
    for name, bound in least.items():
        if not (value := getattr(config, name)) >= bound:
            raise ValueError(f"{prefix}{name.replace('_', '-')}: expected at least {bound}, found {value}")
