"""The network as it changes from round to round, seeded: any round can be asked for, in any order.

Fixed for a scenario are the devices, the bandwidths, path loss and shadowing. Drawn anew in every round are the fading
of each uplink, each channel's interference and the share of its frequency that each device can give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario


@dataclass(frozen=True)
class NetworkState:
    """One round's network."""

    number: int
    """Round, from 1."""
    frequency: tuple[Array, ...]
    """f_k of each cluster's devices in this round, (N,) of (K,) [cycle/s]."""
    gain: Array
    """h_nj, (N, J), linear."""
    interference_w: Array
    """I_j, the same for all clusters, (N, J) [W]."""
    bandwidth_hz: Array
    """B_n, the same on all channels, (N, J) [Hz]."""


class NetworkTrace:
    """The rounds of a scenario's network.

    Parameters
    ----------
    scenario : the network
    seed : beside the scenario's own: other rounds for the same devices
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario, self._seed = scenario, seed

    def round(self, number: int) -> NetworkState:
        """The network in a round, from 1; a cluster's draws do not depend on the other clusters."""
        scenario, model = self._scenario, self._scenario.channels
        shape = (scenario.num_clusters, scenario.num_channels)
        fading, frequency = np.empty(shape), []
        for n, devices in enumerate(scenario.clusters):
            # NumPy fills short seeds up with zeros, to four words: five that end in another number than 0 are no draw
            # of the scenario's own.
            generator = np.random.default_rng([scenario.seed, self._seed, number, n, 2])
            share = generator.uniform(*model.speed_factor[n], len(devices))
            frequency.append(share * np.array([d.frequency for d in devices]))
            floor = model.fading_floor[n]
            fading[n] = floor + (1 - floor) * generator.exponential(1.0, shape[1])
        of_channels = np.random.default_rng([scenario.seed, self._seed, number, 0, 1])
        interference = of_channels.uniform(*model.interference_w, shape[1])
        bandwidth = np.array([u.bandwidth_hz for u in scenario.uplinks])
        return NetworkState(
            number=number,
            frequency=tuple(frequency),
            gain=np.array(model.large_scale_gain) * fading,
            interference_w=np.broadcast_to(interference, shape),
            bandwidth_hz=np.broadcast_to(bandwidth[:, None], shape),
        )
