"""Place of the repository, and the syntax trees of its sources."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def syntax_tree(file):
    """Tree of a Python file; nobody changes it."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(file):
    """Statements of a Python file that import something."""
    return [node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.Import | ast.ImportFrom)]
