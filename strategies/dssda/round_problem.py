"""A scenario's network in one round, with the queues, as the planner's problem; and the bound that a plan leads to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from client_pipeline.system.channels import NetworkState
from client_pipeline.system.radio import Array, distortion_paper, distortion_sinr
from client_pipeline.system.scenario import Scenario
from client_pipeline.system.step_costs import PlanForms, StepCosts, shared_fields
from strategies.dssda.answer import Answer
from strategies.dssda.convergence import BoundParameters, gamma, gamma_unmatched, participation_gap
from strategies.dssda.instance import Cluster, Device, Instance, Uplink
from strategies.dssda.per_round_bound import PerRoundBound
from strategies.dssda.queues import DriftWeights, Queues, drift_weights, participation_weights


def round_instance(scenario: Scenario, network: NetworkState, queues: Queues, *, drift: str = "true") -> Instance:
    """The problem of a round: minimise V tau plus the drift of the queues.

    Parameters
    ----------
    scenario : devices, budgets, costs and the planner's settings
    network : this round's device speeds, gains and interference
    queues : Y and Z so far
    drift : see :func:`strategies.dssda.queues.drift_weights`
    """
    settings, costs = scenario.planner, scenario.costs
    band_hz = None
    if settings.bandwidth == "split":
        each = float(np.mean(network.bandwidth_hz))
        band_hz = each * min(scenario.num_clusters, scenario.num_channels)
        # Whoever does not divide the band has an even part of it.
        network = replace(network, bandwidth_hz=np.full(network.bandwidth_hz.shape, each))
    if settings.bound == "participation":
        num_matched = min(scenario.num_clusters, scenario.num_channels)
        weights = participation_weights(queues, np.array(scenario.data_shares), num_matched)
    else:
        weights = drift_weights(
            queues, bound_parameters(scenario), settings.num_blocks, silent_distortion(scenario, network), drift
        )
    return Instance(
        L=settings.num_blocks,
        b=settings.batch_size,
        m_set=tuple(range(1, settings.max_micro_batches + 1)),
        S_min=1,
        S_max=None,
        V=settings.v,
        steps=settings.local_steps * settings.gradient_accumulation,
        wJ=settings.energy_price,
        **shared_fields(PlanForms, settings),
        **shared_fields(StepCosts, costs),
        z_enc_bits=costs.upload_activation_bits,
        gamma0=costs.block_memory,
        gamma_act=costs.activation_memory,
        N0=scenario.noise_psd,
        band_hz=band_hz,
        clusters=tuple(_cluster(scenario, network, weights, n) for n in range(scenario.num_clusters)),
    )


def _cluster(scenario: Scenario, network: NetworkState, weights: DriftWeights, n: int) -> Cluster:
    uplink, costs, settings = scenario.uplinks[n], scenario.costs, scenario.planner
    return Cluster(
        **{name: float(column[n]) for name, column in weights._asdict().items()},
        devices=tuple(
            Device(
                phi=d.flop_per_cycle,
                f=float(frequency),
                kappa=d.kappa,
                p=d.link_power_w,
                B=d.link_bandwidth_hz,
                h=d.link_gain,
                I=d.link_interference_w,
                # A model's costs tell apart what a device needs however many TEBs it holds.
                mem=max(d.memory - costs.device_memory, 0.0),
                Emax=d.energy_budget_j,
            )
            for d, frequency in zip(scenario.clusters[n], network.frequency[n], strict=True)
        ),
        up=Uplink(
            t_bits=costs.upload_time_bits,
            e_bits=costs.upload_energy_bits,
            Pmax=uplink.max_power_w,
            Emax=uplink.energy_budget_j,
            eps_mode=settings.distortion,
            C=settings.distortion_scale,
            eps_max=None,
        ),
        h=tuple(float(v) for v in network.gain[n]),
        I=tuple(float(v) for v in network.interference_w[n]),
        B=tuple(float(v) for v in network.bandwidth_hz[n]),
    )


def bound_parameters(scenario: Scenario) -> BoundParameters:
    """g0 and phi of the convergence bound."""
    return BoundParameters(g0=scenario.planner.g0, phi=scenario.planner.phi)


def per_round_bound(scenario: Scenario) -> PerRoundBound:
    """C11 with the scenario's Gamma_max."""
    return PerRoundBound(parameters=bound_parameters(scenario), gamma_max=scenario.planner.gamma_max)


def silent_distortion(scenario: Scenario, network: NetworkState) -> Array:
    """Distortion epsilon(0) of a control unit that sends nothing, at the mean interference over the channels, (N,)."""
    settings, interference = scenario.planner, np.mean(network.interference_w, axis=1)
    if settings.distortion == "paper":
        return distortion_paper(0.0, 1.0, interference, settings.distortion_scale)
    return distortion_sinr(1.0, 0.0, 1.0, interference, scenario.noise_psd, settings.distortion_scale)


def round_bound(scenario: Scenario, network: NetworkState, instance: Instance, answer: Answer) -> Array:
    """Gamma_n of each cluster under an answer, Eq. (28), or its gap: what moves the virtual queues, (N,)."""
    if scenario.planner.bound == "participation":
        selected = np.array([part.selected for part in answer.clusters])
        return participation_gap(selected, np.array(scenario.data_shares))
    parameters = bound_parameters(scenario)
    bound = np.array(gamma_unmatched(silent_distortion(scenario, network), parameters), dtype=np.float64)
    for n, part in enumerate(answer.clusters):
        if (match := part.match) is not None:
            distortion = instance.distortion(n, match.power_w, match.channel)
            bound[n] = gamma(match.choice.num_segments, instance.L, distortion, parameters)
    return bound
