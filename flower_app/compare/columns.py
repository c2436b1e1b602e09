"""Numbers and column legends of the comparisons' tables."""

from __future__ import annotations

import math
from collections.abc import Mapping


def four_digits(value: float | None) -> str:
    """Write a number with four digits, and whole from 1,000 on.

    >>> [four_digits(value) for value in (0.70612, 12.3456, 20.0, 54321.0, None)]
    ['0.7061', '12.35', '20.00', '54,321', '-']
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:#.4g}"


def legend(columns: Mapping[str, str]) -> str:
    """Return a line for each column of a table, with its meaning."""
    width = max(map(len, columns))
    return "\n".join(f"{name:<{width}}  {meaning}" for name, meaning in columns.items())
