"""The report's table of answers."""

import pytest

from flower_app.report.answers_section import answers_section
from flower_app.runs.run_directory import read_answers, write_answers


def asked(answer):
    return [{"question": "1 < 2?", "reference": "yes", "answer": answer}]


def test_answers_before_and_after_stand_beside_what_was_expected(tmp_path):
    write_answers(tmp_path, "before", [])
    assert read_answers(tmp_path) == {} and answers_section({}) == []
    write_answers(tmp_path, "before", asked("no & no"))
    (section,) = answers_section(read_answers(tmp_path))
    assert "<td>1 &lt; 2?</td><td>yes</td><td>no &amp; no</td><td>-</td>" in section
    write_answers(tmp_path, "after", asked("yes"))
    (section,) = answers_section(read_answers(tmp_path), "a", 2)
    assert "<td>yes</td><td>no &amp; no</td><td>yes</td>" in section and 'id="answers-2">a: Answers' in section


@pytest.mark.parametrize("answers", [{"after": [{"question": "a"}]}, {"after": 3}, {"before": ["a"]}])
def test_answers_of_an_unknown_form_are_left_out(answers):
    assert answers_section(answers) == []
