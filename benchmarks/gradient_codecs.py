"""Gradients at the cut in fewer bytes: quantized, the largest numbers alone, or of low rank, at equal bytes.

The gradient of the loss by the activations behind the clusters' blocks goes back in each step. What each form loses is
measured where it counts: as the relative error of the gradient, and of those of the clusters' weights that follow.
Samples of a pass come once, so that no form has an earlier error to make up for.

    python benchmarks/gradient_codecs.py MODEL val.en          # SmolLM2-135M, cut before its last block
    python benchmarks/gradient_codecs.py MODEL val.en --blocks 15 --json

MODEL is a folder of a decoder-only model, or a hub id; the text has an example a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from client_pipeline.link.activation_codec import ActivationCodec

QUANTIZED = ("int8", "int4", "int2")


def forms(gradient_ND: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Give each form's name, its bytes, and what it makes of a gradient; two others have the bytes of each codec."""
    num_tokens, width = gradient_ND.shape
    left, strengths, right = torch.linalg.svd(gradient_ND, full_matrices=False)
    flat = gradient_ND.flatten()
    largest_first = flat.abs().argsort(descending=True)
    for name in QUANTIZED:
        codec = ActivationCodec(name)
        num_bytes = num_tokens * codec.row_bytes(width)
        yield name, num_bytes, codec.decode(codec.encode(gradient_ND[None]))[0]
        # A number as half, and two bytes for its place.
        kept = largest_first[: num_bytes // 4]
        sparse = torch.zeros_like(flat)
        sparse[kept] = flat[kept]
        yield f"top-k, bytes of {name}", 4 * len(kept), sparse.view_as(gradient_ND)
        # Both factors as half.
        rank = min(num_bytes // (2 * (num_tokens + width)), len(strengths))
        product_ND = (left[:, :rank] * strengths[:rank]) @ right[:rank]
        yield f"low rank, bytes of {name}", 2 * rank * (num_tokens + width), product_ND


def measure(model: Any, batch: dict[str, Tensor], blocks: int) -> list[dict[str, Any]]:
    """Return each form's bytes and errors on a batch."""
    behind: list[Tensor] = []
    hook = model.model.layers[blocks - 1].register_forward_hook(
        lambda module, inputs, output: behind.append(output[0] if isinstance(output, tuple) else output)
    )
    real_BT = batch["attention_mask"].bool()
    loss = model(**batch, labels=batch["input_ids"].masked_fill(~real_BT, -100)).loss
    hook.remove()
    (activations_BTD,) = behind
    (gradient_BTD,) = torch.autograd.grad(loss, activations_BTD, retain_graph=True)
    weights = [p for layer in model.model.layers[:blocks] for p in layer.parameters() if p.ndim == 2]

    def of_weights(by_activations_BTD: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(activations_BTD, weights, by_activations_BTD, retain_graph=True)

    exact, rows = of_weights(gradient_BTD), []
    for name, num_bytes, approximate_ND in forms(gradient_BTD[real_BT]):
        sent_BTD = torch.zeros_like(gradient_BTD)
        sent_BTD[real_BT] = approximate_ND
        rows.append(
            {
                "form": name,
                "share_of_float32": num_bytes / (4 * approximate_ND.numel()),
                "gradient_error": _error([gradient_BTD], [sent_BTD]),
                "weights_error": _error(exact, of_weights(sent_BTD)),
            }
        )
    return rows


def _error(exact: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    missed = sum(float((a - b).square().sum()) for a, b in zip(exact, others, strict=True))
    return (missed / sum(float(a.square().sum()) for a in exact)) ** 0.5


def main() -> int:
    """Print the mean over the batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--blocks", type=int, default=29, help="those of a cluster; the server has the others")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    tokenizer, model = (kind.from_pretrained(args.model) for kind in (AutoTokenizer, AutoModelForCausalLM))
    model = model.float().eval()
    texts = args.text.read_text(encoding="utf-8").splitlines()
    measured: list[list[dict[str, Any]]] = []
    for number in range(args.batches):
        lines = texts[number * args.batch_size : (number + 1) * args.batch_size]
        batch = tokenizer(lines, return_tensors="pt", padding=True, truncation=True, max_length=64)
        measured.append(measure(model, dict(batch), args.blocks))
    rows = [
        {"blocks": args.blocks, "form": same[0]["form"]}
        | {key: statistics.fmean(row[key] for row in same) for key in list(same[0])[1:]}
        for same in zip(*measured, strict=True)
    ]
    say = sys.stderr if args.json else sys.stdout
    print(f"{'':<24} {'of float32':>10} {'gradient':>9} {'weights':>9}   relative error of", file=say)
    for row in rows:
        print(
            f"{row['form']:<24} {row['share_of_float32']:>10.3f} {row['gradient_error']:>9.3f} "
            f"{row['weights_error']:>9.3f}",
            file=say,
        )
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
