"""A figure has a source: rows that are kept, or a word that none are."""

import csv
import json
import re
import statistics

import pytest

from helpers.repository import ROOT

DOCS = ROOT / "docs"
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
MEASURED = (DOCS / "measured.md").read_text(encoding="utf-8")
NO_ROWS = "No rows are kept of this"
WITHOUT_ROWS = {
    "Memory of one device",
    "Eight clusters of six devices",
}
"""Sections whose figures were measured once and not kept. None may join them."""
PLANNING = (DOCS / "planning.md").read_text(encoding="utf-8")
ONE_RUN = "one run; no rows are kept"
DEFINITIONS = {"what it is", "what it does", "what it does, and costs", "network", "file"}
"""Columns of tables that define words, and show no figures."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")


def sections():
    """Each section's title and text; one of the third level has the text of the second above it, too."""
    above = ""
    for text in re.split(r"^(?=###? )", RESULTS, flags=re.MULTILINE)[1:]:
        marks, title = re.match(r"(#+) (.*)", text).groups()
        above = text if marks == "##" else above
        yield title, text if marks == "##" else above + text


def kept_sources(text):
    """Paths of kept rows that a text names."""
    named = [f"docs/results/{name}" for name in re.findall(r"collapipe reproduce ([\w-]+)", text)]
    named += re.findall(r"docs/results/[\w./-]*\w", text)
    return [path for path in named if (ROOT / path).exists()]


def is_sourced(text):
    """Whether a text names kept rows, or says that there are none."""
    return bool(kept_sources(text)) or ONE_RUN in text


def shows_figures(title, text):
    section = text[text.index(title) + len(title) :]
    return bool(re.search(r"^\| .*\d", section, re.MULTILINE) or re.search(r"\*\*\d|\d (?:s|MB|GB|%)", section))


def test_every_section_with_figures_names_rows_that_are_kept_or_says_that_none_are():
    unsourced = [
        title
        for title, text in sections()
        if shows_figures(title, text) and not kept_sources(text) and NO_ROWS not in text
    ]
    assert unsourced == []


def test_no_section_joins_those_without_rows():
    without_rows = {title for title, text in sections() if NO_ROWS in text and not title.startswith("`")}
    assert without_rows == WITHOUT_ROWS


def table_rows(page):
    """Rows of a page's tables, without their heads."""
    return [
        line
        for line in re.findall(r"^\|.*\|$", re.sub(r"^\|.*\n\| ---.*\n", "", page, flags=re.MULTILINE), re.MULTILINE)
    ]


def test_every_measured_row_names_rows_that_are_kept_or_says_that_none_are():
    rows = table_rows(MEASURED)
    assert len(rows) >= 20
    named = [row.replace("| the same |", rows[i - 1]) for i, row in enumerate(rows)]
    assert [row for row in named if not is_sourced(row)] == []


def planning_tables():
    """By head of a table of figures on the page of planning: the table, with its section up to there."""
    for section in re.split(r"^(?=##+ )", PLANNING, flags=re.MULTILINE):
        for head in re.finditer(r"^(\|.*\|)\n\| ---", section, re.MULTILINE):
            columns = {cell.strip() for cell in head[1].strip("|").split(" | ")}
            if not columns & DEFINITIONS and "what it is" not in head[1]:
                yield head[1], section[: head.start()]


def test_every_table_of_figures_on_the_planning_page_names_its_rows():
    tables = list(planning_tables())
    assert len(tables) >= 6
    assert [head for head, above in tables if not is_sourced(above.split("\n|")[-1])] == []


def test_figures_of_the_planning_page_are_those_of_the_rows():
    """Means over the networks, as ``planner_decisions.py`` tells them."""
    with (DOCS / "results/planner-decisions/results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def mean(question, scenario, setting, column, digits):
        values = [
            float(r[column])
            for r in rows
            if (r["question"], r["scenario"], r["setting"]) == (question, scenario, setting)
        ]
        return f"{statistics.mean(values):.{digits}f}"

    for price in ("0", "0.1", "1", "3"):
        pairs = [
            f"{mean('price', name, price, 'latency_s', 1)}, {mean('price', name, price, 'energy_j', 0)}"
            for name in ("table2", "table2-contended")
        ]
        assert f"| {price} | {pairs[0]} | {pairs[1]} |" in PLANNING
    for name, setting in (("table2", "Y = 0"), ("table2", "queues"), ("physical", "queues")):
        objectives = [mean("bandwidth", name, f"{how}, {setting}", "objective", 2) for how in ("channels", "split")]
        assert f"| {objectives[0]} | {objectives[1]} |" in PLANNING
    for name in ("table2", "table2-activations", "table2-bert", "table2-bert-activations"):
        assert f"{mean('activations', name, '', 'latency_s', 0)} s" in PLANNING


def told_by(name):
    """All numbers of an experiment's findings."""
    findings = json.loads((DOCS / "results" / name / "findings.json").read_text(encoding="utf-8"))
    return [float(number) for f in findings for key in ("ours", "why") for number in NUMBER.findall(f[key])]


def is_reported(number, numbers):
    """Whether a number is among others, to its own digits."""
    digits = len(number.partition(".")[2])
    return any(abs(abs(float(number)) - round(abs(value), digits)) < 1e-9 for value in numbers)


ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in MEASURED.splitlines()
    if re.match(r"\| .* \| `collapipe reproduce [\w-]+` \| ", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].split()[-1].strip("`"))
def test_every_figure_of_a_measured_row_is_in_its_findings(row):
    numbers = told_by(row[1].split()[-1].strip("`"))
    # S = 6 is not in the paper, so in no finding; labels such as V = 0.1 and S = 3 are no figures.
    cell = re.sub(r"\b[SV] = \d+(?:\.\d+)?", "", re.sub(r"; S = 6.*$", "", row[2]))
    figures = NUMBER.findall(cell)
    assert len(figures) >= 3
    assert [figure for figure in figures if not is_reported(figure, numbers)] == []


def test_the_check_finds_a_figure_without_source():
    assert is_reported("73", [72.9]) and is_reported("-1.1", [1.1, 2.0])
    assert not is_reported("73.5", [72.9]) and not is_reported("7", [72.9])
    assert not kept_sources("`collapipe reproduce nothing` and docs/results/nowhere.json")
    assert shows_figures("A", "## A\n\n| a | 3 s |\n") and not shows_figures("A 3 s", "## A 3 s\n\nwords\n")
