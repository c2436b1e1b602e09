"""The reference of every key, made from the dataclasses: ``python -m flower_app.config.key_reference > docs/keys.md``.

What a key means is the text under its field. Which values it takes, the checks themselves are asked: what is refused in
the key's own name is out of its range.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import NamedTuple, get_type_hints

from flower_app.config.other_names import OTHER_NAMES
from flower_app.config.run_config import RunConfig, Scalar, key_types

_HEAD = """# Every key

Written by `python -m flower_app.config.key_reference`, from the code. A key stands in a TOML file under its table
(`--config mine.toml`), or is given by itself (`--set optimizer.lr=1e-3`, `train({"optimizer.lr": 1e-3})`). `--set`
wins over the file, and the file over these defaults. Units are in brackets; what has none is a count or a ratio.
`num-server-rounds` and `learning-rate` are other names of `num-rounds` and `optimizer.lr`.
"""
_PLAIN = {
    "seed": "Of data order, fresh weights, dropout and generated text: the same seed gives the same run.",
    "num-rounds": "Rounds of the whole run.",
    "data.validation-target": "As `train-target`.",
    "data.test-target": "As `train-target`.",
    "data.target-column": "Column of a table or hub dataset with the translations, or the answers of `instruction`.",
    "data.validation-split": "`hub`: name of the split that is scored after a round.",
    "data.test-split": "`hub`: name of the split that is scored at the end.",
    "model.num-heads": "Heads of attention; they share `width` evenly.",
    "model.dropout": "Share of the activations that a step of training leaves out.",
    "model.label-smoothing": "Of translation: share of the target that goes to all other tokens.",
    "optimizer.beta1": "`adamw`: decay of the mean of gradients.",
    "optimizer.beta2": "`adamw`: decay of the mean of their squares.",
    "optimizer.eps": "`adamw`: added to the root of that mean.",
    "faults.freeze-seconds": "How long a frozen device stands still [s].",
    "faults.slow-factor": "How many times longer a slow device takes.",
    "faults.partition-seconds": "How long a stream stays cut [s].",
    "faults.seed": "Which faults are drawn.",
}
"""Keys whose names say enough where they are declared."""
_IMPOSSIBLE = "?"
_WHOLE = (-1, 0, 1, 2, 3, 50, 100, 200, 300, 1000)
_UNIT = re.compile(r"\[((?:\d* ?[a-zA-Z][a-zA-Z/]*))\]")
_ROLES = re.compile(r":\w+:`~?([^`]*)`")


class KeyEntry(NamedTuple):
    """Entry of a key in the reference."""

    key: str
    kind: str
    default: str
    values: str
    """Range, or the values to choose from; empty where every one of its kind will do."""
    unit: str
    text: str


def key_entries() -> list[KeyEntry]:
    """Describe every key, in the order of their declaration."""
    texts, defaults = dict(_texts(RunConfig, "")), RunConfig().to_flat()
    return [_entry(key, kind, defaults[key], texts[key]) for key, kind in key_types().items()]


def key_page() -> str:
    """Write the page."""
    lines = [_HEAD]
    table = "?"
    for entry in key_entries():
        owner = entry.key.rpartition(".")[0]
        if owner != table:
            title = f"`[{owner}]`" if owner else "Without a table"
            lines += [f"## {title}", "", "| key | default | values | what it is |", "| --- | --- | --- | --- |"]
            table = owner
        others = [other for other, own in OTHER_NAMES.items() if own == entry.key]
        text = entry.text + (f" Also `{others[0]}`." if others else "")
        unit = f" [{entry.unit}]" if entry.unit else ""
        lines.append(f"| `{entry.key}` | `{entry.default}` | {entry.kind}{entry.values}{unit} | {text} |")
    page = "\n".join(lines)
    return re.sub(r"\n(## )", r"\n\n\1", page) + "\n"


def _texts(owner: type, prefix: str) -> Iterator[tuple[str, str]]:
    """The text under each field of a dataclass and of those within it, by key."""
    hints, documented = get_type_hints(owner), _documented(owner)
    for item in fields(owner):
        key = prefix + item.name.rstrip("_").replace("_", "-")
        if is_dataclass(hints[item.name]):
            yield from _texts(hints[item.name], f"{key}.")
        else:
            yield key, documented.get(item.name) or _PLAIN.get(key, "")


@cache
def _documented(owner: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    texts = {}
    for field, after in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            value = after.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[field.target.id] = _markdown(value.value)
    return texts


def _markdown(text: str) -> str:
    one_line = _ROLES.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", " ".join(text.split()))
    return one_line.replace("``", "`").replace("|", "\\|")


def _entry(key: str, kind: type, default: Scalar, text: str) -> KeyEntry:
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    shown = f"{default:g}" if kind is float else f'"{default}"' if kind is str else str(default).lower()
    unit = match[1] if (match := _UNIT.search(text)) else ""
    choices = _choices(key) if kind is str else []
    if choices:
        return KeyEntry(key, "", shown, ", ".join(f"`{choice}`" for choice in choices), "", text)
    values = _range(key, kind) if kind in (int, float) else ""
    return KeyEntry(key, names[kind], shown, f" {values}" if values else "", unit, text)


def _choices(key: str) -> list[str]:
    refusal = _refusal(key, _IMPOSSIBLE)
    listed = re.search(r"expected one of (.*?)(?:, or module:Class| \(|, found)", refusal)
    if listed:
        return listed[1].split(", ") + (["module:Class"] if "module:Class" in refusal else [])
    pair = re.search(r"expected ([\w-]+) or ([\w-]+), found", refusal)
    return [pair[1], pair[2]] if pair else []


def _range(key: str, kind: type) -> str:
    if stated := re.search(r"expected (?:at least )?(\d+)(?: to (\d+))?(?: round)?, found", _refusal(key, kind(-2))):
        return f"{stated[1]} to {stated[2]}" if stated[2] else f"≥ {stated[1]}"
    if kind is int:
        accepted = [number for number in _WHOLE if not _refusal(key, number)]
        lower = f"≥ {accepted[0]}" if accepted and accepted[0] >= 0 else ""
        return lower or ("≥ -1" if _refusal(key, -2) else "")
    lower = "" if not _refusal(key, -1.0) else "≥ 0" if not _refusal(key, 0.0) else "> 0"
    if not _refusal(key, 1e9):
        return lower
    upper = "≤ 1" if not _refusal(key, 1.0) else "< 1"
    return f"{lower}, {upper}" if lower else upper


@cache
def _refusal(key: str, value: Scalar) -> str:
    """Return the error that a value of a key raises; empty where the value is allowed."""
    try:
        RunConfig.from_flat({key: value})
    except ValueError as error:
        # Beside other keys it may not fit: that is no range of its own.
        if str(error).startswith(f"{key}: expected"):
            return str(error)
    return ""


if __name__ == "__main__":
    print(key_page(), end="")
