import subprocess
import sys
from pathlib import Path

import pytest
import torch

from client_pipeline.runtime.backward_pass import backward_from

ROOT = Path(__file__).resolve().parents[3]


def forward(seed=0):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    matrix = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed + 1), requires_grad=True)
    return x, matrix, torch.tanh(x @ matrix)


def test_gradients_are_torchs_own_bit_for_bit():
    gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(9))
    *leaves, output = forward()
    *expected, its_output = forward()
    for _ in range(2):  # a second pass adds to what is there
        backward_from(output, gradient)
        torch.autograd.backward(its_output, gradient)
        *_, output = forward()
        *_, its_output = forward()
    assert all(torch.equal(leaf.grad, other.grad) for leaf, other in zip(leaves, expected, strict=True))


def test_a_tensor_that_was_received_is_its_own_output():
    x = torch.ones(2, 3, requires_grad=True)
    backward_from(x, torch.full((2, 3), 4.0))
    assert x.grad.tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("shape", [(5, 3), (3, 1), (3, 5, 1)])
def test_a_gradient_of_another_shape_is_refused(shape):
    *_, output = forward()
    with pytest.raises(RuntimeError, match="shape"):
        backward_from(output, torch.ones(shape))


def test_where_nothing_takes_a_gradient_there_is_none():
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward_from(torch.ones(2), torch.ones(2))


@pytest.mark.slow
def test_a_step_imports_no_compiler():
    """``torch.autograd.backward`` with a gradient imports sympy: 0.4 s of every process that starts."""
    code = (
        "import sys, torch; from client_pipeline.runtime.stage import Stage; "
        "from client_pipeline.runtime.backward_pass import backward_from; "
        "y = torch.ones(2, requires_grad=True) * 2; backward_from(y, torch.ones(2)); "
        "print([m for m in ('sympy', 'torch._dynamo', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
