"""Labels for the English sentences of the generated corpus: what a sentence is about, and its spans.

Both follow from rules that no single word gives away. A sentence is about the first noun in it, though most sentences
have a second one. A span ends in a noun and begins with its article, number or adjective, so that the first word's tag
depends on a word further on.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice

from flower_app.tasks.generated.generator import sentences
from flower_app.tasks.generated.lexicon import ADJECTIVES, NOUNS, NUMBERS

KINDS = ("ANIMAL", "PERSON", "PLACE", "THING")
"""Kinds of nouns: the labels of sentences, and the types of spans."""

_OF_NOUN = {"male": "PERSON", "female": "PERSON", "animal": "ANIMAL", "thing": "THING", "place": "PLACE"}
_KIND = {form: _OF_NOUN[noun.kind] for noun in NOUNS for form in (noun.singular_en, noun.plural_en)}
_BEFORE = {"the", "a", "an", "my", "this", "these", "every", "no", *NUMBERS, *ADJECTIVES}


def classified(num_examples: int, split: str, seed: int) -> list[tuple[str, str]]:
    """Return sentences with the kind of their first noun; the same arguments give the same list.

    >>> classified(2, "test", 0)
    [('Two boys hope that my boys waited.', 'PERSON'), ('The cow that can love the letter is old.', 'ANIMAL')]
    """
    return list(_classified(num_examples, split, seed))


@lru_cache(maxsize=4)
def _classified(num_examples: int, split: str, seed: int) -> tuple[tuple[str, str], ...]:
    # A process may hold several clusters, each of which takes its share of the same sentences.
    labelled: list[tuple[str, str]] = []
    source = sentences(split, seed)
    while len(labelled) < num_examples:
        text, _ = next(source)
        kinds = [_KIND[word] for word in _words(text) if word in _KIND]
        if kinds:
            labelled.append((text, kinds[0]))
    return tuple(labelled)


def tagged(num_examples: int, split: str, seed: int) -> list[tuple[list[str], list[str]]]:
    """Return sentences as words with their tags: ``B-`` and ``I-`` of its kind over each noun phrase, else ``O``.

    >>> tagged(1, "test", 0)[0][1]
    ['B-PERSON', 'I-PERSON', 'O', 'O', 'B-PERSON', 'I-PERSON', 'O', 'O']
    """
    return [_tag(_words(text, keep_case=True)) for text in _texts(num_examples, split, seed)]


@lru_cache(maxsize=4)
def _texts(num_examples: int, split: str, seed: int) -> tuple[str, ...]:
    return tuple(text for text, _ in islice(sentences(split, seed), num_examples))


def _words(text: str, keep_case: bool = False) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text if keep_case else text.lower())


def _tag(words: list[str]) -> tuple[list[str], list[str]]:
    tags = ["O"] * len(words)
    for at, word in enumerate(words):
        kind = _KIND.get(word.lower())
        if kind:
            start = at
            while start and tags[start - 1] == "O" and words[start - 1].lower() in _BEFORE:
                start -= 1
            tags[start : at + 1] = [f"B-{kind}"] + [f"I-{kind}"] * (at - start)
    return words, tags
