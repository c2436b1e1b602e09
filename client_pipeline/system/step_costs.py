"""Fields that a scenario and the planner's problem of one round share: the costs of a local step, and the forms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from client_pipeline.system.device_memory import TebMemory
from client_pipeline.system.energy import EnergyMode, TailEnergy
from client_pipeline.system.latency import LatencyForm, Scaling, Tail


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of TEBs and links in a local step."""

    o_f: float
    """Forward FLOP of one TEB for one sample."""
    o_b: float
    """Backward FLOP of one TEB: for one micro-batch, or for one sample."""
    o_b_scaling: Scaling
    t0: float
    """Seconds of one TEB for one micro-batch beside its FLOP."""
    z_bits: float
    """Activations on a link [bit]: of a micro-batch, or of a sample."""
    g_bits: float
    """Their gradient, likewise."""
    act_scaling: Scaling
    lat: float
    """Seconds of one micro-batch on a link beside its bits."""
    downlink_rate: float = 0.0
    """Rate of each control unit's downlink [bit/s]; 0: it takes no time. The event simulator alone reads it; ours."""
    decoder_s: float = 0.0
    """Seconds of the decoder for a micro-batch, or a sample, as ``act_scaling`` says; likewise."""
    weight_share: float = 0.5
    """Part of o_b that makes weight gradients: a schedule may put it off. The event simulator alone reads it; ours."""
    attention_share: float = 0.1
    """Part of o_f and o_b that is of queries with keys, and of their weights with values: it grows along a sequence,
    for token slices; likewise."""
    kept_keys_share: float = 0.12
    """Part of the memory of activations that is keys and values, of which token slices keep more; ours."""
    teb_shares: tuple[float, ...] = ()
    """Work of each TEB as a share of o_f, o_b and t0, which are those of the costliest, (L,); empty: all cost the same;
    ours."""
    memory: TebMemory | None = None
    """Parts of a device's memory where costs are of a model. What a device needs beside its TEBs is then taken off, as
    a plan of one micro-batch needs it. Instance files leave it out; ours."""


@dataclass(frozen=True, kw_only=True)
class PlanForms:
    """Forms of latency and energy that a plan counts."""

    latency: LatencyForm
    tail: Tail
    """eq15 alone: ``last`` subtracts the largest link time among the selected devices."""
    energy: EnergyMode
    tail_energy: TailEnergy = "link"
    """Charge of a pipeline's last device for a link, as printed, by C9, under ``eq15`` too."""


def shared_fields(kind: type[StepCosts] | type[PlanForms], of: Any) -> dict[str, Any]:
    """Return the fields of a kind that an object of it has."""
    return {field.name: getattr(of, field.name) for field in fields(kind)}
