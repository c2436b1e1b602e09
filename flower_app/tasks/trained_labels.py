"""Labels of the data and classes of the head that a run starts from, matched by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from client_pipeline.families.pretrained import trained_classes
from client_pipeline.partition.spec import ModelSpec
from flower_app.tasks.base import ModelConfig
from flower_app.tasks.start import run_to_start_from

_PLACEHOLDER = re.compile(r"LABEL_(\d+)")
"""Name that the transformers library gives a class without a name."""


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
        If the model has a head of its own, and a label has no class there.
    """
    if model.new_head or not (model.pretrained or model.from_):
        return tuple(labels)
    if model.from_:
        spec = run_to_start_from(model).spec
        classes = labels_of(spec) if spec.head == head else ()
        class_of = _matched(classes, labels, listed=False)
        # Other labels give the model of another run a new head.
        return _named(classes, class_of) if len(class_of) == len(labels) else tuple(labels)
    try:
        classes = trained_classes(model.pretrained, head)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"model.pretrained: {error}") from error
    if not classes:
        return tuple(labels)
    class_of = _matched(classes, labels, listed)
    # An I- tag of a type that the data never continues needs no class.
    absent = [name for name in labels if name not in class_of and (name in occurring or not name.startswith("I-"))]
    if absent:
        unnamed = all(map(_PLACEHOLDER.fullmatch, classes))
        raise ValueError(
            f"model.pretrained: the head of {model.pretrained} tells {len(classes)} classes apart, {_shown(classes)}; "
            f"the data has {len(labels)} labels, {_shown(absent)} not among them; "
            + ("list them in data.labels in the order of its classes, or " if unnamed else "rename the labels, or ")
            + "set model.new-head = true to train a new head"
        )
    return _named(classes, class_of)


def _named(classes: Sequence[str], class_of: Mapping[str, int]) -> tuple[str, ...]:
    """Return the classes' names, as the data spells them where it has them."""
    label_of = {number: name for name, number in class_of.items()}
    return tuple(label_of.get(number, name) for number, name in enumerate(classes))


def _matched(classes: Sequence[str], labels: Sequence[str], listed: bool) -> dict[str, int]:
    """Return the class of each label that has one: of equal name, else of equal name but for upper and lower case."""
    if classes and all(map(_PLACEHOLDER.fullmatch, classes)):
        if listed and len(labels) == len(classes) and not set(labels) & set(classes):
            return {name: number for number, name in enumerate(labels)}
        numbers = {name: int(name) if name.isdecimal() else -1 for name in labels}
        if all(0 <= number < len(classes) for number in numbers.values()):
            return numbers
    class_of = {name: classes.index(name) for name in labels if classes.count(name) == 1}
    folded = [name.strip().casefold() for name in classes]
    for name in labels:
        key = name.strip().casefold()
        rivals = [other for other in labels if other.strip().casefold() == key]
        if name not in class_of and folded.count(key) == 1 and len(rivals) == 1:
            class_of[name] = folded.index(key)
    return class_of


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def labels_of(spec: ModelSpec) -> tuple[str, ...]:
    """Names of a model's classes, in the order of its logits."""
    names = spec.config["id2label"]
    return tuple(names[str(i)] for i in range(len(names)))
