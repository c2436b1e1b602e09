"""The true dictionary of the generated corpus: what a word-by-word translation would look words up in."""

from __future__ import annotations

from flower_app.tasks.lexicon import (
    ADJECTIVES,
    AUXILIARIES,
    CASES,
    GENDERS,
    MODALS,
    NOUNS,
    NUMBERS,
    PAST_TIMES,
    PREPOSITIONS,
    PRONOUNS,
    TIMES,
    VERBS,
    determiner,
)


def dictionary() -> dict[str, tuple[str, ...]]:
    """Return every English word (lower case) with all its German forms, the citation form first.

    A German word that English has no word for is nowhere; an English word without counterpart ("does") has ``("",)``.
    """
    entries: dict[str, tuple[str, ...]] = dict.fromkeys(("do", "does", "did"), ("",))
    for word in ("the", "a", "no", "my", "this", "these", "every"):
        entries[word] = tuple(determiner(word, case, gender) for case in CASES for gender in GENDERS)
    entries |= {"an": entries["a"], "not": ("nicht",), "it": ("es", "er", "sie"), "because": ("weil",)}
    entries["that"] = ("dass", "der", "die", "das", "den")
    for noun in NOUNS:
        for plural in (False, True):
            entries[noun.english(plural)] = tuple(noun.german(plural, case) for case in CASES)
    for verb in VERBS:
        joined = verb.prefix + verb.german("pl")
        entries[verb.base_en] = (verb.infinitive, verb.german("pl"), verb.german("1sg"), joined)
        entries[verb.third_en] = (verb.german("3sg"), verb.prefix + verb.german("3sg"))
        entries[verb.past_en] = (verb.participle,)
    for en, de in MODALS.items():
        entries[en] = (AUXILIARIES[de]["3sg"], *AUXILIARIES[de].values())
    for person, en in (("1sg", "am"), ("3sg", "is"), ("pl", "are")):
        entries[en] = (AUXILIARIES["sein"][person],)
    for p in PRONOUNS:
        entries[p.subject_en.lower()] = (p.nom,)
        entries[p.object_en] = (p.acc, p.dat)
    for en, de in ADJECTIVES.items():
        entries[en] = (de, *(de + ending for ending in ("e", "en", "er", "es")))
    for en, de in (TIMES | PAST_TIMES | NUMBERS | PREPOSITIONS).items():
        entries[en] = (de,)
    entries["many"] += ("vielen",)
    entries["in"] += ("im",)
    entries["near"] += ("beim",)
    return entries
