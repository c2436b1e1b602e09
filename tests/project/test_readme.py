"""README is one screen, and what it shows is true."""

import re

from flower_app.cli.main import app
from helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_screen_answers_what_whom_why_hardware_leaks_and_how_long():
    screen = "\n".join(README.splitlines()[:40])
    for question in ("What.", "For whom.", "Why not plain Flower?", "Hardware.", "What leaks.", "How long."):
        assert f"**{question}**" in screen
    assert "collapipe run\n" in screen and "pytest\n" in screen and "99.8%" in screen


def test_there_are_at_most_twelve_commands_and_ten_measured_rows():
    shown = [line for block in blocks("bash") for line in block.splitlines() if "collapipe" in line or "pytest" in line]
    table = re.findall(r"^\| `collapipe", README, re.MULTILINE)
    assert len(shown) + len(table) <= 12
    rows = [line for line in README.partition("## Measured")[2].splitlines() if line.startswith("| ")]
    assert 5 <= len(rows) - 2 <= 10


def test_the_measured_rows_are_those_of_the_page():
    rows = [line for line in README.partition("## Measured")[2].splitlines() if line.startswith("| ")][2:]
    lines = MEASURED.replace("](", "](docs/").splitlines()
    assert rows and not [row for row in rows if row not in lines]


def test_the_python_example_has_ten_lines_and_names_what_is_there():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    compile(code, "README", "exec")
    from flower_app import Run

    assert all(hasattr(Run, name) for name in re.findall(r"\brun\.(\w+)", code))


def test_both_set_up_commands_are_one_line_and_differ_in_their_last_word_alone():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    run, test = (line.rsplit(" && ", 1) for line in lines)
    assert run[0] == test[0]
    assert (run[1], test[1]) == (".venv/bin/collapipe run", ".venv/bin/pytest")


def test_no_command_is_missing_on_the_page_of_all():
    import typer

    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert not [name for name in typer.main.get_command(app).commands if f"collapipe {name}" not in guide]
