"""Changes that a source file makes to what it imports from outside, as far as its syntax tree shows."""

import ast

OURS = {"client_pipeline", "strategies", "flower_app", "configs", "__future__"}
_IMPORTERS = {"import_module", "__import__"}
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
_CHANGERS = {"update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove"}
"""Methods that change a dictionary or list in place."""


def patches(tree):
    """Changes of a syntax tree, as ``(line, source text of what is changed)``.

    A name is outside if the file imports it from outside of the packages, or assigns it from an attribute, an item or
    an imported module of such a name. What a call of such a name returns is not: an instance belongs to its maker.
    """
    outside, nodes = set(), list(ast.walk(tree))

    def is_outside(node):
        if isinstance(node, ast.Name):
            return node.id in outside
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.NamedExpr):
            return is_outside(node.value)
        if isinstance(node, ast.Tuple | ast.List | ast.BoolOp | ast.IfExp):
            return any(map(is_outside, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Call):
            name, first = called_name(node), node.args[0] if node.args else None
            if name in _IMPORTERS:
                return not (isinstance(first, ast.Constant) and str(first.value).split(".")[0] in OURS)
            return name in ("getattr", "vars", "type") and is_outside(first)
        return False

    for node in nodes:
        if isinstance(node, ast.Import):
            outside |= {alias.asname or root for alias in node.names if (root := alias.name.split(".")[0]) not in OURS}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            # The door to Flower's private names hands on what is Flower's.
            if node.module.split(".")[0] not in OURS or node.module == "strategies.flower_internals":
                outside |= {alias.asname or alias.name for alias in node.names}
    for node in nodes:
        value = getattr(node, "iter", None) or getattr(node, "value", None)
        is_binding = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        if (is_binding or isinstance(node, ast.For) and isinstance(value, ast.Tuple | ast.List)) and is_outside(value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            outside |= {name.id for target in targets for name in ast.walk(target) if is_new_name(name)}
    return [(node.lineno, ast.unparse(node)) for node in nodes if _is_change(node, is_outside)]


def is_new_name(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_change(node, is_outside):
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and is_outside(node.value)
    if not isinstance(node, ast.Call):
        return False
    if called_name(node) in _SETTERS:
        # On ``self`` it is how a frozen dataclass derives a field.
        return ast.unparse(node.args[0]) != "self"
    changed = getattr(node.func, "value", None)
    return called_name(node) in _CHANGERS and not isinstance(changed, ast.Name) and is_outside(changed)


def called_name(call):
    """Last name of what is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")
