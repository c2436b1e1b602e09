"""Token classification: words in, a BIO tag for each out; span F1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import TOKEN_CLASSIFICATION
from flower_app.tasks.data.corpus import INPUTS, LABELS, DataConfig, file_of, listed
from flower_app.tasks.data.tables import one_spelling
from flower_app.tasks.data.texts import blank_separated, ending, lines, shards
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.generated.generated_labels import KINDS, tagged
from flower_app.tasks.labelled import Examples, LabelledData, load_table
from flower_app.tasks.labelled_task import LabelledTask
from flower_app.tasks.tokenizer import TextTokenizer

OUTSIDE = "O"
BIO_MARKS = {"B": "B", "I": "I", "E": "I", "L": "I", "M": "I", "S": "B", "U": "B", "W": "B"}
"""Mark of a tag in BIO, BIOES, BILOU or BMES -> the same in BIO."""
CONLL_U = ".conllu"
CONLL = (".conll", ".bio", ".txt", CONLL_U)


class TaggingTask(LabelledTask[list[str]]):
    """Words and tags from CoNLL files, from tables (columns ``tokens`` and ``tags``) or the hub.

    A tag is ``O``, ``B-TYPE`` or ``I-TYPE``, and those of BIOES, BILOU and BMES are read as such. ``data.labels`` lists
    the types. The tag of a word stands on its first piece, the other pieces have no loss. An ``I-`` that continues
    nothing begins a span, as in seqeval's default.
    """

    name = "token-classification"
    head = TOKEN_CLASSIFICATION
    scored = "spans"
    scores = ("loss", "f1", "precision", "recall", "accuracy")

    def read(self, data: DataConfig, split: str, cluster: int | None) -> Examples[list[str]]:
        """Read sentences; a broken line, an empty sentence or a tag that is not BIO is an error."""
        if data.source == "files" and ending(file_of(data, split, cluster)[0]) in CONLL:
            path, target, key = file_of(data, split, cluster)
            if target is not None:
                raise ValueError(
                    f"{key.replace('-source', '-target')}: {path} has its tags beside its words; leave it empty"
                )
            return read_conll(path, data, key)
        table = load_table(data, split, cluster, "tokens", "tags")
        words, tags = [], []
        for row, (tokens, labels) in enumerate(zip(table.columns[INPUTS], table.columns[LABELS], strict=True)):
            place = table.place(row)
            words.append(_texts(tokens, f"{INPUTS}: {place}"))
            tags.append([table.class_name(LABELS, value, place) for value in _list(labels, f"{LABELS}: {place}")])
            if len(words[-1]) != len(tags[-1]):
                raise ValueError(f"{LABELS}: {place}: {len(words[-1])} tokens have {len(tags[-1])} tags")
            tags[-1] = [bio_tag(tag, f"{LABELS}: {place}") for tag in tags[-1]]
        declared = tuple(table.class_names.get(LABELS, ()))
        tags = _with_one_spelling(tags, listed(data))
        return Examples(words, tags, list(map(main_type, tags)), lambda row, _: table.place(row), declared)

    def generate(self, number: int, split: str, seed: int) -> Examples[list[str]]:
        """Generate sentences, with their noun phrases tagged."""
        drawn = tagged(number, split, seed)
        words, tags = [w for w, _ in drawn], [t for _, t in drawn]
        place = "generated sentence {}".format
        return Examples(words, tags, list(map(main_type, tags)), lambda row, _: place(row), self.label_names(KINDS))

    def kinds(self, names: Iterable[str]) -> set[str]:
        """Return the types of spans of these tags."""
        return {name[2:] for name in names if name != OUTSIDE}

    def label_names(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Return ``O``, and for each type ``B-`` and ``I-``, whether or not both occur in training."""
        if not kinds:
            raise ValueError("data.labels: expected a type of spans, found none: every tag of the training data is O")
        for kind in kinds:
            if kind == OUTSIDE or kind.startswith(("B-", "I-")):
                raise ValueError(f"data.labels: expected types of spans such as {kind[2:] or 'PER'}, found {kind!r}")
        return (OUTSIDE, *(f"{mark}-{kind}" for kind in kinds for mark in "BI"))

    def parts_of(self, value: list[str]) -> list[str]:
        """Return words, or tags, one by one."""
        return value

    def join(self, inputs: list[str], names: list[str]) -> list[str]:
        """Return the tags; words that were cut off are outside of every span, so their spans count as missed."""
        return [*names, *[OUTSIDE] * (len(inputs) - len(names))]

    def encode(
        self, inputs: Sequence[list[str]], classes: Sequence[Sequence[int]], tokenizer: TextTokenizer, max_length: int
    ) -> LabelledData:
        """Encode sentences as ``[CLS] pieces [SEP]``; one that is longer is cut."""
        room, cut = max_length - 2, 0
        sequences, labels = [], []
        for (ids, owners), tags in zip(tokenizer.encode_words(inputs), classes, strict=True):
            firsts = [at == 0 or owners[at - 1] != word for at, word in enumerate(owners)]
            marked = [tags[word] if first else IGNORED_LABEL for word, first in zip(owners, firsts, strict=True)]
            sequences.append([tokenizer.bos_id, *ids[:room], tokenizer.eos_id])
            labels.append([IGNORED_LABEL, *marked[:room], IGNORED_LABEL])
            cut += len(ids) > room
        return LabelledData(EncodedText.of(sequences, cut), EncodedText.of(labels, 0), tokenizer.pad_id, True)

    def metrics(self, references: list[list[str]], predictions: list[list[str]]) -> tuple[dict[str, float], str]:
        """Precision, recall and F1 of whole spans, and the accuracy of tags."""
        return span_scores(references, predictions)

    def class_of(self, name: str) -> str:
        """Return the type of a tag."""
        return name if name == OUTSIDE else name[2:]

    def items(self, names: Sequence[str]) -> set[tuple[Hashable, ...]]:
        """Return the spans, each with its type, first and last word."""
        from seqeval.metrics.sequence_labeling import get_entities

        return set(get_entities(list(names)))

    def from_text(self, text: str | list[str], tokenizer: TextTokenizer) -> list[str]:
        """Split a text into words where the tokenizer does; words of a table are what they are."""
        return tokenizer.words(text) if isinstance(text, str) else text

    def to_text(self, inputs: list[str], label: list[str]) -> str:
        """Write ``word/TAG word/TAG ...``."""
        return " ".join(f"{word}/{tag}" for word, tag in zip(inputs, label, strict=True))


