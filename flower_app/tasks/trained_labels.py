"""Labels of the data and classes of the head that a run starts from, matched by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from client_pipeline.families.pretrained import trained_classes
from client_pipeline.partition.spec import TOKEN_CLASSIFICATION, ModelSpec
from flower_app.tasks.base import ModelConfig
from flower_app.tasks.data.tables import folded_label
from flower_app.tasks.start import run_to_start_from

_PLACEHOLDER = re.compile(r"LABEL_(\d+)")
"""Name that the transformers library gives a class without a name."""
_END_OF_SPAN = re.compile("[ELMSUW]-", re.IGNORECASE)
"""Mark of a tag that BIO does not have."""


def class_order(
    head: str, model: ModelConfig, labels: Sequence[str], occurring: Collection[str], listed: bool
) -> tuple[str, ...]:
    """Return the names of the classes in the order of the logits that training begins with.

    Parameters
    ----------
    head : what is trained
    model : the ``[model]`` table
    labels : of the data, in the order that a new head has
    occurring : those that the server has seen in the data
    listed : whether ``data.labels`` lists them

    Returns
    -------
    The classes of the head that the model brings, each with its label's name; without such a head, ``labels``.

    Raises
    ------
    ValueError
        If the model has a head of its own, and a label has no class there or its classes are no labels of the task.
    """
    if model.new_head or not (model.pretrained or model.from_):
        return tuple(labels)
    key, start = ("model.from", model.from_) if model.from_ else ("model.pretrained", model.pretrained)
    if model.from_:
        spec = run_to_start_from(model).spec
        classes = labels_of(spec) if spec.head == head else ()
    else:
        try:
            classes = trained_classes(model.pretrained, head)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from error
    if not classes:
        return tuple(labels)
    if head == TOKEN_CLASSIFICATION and (ends := list(filter(_END_OF_SPAN.match, classes))):
        raise ValueError(
            f"{key}: the head of {start} marks the ends of spans, too, {_shown(ends)} (BIOES or BILOU); the tags of "
            "the data are read as O, B-TYPE and I-TYPE; set model.new-head = true to train a new head"
        )
    class_of = _matched(classes, labels, listed and not model.from_)
    absent = [name for name in labels if name not in class_of and (name in occurring or not _spared(name, class_of))]
    if absent and model.from_:
        # Other labels give the model of another run a new head.
        return tuple(labels)
    if absent:
        raise ValueError(
            f"model.pretrained: the head of {model.pretrained} tells {len(classes)} classes apart, {_shown(classes)}; "
            f"the data has {len(labels)} labels, {_shown(absent)} not among them; "
            + (
                "list them in data.labels in the order of its classes, or "
                if unnamed(classes)
                else "rename the labels, or "
            )
            + "set model.new-head = true to train a new head"
        )
    # As the data spells them, where it has them.
    label_of = {number: name for name, number in class_of.items()}
    return tuple(label_of.get(number, name) for number, name in enumerate(classes))


def unnamed(classes: Sequence[str]) -> bool:
    """Return whether no class of a trained head has a name of its own."""
    return bool(classes) and all(map(_PLACEHOLDER.fullmatch, classes))


def numbered(classes: Sequence[str], labels: Sequence[str]) -> dict[str, int]:
    """Return the class of each label where all labels are numbers of classes; nothing where one is none."""
    numbers = {name: int(name) if name.isdecimal() else -1 for name in labels}
    return numbers if all(0 <= number < len(classes) for number in numbers.values()) else {}


def _spared(tag: str, class_of: Collection[str]) -> bool:
    """Return whether a tag that does not occur needs no class: its type's other mark has one."""
    return tag[:2] in ("B-", "I-") and {"B": "I", "I": "B"}[tag[0]] + tag[1:] in class_of


def _matched(classes: Sequence[str], labels: Sequence[str], listed: bool) -> dict[str, int]:
    """Return the class of each label that has one: of equal name, else of equal name but for upper and lower case."""
    if unnamed(classes):
        if listed and len(labels) == len(classes) and not set(labels) & set(classes):
            return {name: number for number, name in enumerate(labels)}
        if numbers := numbered(classes, labels):
            return numbers
    class_of = {name: classes.index(name) for name in labels if classes.count(name) == 1}
    folded, keys = list(map(folded_label, classes)), list(map(folded_label, labels))
    for name, key in zip(labels, keys, strict=True):
        if name not in class_of and folded.count(key) == 1 == keys.count(key):
            class_of[name] = folded.index(key)
    return class_of


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def labels_of(spec: ModelSpec) -> tuple[str, ...]:
    """Names of a model's classes, in the order of its logits."""
    names = spec.config["id2label"]
    return tuple(names[str(i)] for i in range(len(names)))
