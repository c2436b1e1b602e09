"""Activations and gradients in fewer bytes, on tensors, between devices and on the decoder's stream."""

import pytest
import torch

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.base import LinkError
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.stream import DecoderStream
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.federated_rounds import control_units, federated_round
from helpers.tiny_models import tiny_batch, tiny_spec

ROW = {"none": 4 * 24, "fp16": 2 * 24 + 4, "int8": 24 + 4, "int4": 12 + 1 + 4, "int2": 6 + 1 + 4}
BOUND = {"none": 0.0, "fp16": 2**-11, "int8": 0.5 / 127, "int4": 0.5 / 7, "int2": 1 / 3}
"""Largest error of a number, as a share of the largest of its token."""


def rows(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    # Tokens of very unequal size; one is zero.
    x = torch.randn(3, 5, 24, generator=generator) * torch.logspace(-6, 3, 15).view(3, 5, 1) * scale
    x[1, 2] = 0.0
    return x


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_what_is_lost_is_bounded_by_the_tokens_own_largest_number(name, scale):
    codec, x = ActivationCodec(name), rows(scale)
    wire = codec.encode(x)
    assert (tuple(wire.shape), wire.dtype) == codec.wire(tuple(x.shape))
    assert wire.nbytes == 15 * codec.row_bytes(24) == 15 * ROW[name]
    found = codec.decode(wire)
    assert found.dtype == torch.float32
    largest = x.abs().amax(-1, keepdim=True)
    assert bool(((found - x).abs() <= (BOUND[name] * 1.001 + 1e-7) * largest * (name != "none")).all())
    assert torch.equal(found[1, 2], torch.zeros(24))


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_with_few_bits_numbers_that_are_far_from_the_largest_keep_their_size(name):
    """Some numbers of a language model's states are a thousand times the others."""
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1))
    x[..., 7] = 1000.0
    found = ActivationCodec(name).decode(ActivationCodec(name).encode(x))
    largest = x[..., 32:].unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=-1)
    # A group's scale is at most a sixteenth of a factor of two above its largest number.
    assert bool(((found - x)[..., 32:].abs() <= BOUND[name] * 2 ** (1 / 16) * largest * 1.001).all())


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("width", [4, 36, 64, 100, 576])
def test_a_row_says_how_wide_it_is(name, width):
    x = torch.randn(1, 1, width)
    codec = ActivationCodec(name)
    assert codec.decode(codec.encode(x)).shape == x.shape
    with pytest.raises(ValueError, match=f"expected the codec {name}"):
        codec.decode(torch.zeros(1, 1, 4, dtype=torch.uint8))


@pytest.mark.parametrize(("name", "multiple"), [("fp16", 1), ("int8", 1), ("int4", 2), ("int2", 4)])
def test_a_row_that_no_width_has_is_refused(name, multiple):
    codec = ActivationCodec(name)
    rows_of_widths = {codec.row_bytes(width) for width in range(multiple, 400, multiple)}
    taken = set()
    for row in range(4, 60):
        try:
            taken.add(codec.decode(torch.zeros(1, 1, row, dtype=torch.uint8)).numel() and row)
        except ValueError as error:
            assert f"expected the codec {name}" in str(error)
    assert taken == rows_of_widths & set(range(4, 60))


def test_few_bits_need_a_width_that_fills_bytes():
    with pytest.raises(ValueError, match="int2 packs 4 numbers in a byte, found a model of width 6; use int8"):
        ActivationCodec("int2").row_bytes(6)


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_stays_so_and_spoils_no_other(name, value):
    x = rows()
    x[0, 0, 3] = value
    found = ActivationCodec(name).decode(ActivationCodec(name).encode(x))
    assert not torch.isfinite(found[0, 0]).all()
    assert torch.isfinite(found[1:]).all() and torch.isfinite(found[0, 1:]).all()


@pytest.mark.parametrize(
    "wire", [torch.zeros(2, 3, 8), torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(24, dtype=torch.uint8)]
)
def test_bytes_of_another_codec_are_refused(wire):
    with pytest.raises(ValueError, match=r"expected the codec int8, bytes \[B, T, row\], found"):
        ActivationCodec("int8").decode(wire)
    with pytest.raises(ValueError, match="expected one of none, fp16, int8, int4, int2, found 'int3'"):
        ActivationCodec("int3")


def test_a_round_over_real_links_learns_nearly_the_same(served):  # noqa: F811
    # Without dropout, and smooth: a ReLU that a rounding tips over changes its gradient by all of it.
    spec = tiny_spec("bert", dropout=0.0)
    batches = [tiny_batch(spec, size=7, length=9, seed=1), tiny_batch(spec, size=5, length=6, seed=2)]
    optimizer, changes, reports = OptimizerConfig(name="sgd", lr=0.5), {}, {}
    for kind in ("none", "fp16", "int8"):
        service, weights = served(optimizer, spec=spec, codec=ActivationCodec(kind))
        units = control_units(
            batches, optimizer, f"codec-{kind}", spec=spec, compression=CompressionConfig(activations=kind)
        )
        try:
            joined, results = federated_round(units, service, weights)
        finally:
            for unit in units:
                unit.close()
        changes[kind] = torch.cat([(joined[key] - weights[key]).flatten() for key in sorted(joined)])
        reports[kind] = [result.report for result in results]
    for kind, allowed in (("fp16", 0.01), ("int8", 0.15)):
        exact, found = changes["none"], changes[kind]
        difference = float((found - exact).norm() / exact.norm())
        assert 0 < difference < allowed
        width = spec.config["hidden_size"]
        ratio = ActivationCodec(kind).row_bytes(width) / (4 * width)
        for plain, short in zip(reports["none"], reports[kind], strict=True):
            assert short["link_bytes"] == plain["link_bytes"] * ratio
            assert short["payload_bytes"]["down"] == plain["payload_bytes"]["down"] * ratio
            assert short["payload_bytes"]["up"] < plain["payload_bytes"]["up"]


def test_a_control_unit_with_another_codec_is_refused_with_the_remedy(served):  # noqa: F811
    service, _ = served(OptimizerConfig(name="sgd"), codec=ActivationCodec("int8"))
    address = service.open_round(1, [0], 1)[0]
    with pytest.raises(LinkError, match="expected int8, found none; set compression.activations and"):
        DecoderStream.open(address)
