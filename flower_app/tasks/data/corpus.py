"""The task's text: where it comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from client_pipeline.least_values import check_least
from flower_app.tasks.data import tables
from flower_app.tasks.data.texts import Indices, Texts, lines, matching_files, subset
from flower_app.tasks.generated import generator

SOURCES = ("generated", "files", "hub")
DATA_SPLITS = (
    "iid",
    "size",
    "linear",
    "square",
    "exponential",
    "dirichlet",
    "pathological",
    "natural-id",
    "files",
    "nodes",
)
OWN_FILES = ("files", "nodes")
"""Partitions in which each cluster reads a training file of its own."""
SPELLED_TOKENS = ("auto", "tokens", "text")
"""Reading of special tokens that a text spells out."""
LENGTH_CLASSES = 5
INPUTS, LABELS = "data.source-column", "data.label-column"
SECOND_TEXTS = "data.pair-column"
"""Keys of columns."""
_TARGETS = "data.target-column"

Classes = Sequence[str] | npt.NDArray[np.int64]
"""Class of each example."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Table ``[data]``: the text, its tokenizer, and its partition over the clusters."""

    source: str = "generated"
    """``generated`` (a small English-German grammar), ``files`` or ``hub``."""
    num_examples: int = 20_000
    """``generated``: number of training pairs."""
    evaluation_examples: int = 500
    """``generated``: number of validation pairs, and of test pairs."""
    path: str = ""
    """``files``: folder of the files below."""
    train_source: str = ""
    """Source sentences, one a line; or, with ``train-target`` empty, one table of pairs: ``.tsv``, ``.csv``,
    ``.jsonl`` or ``.parquet``. Tasks with labels and ``instruction`` take such a table, token-classification a
    ``.conll`` file too; language models a table or a text file. ``*`` stands for the shards of one, as in
    ``data/train-*.parquet``. With ``partition = files`` the name holds ``{cluster}``, which counts from 0."""
    train_target: str = ""
    """Target sentences; line i translates line i of ``train-source``."""
    validation_source: str = ""
    """Scored after a round; empty: the test files."""
    validation_target: str = ""
    test_source: str = ""
    """Scored at the end; empty: the validation files."""
    test_target: str = ""
    source_column: str = ""
    """Column of a table or hub dataset; ``translation.en`` names a key inside a column, a number the column of a
    ``.tsv`` or ``.csv`` without header line, from 0. Empty: ``source``; or what the task calls its input (``text``,
    ``tokens``). ``instruction``: conversations, or the questions of answers in ``target-column``; empty: by the usual
    names (``messages``, ``prompt``, ``instruction``, ...)."""
    pair_column: str = ""
    """Column of a second text, for ``sequence-classification``: the model reads both in the tokenizer's pair form, with
    its token types, and the longer one is cut first. Empty: a single text. ``instruction``: what a question is about,
    written behind it."""
    target_column: str = "target"
    hub_id: str = ""
    """``hub``: dataset id, or a local dataset folder, as ``datasets`` takes it."""
    hub_config: str = ""
    """``hub``: name of the dataset's configuration; empty: its default."""
    train_split: str = "train"
    """``hub``: name of the split."""
    validation_split: str = "validation"
    test_split: str = "test"
    partition: str = "iid"
    """Split of the training text. At random: ``iid`` (evenly), ``size`` (by ``partition-sizes``), or in proportion to
    n + 1 (``linear``), its square (``square``) or e^n (``exponential``) for cluster n from 0. By class, see
    ``label-column``: ``dirichlet`` (each class falls unevenly on the clusters), ``pathological`` (each cluster has few
    classes), ``natural-id`` (each class is on one cluster). ``files``: one training file per cluster. ``nodes``: the
    same, and only the cluster's own node reads it: the server needs a ready tokenizer, and the list of labels."""
    partition_sizes: str = ""
    """``size``: a number for each cluster, with commas between; the shares are in proportion to them."""
    dirichlet_alpha: float = 0.5
    """``dirichlet``: small is uneven, large is even."""
    classes_per_cluster: int = 2
    """``pathological``: classes of each cluster."""
    label_column: str = ""
    """Column of a table or hub dataset with each example's label. Of tasks with labels: what is learned; empty:
    ``label``, or ``tags``. Of translation and plain text: the class that ``partition`` goes by (a domain, say); empty:
    the length of the text, in five classes of equal size."""
    labels: str = ""
    """Labels that may stand in ``label-column``, with commas between (token-classification: the types of its spans);
    empty: those of the training data."""
    max_length: int = 128
    """Longest sequence in tokens, marks of beginning and end included; the rest is cut off and counted. Language models
    lose nothing: there a longer text goes on in the next sequence. ``instruction`` keeps whole turns; a conversation
    whose first answer does not fit is refused."""
    packing: bool = False
    """``instruction``: put several conversations into one training sequence of at most ``max-length`` tokens; they do
    not see each other. ``batch-size`` counts sequences then. The model is tried before the run, and refused if its
    conversations would mix (recurrent models, GPT-OSS, OPT, Bloom)."""
    pretokenized: bool = False
    """The text is tokenised already: words are kept as they stand between blanks, and BLEU takes them as tokens."""
    lowercase: bool = False
    """A WordPiece tokenizer that is trained folds case; accents, tone and vowel marks stay. A saved model keeps the
    tokenizer that it was trained with."""
    tokenizer: str = ""
    """Folder or hub id of a tokenizer; empty: that of ``model.pretrained``, or else one that is trained on the training
    text (joint byte-level BPE for translation, WordPiece for tasks with labels)."""
    vocab_size: int = 8_000
    """Largest vocabulary of a trained tokenizer."""
    special_tokens: str = "auto"
    """Special tokens of the tokenizer that a text spells out, such as ``<|im_start|>``: ``tokens``, what they say, as
    in a chat template; ``text``, characters like others, for text of strangers. ``auto``: tokens for language models
    with a tokenizer that is not trained here, else text. ``predict`` reads its texts in the same way. ``instruction``:
    ``text`` refuses a message that spells one."""

    def __post_init__(self) -> None:
        """Refuse what cannot be loaded, before any file is opened."""
        if self.source not in SOURCES:
            raise ValueError(f"data.source: expected one of {', '.join(SOURCES)}, found {self.source!r}")
        if self.partition not in DATA_SPLITS:
            raise ValueError(f"data.partition: expected one of {', '.join(DATA_SPLITS)}, found {self.partition!r}")
        check_least("data.", self, num_examples=1, evaluation_examples=1, classes_per_cluster=1)
        check_least("data.", self, max_length=2, vocab_size=300)
        if not (math.isfinite(self.dirichlet_alpha) and self.dirichlet_alpha > 0):
            raise ValueError(f"data.dirichlet-alpha: expected a number above 0, found {self.dirichlet_alpha}")
        if self.special_tokens not in SPELLED_TOKENS:
            raise ValueError(
                f"data.special-tokens: expected one of {', '.join(SPELLED_TOKENS)}, found {self.special_tokens!r}"
            )
        if self.source == "files" and not self.train_source:
            raise ValueError("data.train-source: expected a file name with data.source = files, found none")
        if self.source == "hub" and not self.hub_id:
            raise ValueError("data.hub-id: expected a dataset id or folder with data.source = hub, found none")
        if self.source == "files" and not (self.validation_source or self.test_source):
            raise ValueError(
                "data.validation-source: expected a file name (or data.test-source), found none; "
                "a run is scored on text that it does not train on"
            )
        if self.partition in OWN_FILES and self.source != "files":
            raise ValueError(f"data.partition = {self.partition} needs data.source = files, found {self.source!r}")
        if self.partition == "files":
            for name in ("train_source", "train_target"):
                value = getattr(self, name)
                if value and "{cluster}" not in value:
                    raise ValueError(
                        f"data.{name.replace('_', '-')}: expected a name with {{cluster}} in it with "
                        f"data.partition = files, found {value!r}"
                    )
        if self.partition == "size" or self.partition_sizes:
            self.sizes()
        for key, column in (("label", self.label_column), ("pair", self.pair_column)):
            if column and self.source == "generated":
                raise ValueError(f"data.{key}-column: generated text has no columns; leave it empty")

    def sizes(self) -> list[float]:
        """Return ``partition-sizes`` as numbers."""
        try:
            shares = [float(number) for number in self.partition_sizes.split(",")]
        except ValueError:
            shares = []
        if not shares or not all(math.isfinite(number) and number > 0 for number in shares):
            raise ValueError(
                f"data.partition-sizes: expected numbers above 0 with commas between, such as 3, 1, found "
                f"{self.partition_sizes!r}"
            )
        return shares


