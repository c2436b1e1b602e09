"""The table that docs/results.md opens with: each claim has a verdict, a command, and a figure of its findings."""

import json
import re

from helpers.repository import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
VERDICTS = ("reproduced", "refuted", "not comparable", "partly")


def claims():
    opening = RESULTS.split("\n## ")[1]
    assert opening.startswith("What the paper claims")
    rows = [line.strip("|").split(" | ") for line in opening.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_claim_has_a_verdict_and_a_reason():
    assert len(claims()) >= 15
    for claim, verdict, _, command, reason in claims():
        assert verdict.strip("*") in VERDICTS, claim
        assert reason and (command.startswith("`collapipe reproduce ") or verdict.strip("*") == "not comparable"), claim


def test_every_figure_of_a_claim_is_in_the_findings_of_its_command():
    for claim, _, figures, command, _ in claims():
        names = re.findall(r"reproduce ([\w-]+)", command)
        told = []
        for name in names:
            findings = json.loads((ROOT / "docs" / "results" / name / "findings.json").read_text(encoding="utf-8"))
            told += [finding[key] for finding in findings for key in ("ours", "why")]
        for figure in re.findall(r'"(.+?)"', figures):
            assert any(figure in text for text in told), f"{claim}: {figure!r} is in no finding of {names}"
        assert '"' in figures or not names, claim
