"""The language models of docs/language-models.md fit the boxes of 2 GB that it plans them for, by its own table."""

import re
from dataclasses import replace

import pytest

from client_pipeline.families.hugging_face import sized_config, spec_from_config
from client_pipeline.timetable.schedules import held_at_backward
from flower_app.config.sources import load_config
from flower_app.config.strategy_choice import check_first_round, make_planner
from flower_app.training.network import training_scenario
from helpers.repository import ROOT

SIZES = {
    "smollm2": dict(width=576, num_heads=9, key_value_heads=3, feed_forward=1536, num_layers=30, vocab_size=49152),
    "tinyllama": dict(width=2048, num_heads=32, key_value_heads=4, feed_forward=5632, num_layers=22, vocab_size=32000),
}
COLUMNS = [("smollm2", "float32"), ("smollm2", "int8"), ("tinyllama", "int8")]
BOX_MB = 2000


def page_rows():
    """The rows of the page's table of a device's box, as numbers."""
    text = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    table = text.partition("| on a device's box [MB] |")[2].partition("\n\n")[0]
    cells = [re.findall(r"[^|]+", line) for line in table.splitlines()[2:]]
    return [[int(cell.replace(",", "")) for cell in row[1:4]] for row in cells]


@pytest.mark.slow
@pytest.mark.parametrize("column", range(3), ids=lambda column: " ".join(COLUMNS[column]))
def test_the_plan_of_each_cluster_fits_a_box_with_what_else_is_there(column, tmp_path):
    name, base_dtype = COLUMNS[column]
    sets = ["scenario=two-gb-boxes", "num-clusters=2", f"data.path={tmp_path}", f"model.base-dtype={base_dtype}"]
    config = load_config(name, [*sets, "planner.power-control=exact", "data.tokenizer="])
    sizes = dict(dropout=0.0, max_length=2048, pad_id=0, bos_id=1, eos_id=2, decoder_layers=1)
    spec = spec_from_config(sized_config("llama", **SIZES[name], **sizes), "causal-lm", server_layers=1)
    scenario = training_scenario(config, config.adapted(spec))
    plans = check_first_round(make_planner(replace(config, num_clusters=2), scenario)).plans
    memory = scenario.costs.memory
    blocks, weights, peaks = [], [], []
    for plan in plans:
        segments = plan.segments()
        for stage, segment in enumerate(segments):
            sizes_of_micro_batches = [config.batch_size // plan.m] * plan.m
            moments = held_at_backward(plan.schedule, stage, len(segments), plan.m)
            blocks.append(len(segment.blocks))
            weights.append(blocks[-1] * memory.held_bytes / 1e6)
            peaks.append(memory.stage_peak(blocks[-1], moments, sizes_of_micro_batches) / 1e6)
    imports_mb, store_mb, most, weights_mb, beside_mb, sum_mb = (row[column] for row in page_rows())
    assert (max(blocks), round(max(weights))) == (most, weights_mb)
    assert round(max(peaks)) == weights_mb + beside_mb
    assert max(peaks) <= 1e-6 * min(device.memory for device in scenario.clusters[0])
    assert imports_mb + store_mb + weights_mb + beside_mb == sum_mb < BOX_MB
