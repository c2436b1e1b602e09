"""Fixtures shared by the tests of the app."""

from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_command_line():
    """Build the command line once for all calls; typer's runner builds all commands for each of them."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield
