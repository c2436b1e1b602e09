"""Costs of the TEBs of a real model: FLOP by torch's counter, bytes by its parameters and saved tensors.

torch is imported inside the functions: the planner needs it only here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION, ModelSpec
from client_pipeline.system.device_memory import TebMemory
from client_pipeline.system.scenario import Costs

if TYPE_CHECKING:
    from torch import Tensor

    from client_pipeline.link.compression import CompressionConfig

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Tensors of a parameter's size that an optimizer keeps beside weight and gradient."""


class TebCosts(NamedTuple):
    """One TEB, for one sample of a given length."""

    forward_flop: int
    """[FLOP]."""
    backward_flop: int
    """With a forward pass in it where devices compute again [FLOP]."""
    num_parameters: int
    parameter_bytes: int
    """Bytes of the parameters; frozen matrices as ``model.base-dtype`` holds them [byte]."""
    trained_bytes: int
    """Bytes of the parameters that are trained."""
    saved_bytes: int
    """Kept from the forward pass for the backward one [byte]."""
    weight_flop: int
    """Part of ``backward_flop`` that makes weight gradients [FLOP]."""
    pass_bytes: int
    """Momentary need of a pass beside that, however many samples it has [byte]."""
    pass_sample_bytes: int
    """The same of each sample [byte]."""
    activation_bits: int
    """Bits that go over a link to the next segment [bit]; the gradient comes back with as many."""
    attention_flop: float
    """Part of both passes that grows with the square of the tokens [FLOP]; of models that can be cut along them."""
    kept_keys_bytes: int
    """Bytes that two token slices keep beside ``saved_bytes``: keys and values that more than one of them needs [byte];
    likewise."""
    later_keys_bytes: int
    """Keys and values of the sample, as a slice keeps them for later ones [byte]; likewise."""
    waiting_share: float
    """Share of ``saved_bytes`` that waits in a backward pass that puts weight gradients off."""


def teb_costs(
    spec: ModelSpec, sequence_length: int, *, index: int = 0, recompute: bool = False, forward_only: bool = False
) -> TebCosts:
    """Count one TEB of a model for one sample, forward and backward for real, on tensors without data.

    Of experts the matrices of all count as memory, and as work those that a token visits. Attention with a window
    counts as the library computes it: all queries with all keys.

    Parameters
    ----------
    spec : the model
    sequence_length : T, tokens of the sample, none of them padding
    index : of the TEB
    recompute : each backward pass begins with the forward pass once more
    forward_only : there is no backward pass, and nothing is kept for one

    Raises
    ------
    ValueError
        If a decoder-only model's TEB does not run on tensors without data.
    """
    from client_pipeline.families.registry import is_decoder_only

    try:
        costs, forward_attention_flop = _counted_teb(spec.to_json(), sequence_length, index)
    except (RuntimeError, NotImplementedError) as error:
        if not is_decoder_only(spec.family):
            raise
        raise ValueError(
            f'costs = "model": TEB {index} of model type {spec.family!r} cannot be counted on tensors without data: '
            f'{next(iter(str(error).splitlines()), type(error).__name__):.200}; set costs = "scenario"'
        ) from error
    if forward_only:
        passed = {"backward_flop": 0, "weight_flop": 0, "saved_bytes": 0, "kept_keys_bytes": 0}
        return costs._replace(attention_flop=forward_attention_flop, **passed)
    if not recompute:
        return costs
    return costs._replace(
        backward_flop=costs.backward_flop + costs.forward_flop,
        attention_flop=costs.attention_flop + forward_attention_flop,
    )


def all_teb_costs(
    spec: ModelSpec, sequence_length: int, *, recompute: bool = False, forward_only: bool = False
) -> tuple[TebCosts, ...]:
    """Count all TEBs of a model, (L,); each kind once. See :func:`teb_costs`.

    Of models that are not decoder-only one TEB stands for all, and one with more or less than the rest (DeBERTa's
    convolution) is not told apart; but those without adapters (``lora.first-block``) are from those with some.
    """
    kinds = _kinds(spec.to_json(), sequence_length)
    passes = {"recompute": recompute, "forward_only": forward_only}
    counted = {i: teb_costs(spec, sequence_length, index=i, **passes) for i in dict.fromkeys(kinds)}
    return tuple(counted[i] for i in kinds)


