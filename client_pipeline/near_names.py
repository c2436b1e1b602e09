"""The known name that a misspelt one is nearest to, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """End a message about an unknown name with the nearest known one.

    Parameters
    ----------
    name : what was found
    known : names that would do

    Returns
    -------
    ``"; did you mean 'x'?"``; empty where no known name is like it.

    >>> did_you_mean("dsda", ["dssda", "uniform"])
    "; did you mean 'dssda'?"
    >>> did_you_mean("moon", ["dssda", "uniform"])
    ''
    """
    by_letters = {each.lower().replace("_", "-"): each for each in known}
    near = difflib.get_close_matches(str(name).lower().replace("_", "-"), by_letters, n=1, cutoff=0.6)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""
