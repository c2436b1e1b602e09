"""A self-written corpus: English sentences of a small grammar, and their German translations.

The two sides are built from one meaning, each by its own rules. German asks for what English does not show: gender
and case of determiners and adjectives, the finite verb in second place (so a fronted adverb moves the subject), the
rest of the verb at the end (participles, infinitives, separable prefixes), the whole verb at the end of clauses with
``dass``, ``weil`` or a relative pronoun, ``nicht`` against ``kein``, and pronouns that follow the noun's gender.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, Generic, NamedTuple, TypeVar

from flower_app.tasks.generated.lexicon import (
    ADJECTIVES,
    AUXILIARIES,
    CONTRACTIONS,
    MODALS,
    NOUNS,
    NUMBERS,
    PAST_TIMES,
    PREPOSITIONS,
    PRONOUNS,
    TIMES,
    VERBS,
    Noun,
    Verb,
    adjective,
    determiner,
    relative_pronoun,
)

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
_ACTORS = tuple(noun for noun in NOUNS if noun.kind in ("male", "female", "animal"))
_PERSONS = tuple(noun for noun in NOUNS if noun.kind in ("male", "female"))
_THINGS = tuple(noun for noun in NOUNS if noun.kind == "thing")
_PLACES = tuple(noun for noun in NOUNS if noun.kind == "place")
_BY_PATTERN = {p: tuple(v for v in VERBS if v.pattern == p) for p in ("none", "acc", "dat", "both", "clause")}
_ADJECTIVES, _NUMBERS, _PREPOSITIONS = tuple(ADJECTIVES), tuple(NUMBERS), tuple(PREPOSITIONS)
_TIMES, _PAST_TIMES, _GERMAN_TIMES = tuple(TIMES), tuple(PAST_TIMES), TIMES | PAST_TIMES
_MODES = ("present", "past", *MODALS)
_FEWEST_WORDS = 5
_COPULA_EN = {"1sg": "am", "3sg": "is", "pl": "are"}
_THIRD_PERSON = {"m": ("er", "ihn"), "f": ("sie", "sie"), "n": ("es", "es")}


class _Phrase(NamedTuple):
    """A noun phrase or pronoun in one case."""

    english: str
    german: str
    person: str
    pronoun: bool = False
    noun: Noun | None = None


class _Clause(NamedTuple):
    """One clause, before either language puts it in order. ``verb`` None: a copula with ``predicate``."""

    subject: _Phrase
    verb: Verb | None
    mode: str = "present"
    """``present``, ``past`` or an English modal."""
    dative: _Phrase | None = None
    accusative: _Phrase | None = None
    predicate: str = ""
    negated: bool = False
    time: str = ""
    place: tuple[str, str] = ("", "")

    def english(self, time_first: bool = False, question: bool = False) -> str:
        """Subject, verb, objects, place, time; a question puts an auxiliary first."""
        subject, person = self.subject.english, self.subject.person
        negation = "not" if self.negated else ""
        if self.verb is None:
            helper, main = _COPULA_EN[person], self.predicate
        elif self.mode in MODALS:
            helper, main = self.mode, self.verb.base_en
        elif question or self.negated:
            helper = "did" if self.mode == "past" else "does" if person == "3sg" else "do"
            main = self.verb.base_en
        else:
            third = self.verb.third_en if person == "3sg" else self.verb.base_en
            helper, main = "", self.verb.past_en if self.mode == "past" else third
        head = [helper, subject, negation, main] if question else [subject, helper, negation, main]
        objects = [p.english for p in (self.dative, self.accusative) if p]
        words = [*head, *objects, self.place[0]]
        return _join([self.time, *words] if time_first else [*words, self.time])

    def german(self, order: str, time_first: bool = False) -> str:
        """Verb-second (``main``), verb-first (``question``) or verb-last (``last``)."""
        person = self.subject.person
        tail: list[str]
        if self.verb is None:
            finite, tail = AUXILIARIES["sein"][person], [ADJECTIVES[self.predicate]]
        elif self.mode == "past":
            finite, tail = AUXILIARIES[self.verb.auxiliary][person], [self.verb.participle]
        elif self.mode in MODALS:
            finite, tail = AUXILIARIES[MODALS[self.mode]][person], [self.verb.infinitive]
        elif order == "last":
            finite, tail = self.verb.prefix + self.verb.german(person), []
        else:
            finite, tail = self.verb.german(person), [self.verb.prefix]
        objects = [p for p in (self.dative, self.accusative) if p]
        time = _GERMAN_TIMES.get(self.time, "")
        middle = [
            *(p.german for p in objects if p.pronoun),
            "" if time_first else time,
            *(p.german for p in objects if not p.pronoun),
            "nicht" if self.negated else "",
            self.place[1],
        ]
        if order == "last":
            return _join([self.subject.german, *middle, *tail, finite])
        if order == "question":
            return _join([finite, self.subject.german, *middle, *tail])
        start = [time, finite, self.subject.german] if time_first else [self.subject.german, finite]
        return _join([*start, *middle, *tail])


def _join(words: list[str]) -> str:
    return " ".join(filter(None, words))


class _Weighted(Generic[T]):
    """Options that are drawn as ``random.choices`` draws one of them, but for adding the weights up each time."""

    def __init__(self, options: Sequence[T], weights: Sequence[int]) -> None:
        self._options, self._sums = options, tuple(accumulate(weights))

    def draw(self, rng: random.Random) -> T:
        return self._options[bisect(self._sums, rng.random() * self._sums[-1], 0, len(self._sums) - 1)]


_KINDS = _Weighted(("main", "question", "that", "because", "relative"), (50, 10, 14, 14, 12))
_PATTERNS = _Weighted(("none", "acc", "dat", "both"), (3, 5, 1, 2))
_SHORT_PATTERNS = _Weighted(("none", "acc", "dat"), (3, 5, 1))
_DRAWN_MODES = _Weighted(_MODES, (5, 4, 1, 1, 1, 1))


class _Grammar:
    """Draws sentences; all chance comes from one generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def noun_phrase(self, nouns: tuple[Noun, ...], case: str, negated: bool = False, plain: bool = False) -> _Phrase:
        """Draw determiner, adjective and noun; ``negated`` takes "no", ``plain`` no adjective."""
        noun = self.rng.choice(nouns)
        plural = not negated and self.chance(0.3)
        gender = "pl" if plural else noun.gender
        number = ""
        if negated:
            word = "no"
        elif plural:
            word = self.rng.choice(("the", "the", "my", "these", ""))
            number = "" if word else self.rng.choice(_NUMBERS)
        else:
            word = self.rng.choice(("the", "the", "a", "a", "my", "this", "every"))
        english, german = [number or word], [NUMBERS[number] if number else determiner(word, case, gender)]
        if number == "many" and case == "dat":
            german = ["vielen"]
        if not plain and self.chance(0.3):
            english.append(self.rng.choice(_ADJECTIVES))
            german.append(adjective(ADJECTIVES[english[-1]], word, case, gender))
        english.append(noun.english(plural))
        if word == "a" and english[1][0] in "aeiou":
            english[0] = "an"
        german.append(noun.german(plural, case))
        return _Phrase(_join(english), _join(german), "pl" if plural else "3sg", noun=noun)

    def pronoun(self, case: str, not_person: str = "") -> _Phrase:
        """Draw a personal pronoun, of another person than ``not_person``: no "I see me"."""
        p = self.rng.choice([p for p in PRONOUNS if p.person != not_person])
        return _Phrase(
            p.subject_en if case == "nom" else p.object_en, getattr(p, case), p.person if case == "nom" else "", True
        )

    def subject(self, plain: bool = False) -> _Phrase:
        return self.pronoun("nom") if self.chance(0.25) else self.noun_phrase(_ACTORS, "nom", plain=plain)

    def place(self) -> tuple[str, str]:
        preposition = self.rng.choice(_PREPOSITIONS)
        phrase = self.noun_phrase(_PLACES, "dat", plain=True)
        german = f"{PREPOSITIONS[preposition]} {phrase.german}"
        for long, short in CONTRACTIONS.items():
            german = german.replace(f"{long} ", f"{short} ")
        return f"{preposition} {phrase.english}", german

    def clause(self, short: bool = False, time: bool = True) -> _Clause:
        """Draw a clause with a verb or a copula; ``short`` leaves out what makes it long."""
        subject = self.subject(plain=short)
        if self.chance(0.12):
            adverb = self.rng.choice(_TIMES) if time and self.chance(0.4) else ""
            predicate = self.rng.choice(_ADJECTIVES)
            return _Clause(subject, None, predicate=predicate, negated=self.chance(0.25), time=adverb)
        pattern = (_SHORT_PATTERNS if short else _PATTERNS).draw(self.rng)
        mode = _DRAWN_MODES.draw(self.rng)
        verb, parts = self.rng.choice(_BY_PATTERN[pattern]), dict[str, Any]()
        negated = mode != "must" and self.chance(0.2)
        no_object = negated and pattern in ("acc", "both")
        no_object = no_object and self.chance(0.5)
        if pattern in ("dat", "both"):
            pronoun = self.chance(0.3)
            dative = self.pronoun("dat", subject.person) if pronoun else self.noun_phrase(_PERSONS, "dat", plain=True)
            parts["dative"] = dative
        if pattern in ("acc", "both"):
            if pattern == "acc" and not no_object and self.chance(0.2):
                accusative = self.pronoun("acc", subject.person)
            else:
                accusative = self.noun_phrase(_THINGS, "acc", negated=no_object, plain=short)
            parts["accusative"] = accusative
        if time and self.chance(0.4):
            parts["time"] = self.rng.choice(_PAST_TIMES if mode == "past" else _TIMES)
        if pattern == "none" and not short and self.chance(0.6):
            parts["place"] = self.place()
        return _Clause(subject, verb, mode, negated=negated and not no_object, **parts)

    def sentence(self) -> tuple[str, Callable[[], str]]:
        """Draw one sentence, and what makes its translation; both without capital and full stop."""
        kind = _KINDS.draw(self.rng)
        if kind == "main":
            clause = self.clause()
            first = bool(clause.time) and self.chance(0.6)
            return clause.english(first), lambda: clause.german("main", first)
        if kind == "question":
            clause = self.clause(time=False)
            return clause.english(question=True) + "?", lambda: clause.german("question") + "?"
        if kind == "that":
            main = _Clause(self.subject(plain=True), self.rng.choice(_BY_PATTERN["clause"]))
            clause = self.clause(short=True)
            return (
                f"{main.english()} that {clause.english()}",
                lambda: f"{main.german('main')}, dass {clause.german('last')}",
            )
        if kind == "because":
            return self.because()
        return self.relative()

    def because(self) -> tuple[str, Callable[[], str]]:
        """A reason: about the thing of the main clause ("it" takes the gender of its noun), or about anyone."""
        main = self.clause(short=True, time=False)
        direct_object = main.accusative
        if direct_object and direct_object.noun and direct_object.person == "3sg" and self.chance(0.7):
            it = _Phrase("it", _THIRD_PERSON[direct_object.noun.gender][0], "3sg", True)
            reason = _Clause(it, None, predicate=self.rng.choice(_ADJECTIVES))
        else:
            reason = self.clause(short=True)._replace(subject=self.pronoun("nom"))
        return (
            f"{main.english()} because {reason.english()}",
            lambda: f"{main.german('main')}, weil {reason.german('last')}",
        )

    def relative(self) -> tuple[str, Callable[[], str]]:
        """A noun, a relative clause about it, and a copula."""
        plural = self.chance(0.3)
        person = "pl" if plural else "3sg"
        clause = self.clause(short=True, time=False)
        about_object = clause.accusative is not None and self.chance(0.6)
        noun = self.rng.choice(_THINGS if about_object else _ACTORS)
        gender = "pl" if plural else noun.gender
        case = "acc" if about_object else "nom"
        gap = _Phrase("", "", person)
        clause = clause._replace(accusative=None) if about_object else clause._replace(subject=gap)
        head_en = f"the {noun.english(plural)} that {clause.english()}"

        def german() -> str:
            about = _join([relative_pronoun(case, gender), clause.german("last")])
            head = f"{determiner('the', 'nom', gender)} {noun.german(plural, 'nom')}, {about},"
            return f"{head} {AUXILIARIES['sein'][person]} {ADJECTIVES[predicate]}"

        predicate = self.rng.choice(_ADJECTIVES)
        return f"{head_en} {_COPULA_EN[person]} {predicate}", german


