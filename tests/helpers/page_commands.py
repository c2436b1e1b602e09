"""The commands of the pages: each with its place, and whether the page says what it needs."""

import re
from dataclasses import dataclass
from functools import cache

import click
import typer
from flwr.cli.app import app as flwr

from flower_app.cli.main import app as collapipe
from helpers.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = re.compile(r"(?:\w+=\S+ )*(?:\.venv/bin/)?(?:collapipe|flwr|python3?|pip|pytest) ")
MARKING = re.compile(r"\bneeds: \S")
SECTION = re.compile(r"\*needs: [^*]+\*")
"""A paragraph of its own: marks all commands up to the next heading that is no lower."""
TO_FILL_IN = re.compile(r"\.\.\.|(?<![\w-])(?!RUN\b)[A-Z][A-Z_]*(?![\w=])")
"""A word in capitals is the reader's to fill in; ``RUN`` is any run."""


@dataclass(frozen=True)
class PageCommand:
    """A command line as a page has it."""

    page: str
    line: int
    text: str
    is_marked: bool
    """True if the page says what the command needs."""
    is_name: bool
    """True if the page names a command or an option in passing, without an argument."""

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text}"


def page_commands():
    """Yield every command of the pages: lines of ``bash`` blocks, and code in text and tables that calls a program."""
    for page in PAGES:
        name, level, marked_level = page.relative_to(ROOT).as_posix(), 1, 0
        for first, block in _blocks(page.read_text(encoding="utf-8")):
            if heading := re.match(r"(#+) ", block):
                level = len(heading[1])
                marked_level = marked_level if level > marked_level else 0
            if SECTION.fullmatch(block):
                marked_level = level
            for number, text, is_marked in _lines(first, block):
                is_marked = is_marked or marked_level > 0 or bool(TO_FILL_IN.search(re.sub(r'"[^"]*"', "", text)))
                is_name = not block.lstrip().startswith("```") and _is_name(text)
                yield PageCommand(name, number, text, is_marked, is_name)


def _blocks(text):
    """Yield the number of the first line and the text of each fence, and of what stands between empty lines."""
    lines, inside, start = [*text.splitlines(), ""], False, 0
    for number, line in enumerate(lines, 1):
        is_fence = line.lstrip().startswith("```")
        if start and not inside and (is_fence or not line.strip()):
            yield start, "\n".join(lines[start - 1 : number - 1])
            start = 0
        if is_fence and inside:
            yield start, "\n".join(lines[start - 1 : number])
            start = 0
        elif not start and line.strip():
            start = number
        inside ^= is_fence


@cache
def click_command(program):
    """A program as click has it: all its commands and their options."""
    return typer.main.get_command({"collapipe": collapipe, "flwr": flwr}[program])


def _is_name(text):
    program, *words = text.split()
    if program not in ("collapipe", "flwr"):
        return False
    command = click_command(program)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    return all(re.fullmatch(r"--[a-z-]+", word) for word in words)


def _lines(first, block):
    """Number, text and marking of each command of a block."""
    if block.lstrip().startswith("```"):
        return _fenced(first, block) if block.lstrip().startswith("```bash") else []
    if not block.startswith("|"):
        return _inline(first, block, bool(MARKING.search(block)))
    header, *rows = block.splitlines()
    column = [name.strip() for name in header.split("|")].index("needs") if "| needs |" in header else 0
    found = []
    for number, row in enumerate(rows, first + 1):
        is_marked = bool(MARKING.search(row)) or bool(column and row.split(" | ")[column - 1].strip(" |"))
        found += _inline(number, row, is_marked)
    return found


def _fenced(first, block):
    is_marked, found, text, started = bool(MARKING.search(block)), [], "", 0
    for number, line in enumerate(block.splitlines()[1:-1], first + 1):
        started = started or number
        text += re.sub(r"(^|\s+)#( .*)?$", "", line).rstrip("\\")
        if line.endswith("\\"):
            continue
        if text.strip():
            found.append((started, " ".join(text.split()), is_marked))
        text, started = "", 0
    return found


def _inline(first, block, is_marked):
    found = re.finditer(r"`([^`]+)`", block)
    codes = [(first + block[: code.start()].count("\n"), " ".join(code[1].split())) for code in found]
    return [(number, text, is_marked) for number, text in codes if PROGRAMS.match(text)]
