"""What the TEBs of a real model cost: FLOP by torch's counter, bytes by its parameters and saved tensors.

torch is imported inside the functions: the planner needs it only here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from client_pipeline.system.scenario import Costs

if TYPE_CHECKING:
    from client_pipeline.partition.spec import ModelSpec

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Tensors of a parameter's size that an optimizer keeps beside weight and gradient."""


class TebCosts(NamedTuple):
    """One TEB, for one sample of a given length."""

    forward_flop: int
    """[FLOP]."""
    backward_flop: int
    """[FLOP]."""
    num_parameters: int
    parameter_bytes: int
    """[byte]."""
    saved_bytes: int
    """Kept from the forward pass for the backward one [byte]."""
    activation_bits: int
    """What goes over a link to the next segment [bit]; the gradient comes back with as many."""


def teb_costs(spec: ModelSpec, sequence_length: int) -> TebCosts:
    """Count one TEB of a model for one sample, forward and backward for real, on tensors without data.

    Parameters
    ----------
    spec : the model
    sequence_length : T, tokens of the sample, none of them padding
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from client_pipeline.partition.families import adapter

    family = adapter(spec.family)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            saved[id(storage)] = storage.nbytes()
            kept.append(storage)
        return tensor

    # Storages that live on keep their identities apart.
    kept: list[torch.UntypedStorage] = []
    with torch.device("meta"):
        block = family.build_block(spec, 0)
        x_BTD = torch.empty(1, sequence_length, family.width(spec), requires_grad=True)
    weights = {id(p.untyped_storage()) for p in block.parameters()}
    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y_BTD = block(x_BTD, None)
    with FlopCounterMode(display=False) as backward:
        y_BTD.sum().backward()
    parameters = list(block.parameters())
    return TebCosts(
        forward_flop=forward.get_total_flops(),
        backward_flop=backward.get_total_flops(),
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        saved_bytes=sum(size for storage, size in saved.items() if storage not in weights),
        activation_bits=8 * y_BTD.numel() * y_BTD.element_size(),
    )


def model_costs(
    spec: ModelSpec,
    *,
    sequence_length: int,
    batch_size: int,
    local_steps: int = 1,
    gradient_accumulation: int = 1,
    optimizer: str = "adamw",
) -> Costs:
    """Costs of a model in the terms of a scenario's ``[block]``, per sample.

    gamma_0 holds weights, gradients and optimizer state of a TEB, and what GPipe keeps of all micro-batches of a batch.
    The upload is the embedding and the encoder in full; its time counts the activations of the local steps, too, and
    the matrices that the decoder reads of the embedding, which go up anew for every step but the first.

    Parameters
    ----------
    spec : the model
    sequence_length : T
    batch_size : b
    local_steps : of a round
    gradient_accumulation : batches of each
    optimizer : one of :data:`OPTIMIZER_STATES`

    Raises
    ------
    ValueError
        For an unknown optimizer.
    """
    import torch

    from client_pipeline.partition.families import adapter

    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZER_STATES)}, found {optimizer!r}")
    family, teb = adapter(spec.family), teb_costs(spec, sequence_length)
    with torch.device("meta"):
        parameters = {n: p for n, p in family.build_embedding(spec).named_parameters() if p.requires_grad}
    embedding = sum(p.numel() * p.element_size() for p in parameters.values())
    shared = [parameters[name] for name in family.tied(spec).values()]
    tied = sum(p.numel() * p.element_size() for p in shared)
    encoder_bits = 8.0 * (embedding + family.num_blocks(spec) * teb.parameter_bytes)
    return Costs(
        o_f=float(teb.forward_flop),
        o_b=float(teb.backward_flop),
        o_b_scaling="sample",
        t0=0.0,
        z_bits=float(teb.activation_bits),
        g_bits=float(teb.activation_bits),
        act_scaling="sample",
        lat=0.0,
        upload_time_bits=encoder_bits
        + float(local_steps * gradient_accumulation * batch_size * teb.activation_bits)
        + 8.0 * (local_steps - 1) * tied,
        upload_energy_bits=encoder_bits,
        block_memory=teb.parameter_bytes * (2.0 + OPTIMIZER_STATES[optimizer]) + batch_size * teb.saved_bytes,
    )