@lru_cache(maxsize=32)
def _kinds(spec_json: str, sequence_length: int) -> tuple[int, ...]:
    """Return the first TEB of the same kind for each TEB, (L,)."""
    import torch

    from client_pipeline.families.registry import family_named, is_decoder_only, library_family

    spec = ModelSpec.from_json(spec_json)
    first_adapted = spec.lora.first_block if spec.lora else 0
    if not is_decoder_only(spec.family):
        num_blocks = family_named(spec.family).num_blocks(spec)
        return tuple(first_adapted if i >= first_adapted else 0 for i in range(num_blocks))
    family, first = library_family(spec.family), dict[str, int]()
    x_BTD = torch.empty(1, sequence_length, family.width(spec), device="meta")
    blocks = family.unfilled_parts(spec).blocks
    kinds = (f"{i >= first_adapted} {_kind(block, i, x_BTD)}" for i, block in enumerate(blocks))
    return tuple(first.setdefault(kind, i) for i, kind in enumerate(kinds))


def _kind(block: Any, index: int, x_BTD: Tensor) -> str:
    """Return all that the costs of a decoder-only model's TEB follow from: modules, weights, arguments."""
    import torch

    modules = [
        (name, type(module), [(key, value) for key, value in vars(module).items() if isinstance(value, bool | str)])
        for name, module in block.named_modules()
    ]
    weights = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
    # A window that is shorter than the sequence comes with a mask.
    arguments = torch.utils._pytree.tree_leaves(block.arguments.of_layer(index, x_BTD, None))
    forms = [tuple(value.shape) if isinstance(value, torch.Tensor) else type(value) for value in arguments]
    return repr((modules, weights, forms))


@lru_cache(maxsize=128)
def _counted_teb(spec_json: str, sequence_length: int, index: int) -> tuple[TebCosts, float]:
    """Count one TEB without recomputation, and of its attention the forward pass's part [FLOP].

    On tensors without data torch runs every operation in Python: half a second for what a run and its plan ask of the
    same model.
    """
    from client_pipeline.system.live_memory import ProcessorExperts

    with ProcessorExperts():
        return _counted(ModelSpec.from_json(spec_json), sequence_length, index)


