"""The task's text: where it comes from, and how it is shared out over the clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCES = ("generated", "files", "hub")
PARTITIONS = ("iid", "dirichlet", "files")


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
    """Source sentences, one a line; or, with ``train-target`` empty, one table of pairs: ``.tsv``, ``.jsonl`` or
    ``.parquet``. With ``partition = files`` the name holds ``{cluster}``, which counts from 0."""
    train_target: str = ""
    """Target sentences; line i translates line i of ``train-source``."""
    validation_source: str = ""
    """Scored after a round; empty: the test files."""
    validation_target: str = ""
    test_source: str = ""
    """Scored at the end; empty: the validation files."""
    test_target: str = ""
    source_column: str = "source"
    """Column of a table or hub dataset; ``translation.en`` names a key inside a column, a number the column of a
    ``.tsv`` without header line, from 0."""
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
    """How training text is shared out: ``iid``; ``dirichlet`` (over five classes of source length, uneven);
    ``files`` (one training file per cluster)."""
    dirichlet_alpha: float = 0.5
    """``dirichlet``: small is uneven, large is even."""
    max_length: int = 128
    """Longest sequence in tokens, end-of-sentence included; the rest is cut off and counted."""
    pretokenized: bool = False
    """The text is tokenised already: words are kept as they stand between blanks, and BLEU takes them as tokens."""
    tokenizer: str = ""
    """Folder or hub id of a tokenizer; empty: train one (joint byte-level BPE) on the training text."""
    vocab_size: int = 8_000
    """Largest vocabulary of a trained tokenizer."""

    def __post_init__(self) -> None:
        """Refuse what cannot be loaded, before any file is opened."""
        if self.source not in SOURCES:
            raise ValueError(f"data.source: expected one of {', '.join(SOURCES)}, found {self.source!r}")
        if self.partition not in PARTITIONS:
            raise ValueError(f"data.partition: expected one of {', '.join(PARTITIONS)}, found {self.partition!r}")
        for name, least in (("num_examples", 1), ("evaluation_examples", 1), ("max_length", 2), ("vocab_size", 300)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"data.{name.replace('_', '-')}: expected at least {least}, found {value}")
        if not (math.isfinite(self.dirichlet_alpha) and self.dirichlet_alpha > 0):
            raise ValueError(f"data.dirichlet-alpha: expected a number above 0, found {self.dirichlet_alpha}")
        if self.source == "files" and not self.train_source:
            raise ValueError("data.train-source: expected a file name with data.source = files, found none")
        if self.source == "hub" and not self.hub_id:
            raise ValueError("data.hub-id: expected a dataset id or folder with data.source = hub, found none")
        if self.source == "files" and not (self.validation_source or self.test_source):
            raise ValueError(
                "data.validation-source: expected a file name (or data.test-source), found none; "
                "a run is scored on text that it does not train on"
            )
        if self.partition == "files":
            if self.source != "files":
                raise ValueError(f"data.partition = files needs data.source = files, found {self.source!r}")
            for name in ("train_source", "train_target"):
                value = getattr(self, name)
                if value and "{cluster}" not in value:
                    raise ValueError(
                        f"data.{name.replace('_', '-')}: expected a name with {{cluster}} in it with "
                        f"data.partition = files, found {value!r}"
                    )