def _written(text: str) -> str:
    """Capital and full stop."""
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def split_of(source: str) -> str:
    """Return the split that a source sentence belongs to, whatever the seed: 5% validation, 5% test."""
    share = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=4).digest(), "big") / 2**32
    return "validation" if share < 0.05 else "test" if share < 0.1 else "train"


def sentences(split: str, seed: int) -> Iterator[tuple[str, str]]:
    """Draw pairs of one split without an end; no pair comes twice.

    Yields
    ------
    Source and target sentence.

    Raises
    ------
    ValueError
        For an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, found {split!r}")
    grammar = _Grammar(random.Random(f"{split}/{seed}"))
    drawn_sentences: set[str] = set()
    while True:
        drawn, translated = grammar.sentence()
        english = _written(drawn)
        if len(english.split()) < _FEWEST_WORDS or split_of(english) != split or english in drawn_sentences:
            continue
        drawn_sentences.add(english)
        # Of a sentence of another split the translation is not made: of the small splits, of 19 in 20 it is not.
        yield english, _written(translated())


def generate(num_examples: int, split: str, seed: int) -> list[tuple[str, str]]:
    """Return ``num_examples`` pairs (English, German); the same arguments give the same list.

    >>> generate(1, "test", 0)
    [('Two boys hope that my boys waited.', 'Zwei Jungen hoffen, dass meine Jungen gewartet haben.')]
    """
    return list(_generated(num_examples, split, seed))


@lru_cache(maxsize=4)
def _generated(num_examples: int, split: str, seed: int) -> tuple[tuple[str, str], ...]:
    # A process may hold several clusters, each of which takes its share of the same sentences.
    return tuple(islice(sentences(split, seed), num_examples))