def _counted(spec: ModelSpec, sequence_length: int, index: int) -> tuple[TebCosts, float]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from client_pipeline.families.families import build_block
    from client_pipeline.families.registry import family_named
    from client_pipeline.families.sliceable import takes_token_slices
    from client_pipeline.system.live_memory import once_before, pass_memory, saved_in_slices, waiting_for_weights
    from client_pipeline.weights.low_bits import compress, fill_without_data

    family = family_named(spec.family)
    width, carried = family.width(spec), family.carried_examples(spec)
    with torch.device("meta"):
        block = build_block(spec, index)
        num_parameters = sum(p.numel() for p in block.parameters())
        packed = fill_without_data(compress(block, spec.base_dtype)) if spec.low_bits else 0
        x_BTD = torch.empty(1 + carried, sequence_length, width, requires_grad=True)
    once_before(block, x_BTD)
    with FlopCounterMode(display=False) as forward:
        y_BTD = block(x_BTD, None)
    with FlopCounterMode(display=False) as backward:
        y_BTD.sum().backward()
    forward_attention_flop, backward_attention_flop, kept_keys_bytes, later_keys_bytes = 0.0, 0.0, 0, 0
    if takes_token_slices(spec):
        long_BTD = torch.empty(1, 2 * sequence_length, width, device="meta", requires_grad=True)
        once_before(block, long_BTD)
        with FlopCounterMode(display=False) as long_forward:
            long_BTD = block(long_BTD, None)
        with FlopCounterMode(display=False) as long_backward:
            long_BTD.sum().backward()
        # Of a T + c T^2 at T and at 2 T.
        forward_attention_flop = long_forward.get_total_flops() / 2 - forward.get_total_flops()
        backward_attention_flop = long_backward.get_total_flops() / 2 - backward.get_total_flops()
    # Both are straight lines over the samples.
    one, two = (pass_memory(block, (samples + carried, sequence_length, width)) for samples in (1, 2))
    saved_sample = two.saved_bytes - one.saved_bytes
    if takes_token_slices(spec) and sequence_length > 1:
        of_one, of_two = (saved_in_slices(block, (samples, sequence_length, width), 2) for samples in (1, 2))
        kept_keys_bytes = of_two.saved_bytes - of_one.saved_bytes - saved_sample
        # The first of the two slices keeps its own.
        longer = (sequence_length + 1) // 2
        later_keys_bytes = (of_two.later_bytes - of_one.later_bytes) * sequence_length // longer
    waiting_sample = waiting_for_weights(block, (2 + carried, sequence_length, width))
    waiting_sample -= waiting_for_weights(block, (1 + carried, sequence_length, width))
    pass_sample = two.peak_bytes - one.peak_bytes - saved_sample
    trained = [p for p in block.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    with FlopCounterMode(display=False) as of_input:
        block(x_BTD, None).sum().backward()
    # The second count has a forward pass, too.
    input_flop = of_input.get_total_flops() - forward.get_total_flops()
    parameters = list(block.parameters())
    costs = TebCosts(
        forward_flop=forward.get_total_flops(),
        backward_flop=backward.get_total_flops(),
        weight_flop=backward.get_total_flops() - input_flop,
        num_parameters=num_parameters,
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters) + packed,
        trained_bytes=sum(p.numel() * p.element_size() for p in trained),
        saved_bytes=one.saved_bytes,
        pass_bytes=max(one.peak_bytes - one.saved_bytes - pass_sample, 0),
        pass_sample_bytes=max(pass_sample, 0),
        attention_flop=forward_attention_flop + backward_attention_flop,
        kept_keys_bytes=kept_keys_bytes,
        later_keys_bytes=later_keys_bytes,
        waiting_share=waiting_sample / saved_sample,
        activation_bits=8 * y_BTD[0].numel() * y_BTD.element_size(),
    )
    return costs, forward_attention_flop


