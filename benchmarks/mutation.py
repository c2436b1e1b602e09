"""Mutants of a Python file: one small change each, made on the syntax tree and written into the text at its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",  # codespell:ignore notin
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
}
_PARTNERS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("floor", "ceil"),
    ("any", "all"),
    ("sum", "prod"),
)
_CALLS = {name: other for pair in _PARTNERS for name, other in (pair, pair[::-1])}
_NO_LOGIC = ("logger", "warnings")


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file."""

    line: int
    column: int
    kind: str
    before: str
    after: str
    start: int
    """Place in the file's bytes."""
    end: int

    def apply(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.line}:{self.column} {self.kind}: {self.before!r} -> {self.after!r}"


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _mutant(self, node: ast.expr | ast.stmt, kind: str, after: str) -> Mutant:
        start, end = self._span(node)
        return Mutant(node.lineno, node.col_offset, kind, self._source[start:end].decode(), after, start, end)

    def find(self, tree: ast.Module) -> Iterator[Mutant]:
        """All mutants of what runs: not of docstrings, annotations, messages of errors and what is logged."""
        for node in _executed(tree):
            yield from self._of(node)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        text = ast.unparse
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator, right = _COMPARISONS[type(node.ops[0])], text(node.comparators[0])
            yield self._mutant(node, "comparison", f"({text(node.left)} {operator} {right})")
        elif isinstance(node, ast.Compare):
            for i, kind in enumerate(node.ops):
                words = [text(node.left)]
                for j, (other, value) in enumerate(zip(node.ops, node.comparators, strict=True)):
                    words += [_COMPARISONS[type(kind)] if i == j else _sign(other), text(value)]
                yield self._mutant(node, "comparison", f"({' '.join(words)})")
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            # Types joined by | are no arithmetic, nor are texts.
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
                operator = _ARITHMETIC[type(node.op)]
                yield self._mutant(node, "arithmetic", f"(({text(node.left)}) {operator} ({text(node.right)}))")
        elif isinstance(node, ast.BoolOp):
            operator = " or " if isinstance(node.op, ast.And) else " and "
            yield self._mutant(node, "logic", f"({operator.join(f'({text(v)})' for v in node.values)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield self._mutant(node, "sign", f"({text(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._mutant(node, "constant", str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield self._mutant(node, "constant", repr(node.value + 1))
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_mutated_itself(node.test):
            yield self._mutant(node.test, "condition", f"(not ({text(node.test)}))")
        elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            after = f"{text(node.target)} {_ARITHMETIC[type(node.op)]}= {text(node.value)}"
            yield self._mutant(node, "arithmetic", after)
        elif isinstance(node, ast.Break | ast.Continue):
            yield self._mutant(node, "jump", "continue" if isinstance(node, ast.Break) else "break")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._mutant(node, "dropped call", "pass")
        elif isinstance(node, ast.Raise):
            yield self._mutant(node, "dropped raise", "pass")
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield self._mutant(node, "dropped return", "return None")

    def _of_call(self, node: ast.Call) -> Iterator[Mutant]:
        arguments = ", ".join([ast.unparse(a) for a in node.args] + [ast.unparse(k) for k in node.keywords])
        if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            yield self._mutant(node, "function", f"{_CALLS[node.func.id].replace('prod', 'len')}({arguments})")
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS:
            owner = ast.unparse(node.func.value)
            yield self._mutant(node, "function", f"{owner}.{_CALLS[node.func.attr]}({arguments})")


def _sign(operator: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]


def _is_mutated_itself(test: ast.expr) -> bool:
    """Tell whether the opposite of a condition is another mutant already."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return isinstance(test, ast.UnaryOp | ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of what runs and decides."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or _is_no_logic(child):
                continue
            if isinstance(child, ast.Raise):
                yield child  # its message is for people
                continue
            yield child
            yield from _executed(child)


def _is_no_logic(node: ast.AST) -> bool:
    """Logged, or under TYPE_CHECKING, or an alias of types, or an assertion of our own: ``strict=True``, too."""
    if isinstance(node, ast.Assert) or isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).split(".")[0] in _NO_LOGIC
    return isinstance(node, ast.Assign) and "Literal[" in ast.unparse(node.value)


def mutants(source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of the text; few of them do not compile."""
    return sorted(set(_Finder(source).find(ast.parse(source))))


def compiles(source: bytes) -> bool:
    """Tell whether a text is Python."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
