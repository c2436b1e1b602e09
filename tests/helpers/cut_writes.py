"""Calls of ``os`` that change a folder, one of which ends the program that makes them."""

import os


def calls_that_end(names, number, end):
    """Return the calls by their names; the ``number``-th of all that are made runs ``end`` in its own place."""
    made = 0

    def counted(call):
        def wrapper(*arguments, **options):
            nonlocal made
            made += 1
            if made == number:
                end()
            return call(*arguments, **options)

        return wrapper

    return {name: counted(getattr(os, name)) for name in names}
