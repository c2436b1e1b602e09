"""Nested values with one of them changed, as a mistake in a file changes it."""

import copy


def changed(values, path, value):
    """Return a copy in which the value at a path of keys is another; None: it is missing."""
    result = target = copy.deepcopy(values)
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    if value is None:
        del target[path[-1]]
    return result