def span_scores(references: list[list[str]], predictions: list[list[str]]) -> tuple[dict[str, float], str]:
    """Micro-averaged precision, recall and F1 of spans by seqeval (a span counts if type, start and end agree)."""
    from importlib.metadata import version

    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    # 0 where nothing is found, or nothing is there to be found.
    return {
        "f1": float(f1_score(references, predictions, zero_division=0)),
        "precision": float(precision_score(references, predictions, zero_division=0)),
        "recall": float(recall_score(references, predictions, zero_division=0)),
        "accuracy": float(accuracy_score(references, predictions)),
    }, f"span F1, micro average, default mode, seqeval {version('seqeval')}"


def main_type(tags: Sequence[str]) -> str:
    """Return the type with the most spans in a sentence (of equals the first by name), ``O`` without any.

    ``data.partition`` goes by it.

    >>> main_type(["B-PER", "O", "B-LOC", "I-LOC", "B-LOC"])
    'LOC'
    """
    counts = Counter(tag[2:] for tag in tags if tag.startswith("B-"))
    return min(counts, key=lambda kind: (-counts[kind], kind), default=OUTSIDE)


def bio_tag(tag: str, location: str) -> str:
    """Return a tag of BIO; those of BIOES, BILOU and BMES mark the ends of spans too, and lose nothing.

    >>> [bio_tag(tag, "") for tag in ("O", "S-LOC", "B-PER", "E-PER")]
    ['O', 'B-LOC', 'B-PER', 'I-PER']

    Raises
    ------
    ValueError
        For a tag without such a mark, with the remedy.
    """
    if tag == OUTSIDE:
        return tag
    mark, _, kind = tag.partition("-")
    if mark not in BIO_MARKS or not kind:
        raise ValueError(
            f"{location}: expected a tag O, B-TYPE or I-TYPE, found {tag!r}; write B-{tag} for a word that is a span "
            f"of its own, such as a part of speech, and I-{tag} where words of one type in a row are one span"
        )
    return f"{BIO_MARKS[mark]}-{kind}"


