"""Numbers with their nouns in messages: 1 cluster, 2 clusters."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    Parameters
    ----------
    number : of things
    noun : for one of them
    plural : for any other number; empty: the noun with an s

    >>> counted(1, "cluster"), counted(0, "cluster"), counted(2, "box", "boxes")
    ('1 cluster', '0 clusters', '2 boxes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