def model_costs(
    spec: ModelSpec,
    *,
    sequence_length: int,
    batch_size: int,
    local_steps: int = 1,
    gradient_accumulation: int = 1,
    optimizer: str = "adamw",
    compression: CompressionConfig | None = None,
    trains_head: bool = False,
    recompute: bool = False,
    forward_only: bool = False,
) -> Costs:
    """Costs of a model in the terms of a scenario's ``[block]``, per sample.

    gamma_0 holds weights, gradients and optimizer state of a TEB, and what GPipe keeps of all micro-batches of a batch;
    frozen weights are as ``model.base-dtype`` holds them, and have neither gradient nor state. Activations are those of
    float32, whatever ``runtime.precision`` says. The upload D_e is what is trained of embedding and encoder, compressed
    as it is sent. Its time D_t counts what the local steps send to the decoder, too: activations, masks and labels, and
    the matrices that the decoder reads of the embedding, which go up anew for every step but the first.

    Where TEBs differ, o_f, o_b and gamma_0 are the largest of them, and ``teb_shares`` says what each costs.

    Bytes are those of the tensors that are sent. Names, shapes and headers around them (of Flower's arrays, of the
    stream's frames, of gRPC) are not counted.

    Parameters
    ----------
    spec : the model
    sequence_length : T
    batch_size : b
    local_steps : of a round
    gradient_accumulation : batches of each
    optimizer : one of :data:`OPTIMIZER_STATES`
    compression : of updates and activations; None: none
    trains_head : the decoder or head is trained in the cluster and goes up with the encoder, and no activations do
    recompute : devices keep inputs alone and compute the rest again (``runtime.recompute``)
    forward_only : clusters train nothing, and no gradient comes back

    Raises
    ------
    ValueError
        For an unknown optimizer.
    """
    import torch

    from client_pipeline.families.families import build_block, build_embedding, build_head, tied
    from client_pipeline.families.hugging_face import CLUSTER_TAIL
    from client_pipeline.families.registry import family_named
    from client_pipeline.link.activation_codec import ActivationCodec
    from client_pipeline.link.compression import CompressionConfig
    from client_pipeline.link.update_codec import update_bytes
    from client_pipeline.partition.parts import own_parameters

    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZER_STATES)}, found {optimizer!r}")
    compression = compression or CompressionConfig()
    family = family_named(spec.family)
    tebs = all_teb_costs(spec, sequence_length, recompute=recompute, forward_only=forward_only)
    teb = TebCosts(*map(max, zip(*tebs, strict=True)))
    flop = [each.forward_flop + each.backward_flop for each in tebs]
    with torch.device("meta"):
        embedding = own_parameters(build_embedding(spec))
        head = own_parameters(build_head(spec)) if trains_head else {}
        # TEBs need not be alike: ModernBERT's first has no norm before its attention, DeBERTa's alone a convolution.
        blocks = [own_parameters(build_block(spec, index)) for index in range(family.num_blocks(spec))]
    sent = [p.numel() for part in (embedding, *blocks, head) for p in part.values()]
    update_bits = 8.0 * sum(update_bytes(compression, numbers) for numbers in sent)
    activation_bits, sent_bits = (
        8.0 * sequence_length * ActivationCodec(codec).row_bytes(family.width(spec))
        for codec in (compression.activations, compression.of_stream)
    )
    # A byte of mask a token; a label a sample, or a token (a translation is taken to be as long as its source).
    labels = 1 if spec.head == SEQUENCE_CLASSIFICATION else sequence_length
    target_bits = 8.0 * (sequence_length + torch.int64.itemsize * labels)
    shared = sum(embedding[name].numel() * embedding[name].element_size() for name in tied(spec).values())
    if spec.config.get(CLUSTER_TAIL):
        # No label and no matrix goes up; the states' gradient does, as large as the activations.
        target_bits, shared = 8.0 * sequence_length + sent_bits, 0
    samples = local_steps * gradient_accumulation * batch_size
    memory = TebMemory(
        held_bytes=teb.parameter_bytes + teb.trained_bytes * (1.0 + OPTIMIZER_STATES[optimizer]),
        saved_sample_bytes=teb.saved_bytes,
        activation_sample_bytes=teb.activation_bits / 8,
        pass_bytes=teb.pass_bytes,
        pass_sample_bytes=teb.pass_sample_bytes,
        kept_keys_sample_bytes=teb.kept_keys_bytes,
        later_keys_sample_bytes=teb.later_keys_bytes,
        waiting_share=teb.waiting_share,
        recompute=recompute and not forward_only,
    )
    stream_bits = samples * (sent_bits + target_bits) + 8.0 * (local_steps - 1) * shared
    return Costs(
        o_f=float(teb.forward_flop),
        o_b=float(teb.backward_flop),
        o_b_scaling="sample",
        t0=0.0,
        z_bits=activation_bits,
        g_bits=0.0 if forward_only else activation_bits,
        act_scaling="sample",
        lat=0.0,
        upload_time_bits=update_bits + (0.0 if trains_head else stream_bits),
        upload_energy_bits=update_bits,
        block_memory=memory.block_memory(batch_size),
        device_memory=memory.device_memory(batch_size),
        memory=memory,
        weight_share=teb.weight_flop / max(teb.backward_flop, 1),
        attention_share=teb.attention_flop / (teb.forward_flop + teb.backward_flop),
        activation_memory=float(batch_size * teb.saved_bytes),
        kept_keys_share=teb.kept_keys_bytes / max(teb.saved_bytes, 1),
        teb_shares=tuple(each / (teb.forward_flop + teb.backward_flop) for each in flop) if len(set(flop)) > 1 else (),
    )
