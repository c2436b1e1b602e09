"""Scores of a linear model on the real texts: the floor that the recipes' Transformers are held to.

Logistic regression, fitted once on the training file: of classes on counts of a text's words and pairs of words, or of
characters where a language has no spaces; of names on the characters around each one, two to either side, and their
pairs. Nothing is tuned, and nothing is drawn: the same files give the same figures.

    python benchmarks/linear_floor.py --data FOLDER [--out docs/results/real-text/floors.jsonl]

``FOLDER`` has the folders ``trec6``, ``toutiao`` and ``chinese_ner``, each with its files for ``data.path``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from flower_app.tasks.tagging import span_scores

CLASSES = (("trec6", "test", "word"), ("toutiao", "dev", "char"))
"""Folder, the file that is scored, and what a text is counted in."""
AROUND = 2
"""Characters to either side of the one whose tag is asked for."""


def class_row(folder: Path, part: str, unit: str) -> dict[str, Any]:
    """Accuracy of classes."""
    sets = []
    for name in ("train", part):
        lines = (folder / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        sets.append([line.split("\t", 1) for line in lines])
    (labels, texts), (true_labels, unseen_texts) = (list(zip(*rows, strict=True)) for rows in sets)
    features = CountVectorizer(analyzer=unit, ngram_range=(1, 2), binary=True, token_pattern=r"\S+")
    model = make_pipeline(features, LogisticRegression(max_iter=1000)).fit(texts, labels)
    accuracy = float(model.score(unseen_texts, true_labels))
    return {"scored_on": part, "examples": len(true_labels), "metric": "accuracy", "score": accuracy}


def sentences_of(file: Path) -> list[list[list[str]]]:
    """Sentences of a CoNLL file, each a list of characters with their tags."""
    blocks = file.read_text(encoding="utf-8").split("\n\n")
    return [[line.split() for line in block.splitlines()] for block in blocks if block.strip()]


def windows(characters: list[str]) -> Iterator[dict[str, bool]]:
    """Features of each character of a sentence: those around it, and their pairs, with their places."""
    padded = [""] * AROUND + characters + [""] * AROUND
    for i in range(len(characters)):
        near = padded[i : i + 2 * AROUND + 1]
        yield {f"{k} {one}": True for k, one in enumerate(near)} | {
            f"{k} {one} {two}": True for k, (one, two) in enumerate(zip(near, near[1:], strict=False))
        }


def name_row(folder: Path) -> dict[str, Any]:
    """Span F1 of names."""
    learned, unseen = sentences_of(folder / "train.conll"), sentences_of(folder / "dev.conll")
    rows = [features for sentence in learned for features in windows([pair[0] for pair in sentence])]
    model = make_pipeline(DictVectorizer(), LogisticRegression(max_iter=1000))
    model.fit(rows, [pair[1] for sentence in learned for pair in sentence])
    predictions = [model.predict(list(windows([pair[0] for pair in sentence]))).tolist() for sentence in unseen]
    scores, _ = span_scores([[pair[1] for pair in sentence] for sentence in unseen], predictions)
    return {"scored_on": "dev", "examples": len(unseen), "metric": "span F1", "score": scores["f1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/results/real-text/floors.jsonl"))
    arguments = parser.parse_args()
    rows = []
    for task in ("trec6", "toutiao", "chinese_ner"):
        begun = time.process_time()
        [settings] = [(part, unit) for name, part, unit in CLASSES if name == task] or [None]
        row = name_row(arguments.data / task) if settings is None else class_row(arguments.data / task, *settings)
        rows.append({"task": task, **row, "processor_s": round(time.process_time() - begun, 1)})
        print(f"{task:<12} {row['metric']} {row['score']:.3f} on {row['examples']} examples of {row['scored_on']}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
