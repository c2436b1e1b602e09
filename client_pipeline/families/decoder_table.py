"""The table of the library's decoder-only model types: ``python -m client_pipeline.families.decoder_table``.

Each type's default configuration, made small, is cut and compared as before a run, in a process of its own. The rows
stand in ``docs/models.md``; another release of the library may change them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from client_pipeline.families.hugging_face import SERVER_LAYERS, spec_from_config
from client_pipeline.families.proof import cut_reason, slices_difference
from client_pipeline.families.registry import is_decoder_only, nearest_family
from client_pipeline.families.small_copies import first_line
from client_pipeline.partition.spec import CAUSAL_LM

MOST_S = 300.0
"""Time for one type: some default configurations compute their layers token by token [s]."""

BEGIN, END = "<!-- decoder-only model types -->", "<!-- end of the decoder-only model types -->"
"""Lines of the page around the table."""
_HEADING = "| model type | cut | token slices |\n| --- | --- | --- |"
_OTHER_SENSES = ("text_config", "vision_config", "audio_config", "audio_encoder")
"""Parts of a configuration that only models of images and sound have."""
MISSING_SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True},
}
"""Settings that each checkpoint of a type has, and without which the library's model cannot be built."""


class Row(NamedTuple):
    """One model type."""

    model_type: str
    cut: str
    """``splits``, or why not."""
    slices: str = ""
    """``yes`` or ``no``: whether it can be cut into token slices; empty where it does not split."""

    def text(self) -> str:
        """Return the row of the Markdown table."""
        return f"| `{self.model_type}` | {self.cut} | {self.slices} |"


def all_types() -> list[str]:
    """Return the library's model types that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def row_of(model_type: str) -> Row:
    """Try one model type."""
    from transformers import AutoConfig

    if nearest := nearest_family(model_type):
        return Row(model_type, f"refused{nearest}")
    if not is_decoder_only(model_type):
        return Row(model_type, "splits with the heads of its own family, above")
    try:
        config = AutoConfig.for_model(model_type, **MISSING_SETTINGS.get(model_type, {}))
        if any(hasattr(config, name) for name in _OTHER_SENSES):
            text = getattr(config, "text_config", None)
            of_text = f"; its text model is `{text.model_type}`" if text is not None else ""
            return Row(model_type, f"refused: it reads more than text{of_text}")
        spec = spec_from_config(config, CAUSAL_LM, **{SERVER_LAYERS: 1})
    except Exception as error:  # noqa: BLE001 (whatever a default configuration lacks)
        return Row(model_type, f"refused: the library has no default configuration: {first_line(error)}")
    if reason := cut_reason(spec):
        return Row(model_type, f"refused: {reason}")
    return Row(model_type, "splits", "no" if slices_difference(spec) else "yes")


def rows(model_types: list[str]) -> Iterator[Row]:
    """Try model types one after the other; one that takes too long or ends its process is refused."""
    # What each process needs is imported once.
    import_module("transformers.modeling_utils")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for model_type in model_types:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda name=model_type, end=theirs: end.send(row_of(name)), daemon=True)
        process.start()
        theirs.close()
        try:
            yield ours.recv() if ours.poll(MOST_S) else Row(model_type, f"refused: no answer within {MOST_S:g} s")
        except EOFError:
            yield Row(model_type, "refused: its process ended")
        process.kill()
        process.join()


def with_rows(page: str, found: Iterable[Row]) -> str:
    """Return a page whose table has these rows in the places of those of the same types."""
    before, table, after = re.split(rf"(?<={BEGIN}\n)|(?=\n{END})", page)
    texts = {line.split("`")[1]: line for line in table.splitlines() if "`" in line}
    texts |= {row.model_type: row.text() for row in found}
    return before + "\n".join([_HEADING, *(texts[name] for name in sorted(texts))]) + after


def main() -> None:
    """Print the rows of all types, or of some, and write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the rows into the table of this page")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.types or all_types()):
        print(row.text(), flush=True)
        found.append(row)
    if arguments.write:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(with_rows(page, found), encoding="utf-8")


if __name__ == "__main__":
    main()
