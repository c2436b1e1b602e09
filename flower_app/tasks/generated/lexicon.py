"""The words of the generated English-German corpus, and how German inflects them."""

from __future__ import annotations

from dataclasses import dataclass

CASES = ("nom", "acc", "dat")
GENDERS = ("m", "f", "n", "pl")
"""Plural counts as a fourth gender: German has one set of plural endings for all three."""


@dataclass(frozen=True)
class Noun:
    """A noun in both languages."""

    singular_en: str
    plural_en: str
    singular: str
    gender: str
    plural: str
    kind: str
    """``male``, ``female`` and ``animal`` act; ``thing`` is acted on; ``place`` is where."""
    weak: bool = False
    """Takes -n or -en in all cases but the nominative singular (der Junge, den Jungen)."""

    def english(self, plural: bool) -> str:
        """Return the English form."""
        return self.plural_en if plural else self.singular_en

    def german(self, plural: bool, case: str) -> str:
        """Return the German form."""
        if not plural:
            oblique = self.weak and case != "nom"
            return self.plural if oblique else self.singular
        return self.plural + "n" if case == "dat" and self.plural[-1] not in "ns" else self.plural


@dataclass(frozen=True)
class Verb:
    """A verb in both languages."""

    base_en: str
    third_en: str
    past_en: str
    infinitive: str
    third: str
    """Third person singular without the separable prefix."""
    participle: str
    pattern: str
    """Objects: ``none``, ``acc``, ``dat`` or ``both`` (dative person, accusative thing); ``clause``: a that-clause."""
    prefix: str = ""
    """Separable prefix, written apart in a main clause (ruft ... an)."""
    auxiliary: str = "haben"

    def german(self, person: str) -> str:
        """Return the finite form without prefix for ``1sg``, ``3sg`` or ``pl``."""
        stem = self.infinitive.removeprefix(self.prefix)
        return {"1sg": stem[:-1], "3sg": self.third, "pl": stem}[person]


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun in both languages."""

    subject_en: str
    object_en: str
    person: str
    nom: str
    acc: str
    dat: str


_NOUNS = """
man men Mann m Männer male
boy boys Junge m Jungen male weak
teacher teachers Lehrer m Lehrer male
farmer farmers Bauer m Bauern male weak
king kings König m Könige male
woman women Frau f Frauen female
queen queens Königin f Königinnen female
daughter daughters Tochter f Töchter female
aunt aunts Tante f Tanten female
dog dogs Hund m Hunde animal
bird birds Vogel m Vögel animal
cat cats Katze f Katzen animal
cow cows Kuh f Kühe animal
horse horses Pferd n Pferde animal
pig pigs Schwein n Schweine animal
table tables Tisch m Tische thing
letter letters Brief m Briefe thing
hat hats Hut m Hüte thing
key keys Schlüssel m Schlüssel thing
apple apples Apfel m Äpfel thing
lamp lamps Lampe f Lampen thing
flower flowers Blume f Blumen thing
cup cups Tasse f Tassen thing
clock clocks Uhr f Uhren thing
book books Buch n Bücher thing
picture pictures Bild n Bilder thing
car cars Auto n Autos thing
boat boats Boot n Boote thing
garden gardens Garten m Gärten place
forest forests Wald m Wälder place
kitchen kitchens Küche f Küchen place
school schools Schule f Schulen place
house houses Haus n Häuser place
room rooms Zimmer n Zimmer place
"""

_VERBS = """
sleep sleeps slept schlafen schläft geschlafen none - haben
work works worked arbeiten arbeitet gearbeitet none - haben
sing sings sang singen singt gesungen none - haben
wait waits waited warten wartet gewartet none - haben
play plays played spielen spielt gespielt none - haben
stay stays stayed bleiben bleibt geblieben none - sein
arrive arrives arrived ankommen kommt angekommen none an sein
see sees saw sehen sieht gesehen acc - haben
find finds found finden findet gefunden acc - haben
love loves loved lieben liebt geliebt acc - haben
seek seeks sought suchen sucht gesucht acc - haben
paint paints painted malen malt gemalt acc - haben
hear hears heard hören hört gehört acc - haben
carry carries carried tragen trägt getragen acc - haben
wash washes washed waschen wäscht gewaschen acc - haben
fetch fetches fetched abholen holt abgeholt acc ab haben
watch watches watched ansehen sieht angesehen acc an haben
help helps helped helfen hilft geholfen dat - haben
thank thanks thanked danken dankt gedankt dat - haben
follow follows followed folgen folgt gefolgt dat - sein
give gives gave geben gibt gegeben both - haben
show shows showed zeigen zeigt gezeigt both - haben
bring brings brought bringen bringt gebracht both - haben
send sends sent schicken schickt geschickt both - haben
say says said sagen sagt gesagt clause - haben
think thinks thought glauben glaubt geglaubt clause - haben
hope hopes hoped hoffen hofft gehofft clause - haben
"""


def _noun(row: str) -> Noun:
    singular_en, plural_en, singular, gender, plural, kind, *weak = row.split()
    return Noun(singular_en, plural_en, singular, gender, plural, kind, bool(weak))


def _verb(row: str) -> Verb:
    base_en, third_en, past_en, infinitive, third, participle, pattern, prefix, auxiliary = row.split()
    return Verb(base_en, third_en, past_en, infinitive, third, participle, pattern, prefix.strip("-"), auxiliary)


NOUNS = tuple(map(_noun, _NOUNS.strip().splitlines()))
VERBS = tuple(map(_verb, _VERBS.strip().splitlines()))

AUXILIARIES = {
    "haben": {"1sg": "habe", "3sg": "hat", "pl": "haben"},
    "sein": {"1sg": "bin", "3sg": "ist", "pl": "sind"},
    "können": {"1sg": "kann", "3sg": "kann", "pl": "können"},
    "müssen": {"1sg": "muss", "3sg": "muss", "pl": "müssen"},
    "sollen": {"1sg": "soll", "3sg": "soll", "pl": "sollen"},
    "werden": {"1sg": "werde", "3sg": "wird", "pl": "werden"},
}
"""Finite forms of the German auxiliaries."""

MODALS = {"can": "können", "must": "müssen", "should": "sollen", "will": "werden"}
"""English modal to German auxiliary; each takes an infinitive at the end of the German clause."""

PRONOUNS = (
    Pronoun("I", "me", "1sg", "ich", "mich", "mir"),
    Pronoun("he", "him", "3sg", "er", "ihn", "ihm"),
    Pronoun("she", "her", "3sg", "sie", "sie", "ihr"),
    Pronoun("we", "us", "pl", "wir", "uns", "uns"),
    Pronoun("they", "them", "pl", "sie", "sie", "ihnen"),
)

ADJECTIVES = {
    "small": "klein",
    "big": "groß",
    "old": "alt",
    "new": "neu",
    "beautiful": "schön",
    "good": "gut",
    "red": "rot",
    "black": "schwarz",
    "white": "weiß",
    "clean": "sauber",
}

TIMES = {
    "today": "heute",
    "now": "jetzt",
    "often": "oft",
    "sometimes": "manchmal",
    "tomorrow": "morgen",
    "soon": "bald",
}
"""Adverbs for the present and the future."""

PAST_TIMES = {"yesterday": "gestern", "then": "dann", "recently": "neulich"}

PREPOSITIONS = {"in": "in", "behind": "hinter", "near": "bei"}
"""All with the dative, as they are used here."""

CONTRACTIONS = {"in dem": "im", "bei dem": "beim"}

NUMBERS = {"two": "zwei", "three": "drei", "many": "viele"}

_ENDINGS = {
    # Endings of "dieser"; "der" below only spells them differently.
    "nom": {"m": "er", "f": "e", "n": "es", "pl": "e"},
    "acc": {"m": "en", "f": "e", "n": "es", "pl": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "pl": "en"},
}

_ARTICLE = {
    "nom": {"m": "der", "f": "die", "n": "das", "pl": "die"},
    "acc": {"m": "den", "f": "die", "n": "das", "pl": "die"},
    "dat": {"m": "dem", "f": "der", "n": "dem", "pl": "den"},
}
"""The definite article; in the nominative and accusative also the relative pronoun."""


def determiner(word: str, case: str, gender: str) -> str:
    """Return the German form of the English determiner ``word`` for a noun of this case and gender."""
    if word == "the":
        return _ARTICLE[case][gender]
    stem = {"a": "ein", "no": "kein", "my": "mein", "this": "dies", "these": "dies", "every": "jed"}[word]
    bare = stem.endswith("ein") and ((case == "nom" and gender in "mn") or (case == "acc" and gender == "n"))
    return stem if bare else stem + _ENDINGS[case][gender]


def adjective(stem: str, word: str, case: str, gender: str) -> str:
    """Return the inflected adjective after the determiner ``word``; empty ``word``: after a number, in the plural."""
    if not word:
        return stem + ("en" if case == "dat" else "e")
    if case == "dat" or gender == "pl" or (case, gender) == ("acc", "m"):
        return stem + "en"
    if word in ("a", "no", "my"):
        return stem + _ENDINGS[case][gender]
    return stem + "e"


def relative_pronoun(case: str, gender: str) -> str:
    """Return the relative pronoun in the nominative or accusative."""
    return _ARTICLE[case][gender]