def _with_one_spelling(tags: Iterable[Sequence[str]], kinds: Sequence[str]) -> list[list[str]]:
    """Return the tags of sentences, each type in one spelling: that of ``kinds`` where it is among them."""
    rows = list(tags)
    spelling = one_spelling({tag[2:] for row in rows for tag in row}, kinds)
    return [[tag[:2] + spelling.get(tag[2:], tag[2:]) for tag in row] for row in rows]


def read_conll(path: Path, data: DataConfig, key: str, with_tags: bool = True) -> Examples[list[str]]:
    """Read a CoNLL file, or its shards: a word a line with its tag, blank lines between sentences.

    Columns are cut at tabs, or at blanks where a line has no tab. The word stands in the first column and the tag in
    the last; ``data.source-column`` and ``data.label-column`` may give other numbers, from 0. In CoNLL-U they are the
    second and the fourth; words of several numbers (``1-2``) and of none (``1.1``) are skipped. So are lines that begin
    with ``-DOCSTART-``, and comments: lines that begin with ``#`` and end in no tag.

    Parameters
    ----------
    path : the file
    data : names the columns
    key : what errors begin with
    with_tags : without, a line without a tag is read, too, and the tags are ``O``

    Raises
    ------
    ValueError
        With the line, where a column is missing, a word is empty or a tag is not BIO.
    """
    is_conll_u = ending(path) == CONLL_U
    columns = [1, 3] if is_conll_u else [0, -1]
    for i, (name, setting) in enumerate(((data.source_column, INPUTS), (data.label_column, LABELS))):
        if name and not name.isdecimal():
            raise ValueError(
                f"{setting}: the columns of a CoNLL file have no names: expected a number from 0, found {name!r}"
            )
        columns[i] = int(name) if name else columns[i]
    words: list[list[str]] = []
    tags: list[list[str]] = []
    numbers: list[list[int]] = []
    files: list[Path] = []
    for file in shards(path, key):
        rows = ((number, line, _cells(line)) for number, line in enumerate(lines(file, key), 1))
        width = next((len(_cells(line)) for line in lines(file, key) if line.strip() and line[0] not in "#-"), 0)
        begins = True
        for number, line, cells in rows:
            if not cells or line.startswith("-DOCSTART-"):
                begins = True
                continue
            # A line such as ``# id 7``: a word ``#`` has its tag, and as many cells as other words.
            has_tag = len(cells) == width and re.fullmatch(r"O|[A-Z]-\S+", cells[columns[1]].strip())
            if (cells[0].startswith("#") and not has_tag) or (is_conll_u and not cells[0].isdecimal()):
                continue
            location = f"{key}: {file}, line {number}"
            if len(cells) <= max(1 if with_tags else 0, *columns):
                raise ValueError(f"{location}: expected a word and its tag in columns, found {line[:60]!r}")
            word, tag = cells[columns[0]], cells[columns[1]].strip() if with_tags else OUTSIDE
            if not word.strip():
                raise ValueError(f"{location}: expected a word before the tag, found {line[:60]!r}")
            if begins:
                files.append(file)
                for values in (words, tags, numbers):
                    values.append([])
            begins = False
            words[-1].append(word)
            tags[-1].append(bio_tag(tag, location))
            numbers[-1].append(number)
    if not words:
        raise ValueError(f"{key}: {path} has no sentence; expected a word and its tag on a line")
    tags = _with_one_spelling(tags, listed(data))
    return Examples(
        words, tags, list(map(main_type, tags)), lambda row, word: f"{files[row]}, line {numbers[row][word]}"
    )


def _cells(line: str) -> list[str]:
    """Cut a line at tabs, or at blanks where it has no tab; a blank line has no cell."""
    return (line.split("\t") if "\t" in line else blank_separated(line)) if line.strip() else []


def _list(value: Any, location: str) -> list[Any]:
    """Return a list, or the words of a text between blanks; neither may be empty."""
    tags = blank_separated(value) if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)):
        raise ValueError(f"{location}: expected a list, found {value!r}")
    if not tags:
        raise ValueError(f"{location}: the sentence is empty; remove it")
    return list(tags)


def _texts(value: Any, location: str) -> list[str]:
    words = _list(value, location)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise ValueError(f"{location}: expected words, found {word!r} among them")
    return words
