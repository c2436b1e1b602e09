"""A figure of the pages is one of rows that are kept, or the page says that none are."""

import csv
import json
import re
import statistics

import pytest

from helpers.repository import ROOT

DOCS = ROOT / "docs"
FIGURES = DOCS / "results"
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
MEASURED = (DOCS / "measured.md").read_text(encoding="utf-8")
VERDICTS = {"reproduced", "refuted", "not comparable", "partly"}
ONE_RUN = "one run; no rows are kept"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")
LABEL = re.compile(r"\b[SVm] = \d+(?:\.\d+)?")


def table_rows(text):
    """Cells of each row of the tables of a text, without their heads."""
    body = re.sub(r"^\|.*\n\| ---.*\n", "", text, flags=re.MULTILINE)
    return [
        [cell.strip() for cell in row.strip("|").split(" | ")] for row in re.findall(r"^\|.*\|$", body, re.MULTILINE)
    ]


def findings(name):
    return json.loads((FIGURES / name / "findings.json").read_text(encoding="utf-8"))


def numbers_of(names):
    texts = [finding[key] for name in names for finding in findings(name) for key in ("what", "ours", "why")]
    return [float(number) for text in texts for number in NUMBER.findall(text)]


def is_reported(number, numbers):
    """Tell whether a number is among others, to its own digits."""
    digits = len(number.partition(".")[2])
    return any(abs(abs(float(number)) - round(abs(value), digits)) < 1e-9 for value in numbers)


CLAIMS = table_rows(RESULTS.partition("## Claims")[2].partition("## Other")[0])


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0])
def test_a_claim_has_a_verdict_and_figures_of_the_findings_that_it_links_to(claim):
    _, verdict, paper, ours, link = claim
    assert verdict.strip("*") in VERDICTS and paper
    names = re.findall(r"\(results/([\w-]+)/README\.md\)", link)
    assert names or verdict == "not comparable"
    if names:
        figures = NUMBER.findall(LABEL.sub("", ours))
        assert figures and [figure for figure in figures if not is_reported(figure, numbers_of(names))] == []


def test_every_claim_and_every_figures_page_is_there():
    assert len(CLAIMS) >= 20
    linked = set(re.findall(r"\(results/([\w-]+)/README\.md\)", RESULTS))
    with_findings = {path.parent.name for path in FIGURES.glob("*/findings.json")}
    assert with_findings <= linked


@pytest.mark.parametrize("page", sorted(FIGURES.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_a_figures_page_is_short_and_its_findings_are_those_of_the_rows(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert re.search(r"\]\([\w.-]+\.(?:jsonl?|csv)\)", text), "it links to no rows"
    if (page.parent / "findings.json").is_file():
        told = {(finding["what"], finding["ours"]) for finding in findings(page.parent.name)}
        shown = [row for row in table_rows(text.partition("| finding |")[2]) if row[0] != "---"]
        assert shown and {(row[0], row[-1]) for row in shown} <= told


def test_every_measured_row_names_rows_that_are_kept_or_says_that_none_are():
    rows = re.findall(r"^\| (?!what |---).*\|$", MEASURED, re.MULTILINE)
    assert len(rows) >= 20
    unsourced = []
    for above, row in zip(["", *rows], rows, strict=False):
        text = row.replace("| the same |", above)
        named = [f"docs/results/{name}" for name in re.findall(r"collapipe reproduce ([\w-]+)", text)]
        named += re.findall(r"docs/results/[\w./-]*\w", text)
        if ONE_RUN not in text and not any((ROOT / path).exists() for path in named):
            unsourced.append(row)
    assert unsourced == []


MEASURED_FIGURES = [row for row in table_rows(MEASURED) if re.fullmatch(r"`collapipe reproduce [\w-]+`", row[1])]


@pytest.mark.parametrize("row", MEASURED_FIGURES, ids=lambda row: row[1].split()[-1].strip("`"))
def test_every_figure_of_a_measured_row_is_in_its_findings(row):
    # S = 6 is not in the paper, so in no finding.
    figures = NUMBER.findall(LABEL.sub("", re.sub(r"; S = 6.*$", "", row[2])))
    assert len(figures) >= 3
    numbers = numbers_of([row[1].split()[-1].strip("`")])
    assert [figure for figure in figures if not is_reported(figure, numbers)] == []


def test_figures_of_the_planners_decisions_are_means_of_the_rows():
    page = (FIGURES / "planner-decisions" / "README.md").read_text(encoding="utf-8")
    with (FIGURES / "planner-decisions" / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def mean(question, scenario, setting, column, digits):
        key = (question, scenario, setting)
        values = [float(r[column]) for r in rows if (r["question"], r["scenario"], r["setting"]) == key]
        return f"{statistics.mean(values):.{digits}f}"

    for price in ("0", "0.1", "1", "3"):
        pairs = [
            f"{mean('price', name, price, 'latency_s', 1)}, {mean('price', name, price, 'energy_j', 0)}"
            for name in ("table2", "table2-contended")
        ]
        assert f"| {price} | {pairs[0]} | {pairs[1]} |" in page
    for name, setting in (("table2", "Y = 0"), ("table2", "queues"), ("physical", "queues")):
        objectives = [mean("bandwidth", name, f"{how}, {setting}", "objective", 2) for how in ("channels", "split")]
        assert f"| {objectives[0]} | {objectives[1]} |" in page
    for name in ("table2", "table2-activations", "table2-bert", "table2-bert-activations"):
        assert f"{mean('activations', name, '', 'latency_s', 0)} s" in page
