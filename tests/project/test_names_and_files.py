"""One name, one thing; objects are whole when constructed; a file is one idea. Read from the syntax trees."""

import ast
from collections import defaultdict

from helpers.repository import ROOT, syntax_tree

PACKAGES = ["client_pipeline", "strategies", "flower_app"]
EXEMPT = {"app", "main", "logger"}
PROTOCOLS = {
    # What every model family's adapter has.
    "client_pipeline/partition/": {
        "HEADS",
        "build_block",
        "build_embedding",
        "build_head",
        "build_parts",
        "carried_examples",
        "library_config",
        "mask_form",
        "num_blocks",
        "spec_from_model",
        "split",
        "tied",
        "width",
    },
    # What every experiment has.
    "flower_app/experiments/": {"EXPERIMENT", "draw", "findings", "run"},
    # What every part of the command line has.
    "flower_app/cli/": {"register"},
}
"""Names that a folder's modules share, because they are asked for by them."""
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
OF_THE_BASE = {
    "_Krum": {"num_nodes_to_select", "num_malicious_nodes"},
    "_MultiKrum": {"num_nodes_to_select", "num_malicious_nodes"},
    "_Bulyan": {"num_malicious_nodes"},
}
"""Attributes that the constructor of a library's class makes."""


def trees(*folders):
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), syntax_tree(file)


def is_alias(value):
    """Whether a value is a type's other name, which may be short."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "TypeVar"
    return isinstance(value, ast.Subscript | ast.BinOp)


def public_names(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and not is_alias(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_a_public_name_is_one_thing_over_all_packages():
    owners = defaultdict(set)
    for file, tree in trees(*PACKAGES):
        shared = set().union(*(names for folder, names in PROTOCOLS.items() if file.startswith(folder)), EXEMPT)
        for name in set(public_names(tree)) - shared:
            if not name.startswith("_"):
                owners[name].add(file)
    assert not {name: sorted(files) for name, files in owners.items() if len(files) > 1}


def own_attributes(function):
    """Attributes of ``self`` that a method assigns."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                yield node.attr


def methods_of(owner):
    return [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def made_by_constructors(owner, classes):
    """Attributes that a class declares, or its constructors and setters make; and those of its bases here."""
    made = {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}
    made |= {target.id for node in owner.body if isinstance(node, ast.Assign) for target in node.targets}
    for method in methods_of(owner):
        if method.name in CONSTRUCTORS or any(getattr(d, "attr", "") == "setter" for d in method.decorator_list):
            made |= {method.name, *own_attributes(method)}
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            made |= made_by_constructors(classes[base.id], classes)
    return made


def test_no_attribute_is_born_outside_a_constructor():
    nodes = [
        (file, node) for file, tree in trees(*PACKAGES) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    classes = {node.name: node for _, node in nodes}
    late = {}
    for file, node in nodes:
        assigned = {name for method in methods_of(node) for name in own_attributes(method)}
        if born := assigned - made_by_constructors(node, classes) - OF_THE_BASE.get(node.name, set()):
            late[f"{file}: {node.name}"] = sorted(born)
    assert not late


def test_a_short_file_with_one_importer_says_why_it_stands_alone():
    importers = defaultdict(set)
    modules = {file.removesuffix(".py").replace("/", "."): file for file, _ in trees(*PACKAGES)}
    for file, tree in trees(*PACKAGES):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    importers[whole if whole in modules else node.module].add(file)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(file)
    short = []
    for module, file in modules.items():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        alone = any(line.startswith("# Alone:") for line in lines[:5])
        if not file.endswith("__init__.py") and len(lines) < 40 and len(importers[module]) == 1 and not alone:
            short.append(file)
    assert not short


def test_no_python_file_has_over_400_lines():
    folders = (*PACKAGES, "configs", "tests", "benchmarks")
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert len(lengths) > 400 and {path: n for path, n in lengths.items() if n > 400} == {}
