"""Examples of the pages really run."""

import re
import subprocess
import sys

import pytest

from helpers.repository import ROOT


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


BLOCKS = {
    f"{page.name} {number}": block
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
}
TAKES_LONG = ("train(", "load_pretrained(", "whole_step(", "# needs: ")
"""Examples that train, load a hub's model, want a package, or have a test of their own below."""


@pytest.mark.parametrize("name", BLOCKS)
def test_code_of_the_pages_compiles_and_what_defines_something_can_be_imported(name):
    code = compile(BLOCKS[name], name, "exec")
    if not any(words in BLOCKS[name] for words in TAKES_LONG):
        exec(code, {"__name__": "page"})


def test_there_is_code_to_check():
    assert len(BLOCKS) >= 12 and sum(any(words in block for words in TAKES_LONG) for block in BLOCKS.values()) <= 6


@pytest.mark.slow
def test_the_example_of_the_library_runs():
    (code,) = (block for block in blocks("python.md", "python") if "uniform_plan" in block)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "Segment(device=0" in result.stdout


def test_the_plan_file_of_the_example_fits_its_format(tmp_path):
    from client_pipeline.partition.plan import read_plans

    (text,) = blocks("guide.md", "json")
    (tmp_path / "plan.json").write_text(text)
    (plan,) = read_plans(tmp_path / "plan.json")
    plan.check(num_blocks=4, batch_size=32, num_devices=6)