@dataclass(frozen=True)
class Pairs:
    """Parallel text."""

    sources: Sequence[str]
    targets: Sequence[str]
    labels: Sequence[str] | None = None
    """The label column, where one is configured."""

    def __len__(self) -> int:
        return len(self.sources)

    def classes(self) -> Classes:
        """Return each pair's class: the label column, or the source length in classes of like size."""
        return length_classes(self.sources) if self.labels is None else self.labels

    def subset(self, indices: Indices) -> Pairs:
        """Return some of the pairs."""
        labels = None if self.labels is None else subset(self.labels, indices)
        return Pairs(subset(self.sources, indices), subset(self.targets, indices), labels)


def length_classes(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the class of each text's length in words, of :data:`LENGTH_CLASSES` classes of like size."""
    lengths = np.fromiter((len(text.split()) for text in texts), dtype=np.int64, count=len(texts))
    borders = np.quantile(lengths, np.linspace(0, 1, LENGTH_CLASSES + 1)[1:-1])
    return np.searchsorted(borders, lengths)


GENERATED_EVALUATION_SEED = 0
"""Validation and test text of the grammar does not depend on the run's seed, so that runs can be compared."""


def load_pairs(config: DataConfig, split: str, seed: int, cluster: int | None = None) -> Pairs:
    """Load one split.

    Parameters
    ----------
    config : where the text is
    split : ``train``, ``validation`` or ``test``; of the last two, one stands for the other where that is missing
    seed : of the run; generated training text depends on it
    cluster : with ``partition = files``, whose training file

    Raises
    ------
    ValueError
        For a missing or empty file, parallel files of unequal length, a missing column, an empty sentence, a label
        outside the list. The message names the key and the file, and the line where there is one.
    """
    if config.source == "generated":
        number = config.num_examples if split == "train" else config.evaluation_examples
        drawn = generator.generate(number, split, seed if split == "train" else GENERATED_EVALUATION_SEED)
        return Pairs([source for source, _ in drawn], [target for _, target in drawn])
    if config.source == "hub":
        return _pairs(config, hub_table(config, split, _columns(config, split)))
    return _from_files(config, split, cluster)


def listed(data: DataConfig) -> tuple[str, ...]:
    """Return what ``data.labels`` lists; nothing where it is empty."""
    if not data.labels.strip():
        return ()
    names = tuple(name.strip() for name in data.labels.split(","))
    if double := [name for name, number in Counter(names).items() if number > 1 or not name]:
        raise ValueError(
            f"data.labels: expected distinct names with commas between, found {double[0]!r} in {data.labels!r}"
        )
    return names


def read_labels(config: DataConfig, table: tables.Table) -> Sequence[str] | None:
    """Read the label column that ``data.partition`` goes by; None: none was asked for.

    Raises
    ------
    ValueError
        For a label that is empty, or is not one of ``data.labels``, with its place.
    """
    if LABELS not in table.columns:
        return None
    allowed_labels = listed(config)

    def checked() -> Iterator[str]:
        for row, label in enumerate(table.labels(LABELS, allowed_labels)):
            if allowed_labels and label not in allowed_labels:
                raise ValueError(
                    f"data.labels: {table.place(row)}: found the label {label!r} in column {config.label_column!r}, "
                    f"expected one of {', '.join(allowed_labels)}"
                )
            yield label

    return Texts(checked())


def count_files(config: DataConfig) -> int:
    """Return for how many clusters, counted from 0, ``partition = files`` has a training file."""
    number = 0
    while matching_files(Path(config.path) / config.train_source.replace("{cluster}", str(number))):
        number += 1
    return number


def file_of(config: DataConfig, split: str, cluster: int | None) -> tuple[Path, Path | None, str]:
    """Return source file and target file (None: there is none) of a split, and the configuration key of the first."""
    if split != "train" and not getattr(config, f"{split}_source"):
        split = "test" if split == "validation" else "validation"
    source, target = (getattr(config, f"{split}_{key}") for key in ("source", "target"))
    if split == "train" and cluster is not None:
        source, target = (name.replace("{cluster}", str(cluster)) for name in (source, target))
    folder = Path(config.path)
    return folder / source, folder / target if target else None, f"data.{split}-source"


def hub_table(config: DataConfig, split: str, columns: Mapping[str, str]) -> tables.Table:
    """Read columns of a split of a hub dataset; of validation and test, one stands for the other if that is missing."""
    dataset = tables.read_hub(config.hub_id, config.hub_config)
    name = getattr(config, f"{split}_split")
    if split != "train" and name not in dataset:
        name = config.test_split if split == "validation" else config.validation_split
    if name not in dataset:
        raise ValueError(
            f"data.{split}-split: {config.hub_id} has no split {name!r}, found {', '.join(map(str, dataset))}"
        )
    return tables.columns_of(dataset[name], columns, "data.hub-id", f"{config.hub_id}, split {name}")


def _from_files(config: DataConfig, split: str, cluster: int | None) -> Pairs:
    source, target, key = file_of(config, split, cluster)
    if target is None:
        return _pairs(config, tables.read_table(source, _columns(config, split), key))
    sources, targets = (
        Texts(_sentences(lines(path, file_key), f"{file_key}: {path}, line {{}}".format))
        for path, file_key in ((source, key), (target, key.replace("-source", "-target")))
    )
    if len(sources) != len(targets):
        raise ValueError(
            f"{key}: {source} has {len(sources)} lines, {target} has {len(targets)}; "
            "line i of one must translate line i of the other"
        )
    if config.label_column and split == "train":
        raise ValueError(
            "data.label-column: parallel text files have no columns; use one table (.tsv, .jsonl, .parquet)"
        )
    return Pairs(sources, targets)


def _columns(config: DataConfig, split: str) -> dict[str, str]:
    columns = {INPUTS: config.source_column or "source", _TARGETS: config.target_column}
    # Only training text is shared out.
    return columns | ({LABELS: config.label_column} if config.label_column and split == "train" else {})


def _pairs(config: DataConfig, table: tables.Table) -> Pairs:
    def texts(key: str) -> Texts:
        return Texts(_sentences(table.texts(key), lambda number: f"{key}: {table.place(number - 1)}"))

    return Pairs(texts(INPUTS), texts(_TARGETS), read_labels(config, table))


def _sentences(sentences: Iterable[str], place: Callable[[int], str]) -> Iterator[str]:
    """Yield stripped sentences; ``place`` says where the one with a number, from 1, stands."""
    empty_line = 0
    for number, text in enumerate(sentences, 1):
        empty_line = empty_line or (0 if text.strip() else number)
        yield text.strip()
    # At the end: a file without any text has a message of its own.
    if empty_line:
        raise ValueError(f"{place(empty_line)}: the sentence is empty; remove the pair from both sides")
