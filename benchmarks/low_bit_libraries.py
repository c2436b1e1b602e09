"""Libraries that hold a frozen matrix in few bits on a CPU: ours, torchao and bitsandbytes, side by side.

A block of two linear layers without biases, GELU between them, of SmolLM2's widths and random weights: the relative
error of its output and of its input's gradient against float32, the median time of a forward and a backward pass, and
the private memory (USS) that importing the library takes beside torch and transformers. Each row is a process of its
own. A library that is absent is reported as ``not installed``, and so is what one cannot do:

    pip install --no-deps torchao bitsandbytes
    python benchmarks/low_bit_libraries.py

A line of JSON a row.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import Any

import psutil

WIDTH, FEED_FORWARD = 576, 1536
CASES = (
    *(("collapipe", dtype) for dtype in ("float32", "bfloat16", "int8", "nf4")),
    *((library, dtype) for library in ("torchao", "bitsandbytes") for dtype in ("int8", "nf4")),
)
"""Library and type; in float32 the layers are torch's."""


def private_mb() -> float:
    """Private memory of this process [MB]."""
    return float(psutil.Process().memory_full_info().uss) / 1e6


def ours(block: Any, dtype: str) -> Any:
    """Hold the matrices as ``model.base-dtype`` does."""
    from client_pipeline.weights.low_bits import compress, low_bit_layers

    if dtype == "float32":
        return block
    matrices = {str(index): layer.weight for index, layer in enumerate(block) if hasattr(layer, "weight")}
    for name, layer in low_bit_layers(compress(block, dtype)):
        layer.fill(matrices[name])
    return block


def torchao(block: Any, dtype: str) -> Any:
    """Weights alone in 8 bits, by torchao; ``to_nf4`` is looked for where its releases had it."""
    quantization = importlib.import_module("torchao.quantization")
    if dtype == "int8":
        quantization.quantize_(block, quantization.Int8WeightOnlyConfig())
        return block
    import torch

    to_nf4 = importlib.import_module("torchao.dtypes.nf4tensor").to_nf4
    for index in (0, 2):
        block[index].weight = torch.nn.Parameter(to_nf4(block[index].weight), requires_grad=False)
    return block


def bitsandbytes(block: Any, dtype: str) -> Any:
    """Its own linear layers, quantised as they go to their device."""
    import torch

    layers = importlib.import_module("bitsandbytes.nn")
    for index in (0, 2):
        matrix = block[index].weight.detach()
        sizes = (matrix.shape[1], matrix.shape[0])
        if dtype == "int8":
            layer = layers.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = layers.Int8Params(matrix, requires_grad=False, has_fp16_weights=False)
        else:
            layer = layers.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            layer.weight = layers.Params4bit(matrix, requires_grad=False, quant_type="nf4")
        block[index] = layer.to("cpu")
    return block


MAKERS: dict[str, Callable[[Any, str], Any]] = {"collapipe": ours, "torchao": torchao, "bitsandbytes": bitsandbytes}


def measure(library: str, dtype: str, tokens: int, steps: int) -> dict[str, Any]:
    """Return one row; it says what is not there or cannot be done."""
    row: dict[str, Any] = {"library": library, "dtype": dtype}
    if library != "collapipe" and importlib.util.find_spec(library) is None:
        return row | {"status": "not installed"}
    import torch
    from torch import nn

    # Every process of a run has it.
    importlib.import_module("transformers.pytorch_utils")
    torch.set_num_threads(1)
    row |= {"version": version(library) if library != "collapipe" else "", "torch": torch.__version__}
    row |= {"width": WIDTH, "feed_forward": FEED_FORWARD, "tokens": tokens, "steps": steps}
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(WIDTH, FEED_FORWARD, bias=False), nn.GELU(), nn.Linear(FEED_FORWARD, WIDTH, bias=False)
    ).requires_grad_(False)
    x, gradient = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(tokens, WIDTH)
    expected, expected_gradient, _ = passes(block, x, gradient)
    before_mb = private_mb()
    importlib.import_module("client_pipeline.weights.low_bits" if library == "collapipe" else library)
    row["import_mb"] = round(private_mb() - before_mb, 1)
    try:
        quantised = MAKERS[library](block, dtype)
        output, x_gradient, _ = passes(quantised, x, gradient)
        row["output_error"] = round(relative(output, expected), 5)
        row["gradient_error"] = round(relative(x_gradient, expected_gradient), 5)
        seconds = [passes(quantised, x, gradient)[2] for _ in range(steps)]
    except Exception as error:
        # Whatever a library raises for what it does not do is the finding.
        return row | {"status": f"{type(error).__name__}: {error}"[:200]}
    # The least is what a machine with other work does without it.
    times = {"median_ms": statistics.median(seconds), "least_ms": min(seconds)}
    return row | {name: round(1e3 * value, 2) for name, value in times.items()} | {"status": "measured"}


def passes(block: Any, x: Any, gradient: Any) -> tuple[Any, Any, float]:
    """Run forward and backward; output, the input's gradient, and the time [s]."""
    x.grad = None
    begun = time.perf_counter()
    output = block(x)
    output.backward(gradient)
    return output.detach(), x.grad, time.perf_counter() - begun


def relative(values: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((values - expected).norm() / expected.norm())


def main() -> None:
    """Print a row for each library and type."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for library, dtype in CASES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            row = pool.submit(measure, library, dtype, arguments.tokens, arguments.steps).result()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
