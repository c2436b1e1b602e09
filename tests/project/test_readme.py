"""README is one screen, and what it shows is true."""

import re

from flower_app.cli.main import app
from helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_has_ten_lines_and_names_what_is_there():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    compile(code, "README", "exec")
    from flower_app import Run

    assert all(hasattr(Run, name) for name in re.findall(r"\brun\.(\w+)", code))


def test_no_command_is_missing_on_the_page_of_all():
    import typer

    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert not [name for name in typer.main.get_command(app).commands if f"collapipe {name}" not in guide]
