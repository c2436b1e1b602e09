"""Virtual queues: what the rounds so far owe the convergence bound and the energy budgets, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.convergence import BoundParameters

DRIFTS = ("true", "printed", "mixed")


@dataclass(frozen=True)
class Queues:
    """Backlogs after the rounds so far."""

    virtual: Array
    """Y_n, of the bound Gamma <= Gamma_max on average (C10), (N,)."""
    energy: Array
    """Z_n, of the upload energy E_up <= its mean budget on average, (N,) [J]; ours, 0 where it is off."""

    @classmethod
    def empty(cls, num_clusters: int) -> Queues:
        """Before the first round."""
        return cls(np.zeros(num_clusters), np.zeros(num_clusters))

    def after_round(
        self, gamma: Array, gamma_max: float, upload_energy_j: Array, mean_energy_j: Array | None
    ) -> Queues:
        """Update once per round, with what the round really had; the paper does so inside its inner loops.

            Y_n <- max(Y_n + Gamma_n - Gamma_max, 0)      Eq. (29)
            Z_n <- max(Z_n + E_up,n - mean budget, 0)

        Parameters
        ----------
        gamma : Gamma_n, or another bound, (N,)
        gamma_max : its threshold
        upload_energy_j : E_up,n, 0 for a cluster that was not selected, (N,) [J]
        mean_energy_j : budget of a round, (N,) [J]; None: no energy queue
        """
        virtual = np.maximum(self.virtual + gamma - gamma_max, 0.0)
        if mean_energy_j is None:
            return Queues(virtual, self.energy)
        return Queues(virtual, np.maximum(self.energy + upload_energy_j - mean_energy_j, 0.0))

    def to_dict(self) -> dict[str, list[float]]:
        """Return the backlogs as JSON values; floats survive exactly."""
        return {"virtual": self.virtual.tolist(), "energy": self.energy.tolist()}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Sequence[Any]]) -> Queues:
        """Read :meth:`to_dict`'s form."""
        return cls(np.array(raw["virtual"], dtype=np.float64), np.array(raw["energy"], dtype=np.float64))


class DriftWeights(NamedTuple):
    """Costs that the queues put on a round's decision, (N,) each; see :class:`strategies.dssda.instance.Cluster`."""

    wS: Array  # noqa: N815
    wS2: Array  # noqa: N815
    wG: Array  # noqa: N815
    wP: Array  # noqa: N815
    wE: Array  # noqa: N815
    skip: Array


def participation_weights(queues: Queues, data_shares: Array, num_matched: int) -> DriftWeights:
    """Weights of V tau + sum Y_n gap_n + sum Z_n E_up,n with the gaps of :func:`participation_gap`.

    A cluster that is matched gains 1 / (min(N, J) w_n); nothing else of a plan is in its gap.

    Parameters
    ----------
    queues : Y, Z
    data_shares : w_n, in any unit, (N,)
    num_matched : min(N, J)
    """
    none, shares = np.zeros_like(queues.virtual), np.asarray(data_shares, dtype=np.float64) / np.sum(data_shares)
    skip = queues.virtual / (num_matched * shares)
    return DriftWeights(wS=none, wS2=none, wG=none, wP=none, wE=queues.energy, skip=skip)


def drift_weights(
    queues: Queues, parameters: BoundParameters, num_blocks: int, silent_distortion: Array, drift: str = "true"
) -> DriftWeights:
    """Weights of the drift-plus-penalty problem: V tau + sum Y_n Gamma_n + sum Z_n E_up,n, without what is constant.

    Parameters
    ----------
    queues : Y, Z
    parameters : g0 and phi
    num_blocks : L
    silent_distortion : epsilon(0) of a cluster that sends nothing, (N,)
    drift : ``true``: Y_n Gamma_n, which falls as the power grows. ``printed``: Y_n (S_n + p_n), P2 of the paper,
        Eq. (32). It lowers the power just when the queue is long: the queue diverges. ``mixed``: its Y_n p_n beside the
        true drift's term of the segments. The last two for comparison only.

    Raises
    ------
    ValueError
        For another drift.
    """
    if drift not in DRIFTS:
        raise ValueError(f"drift: expected one of {', '.join(DRIFTS)}, found {drift!r}")
    owed, none = queues.virtual * parameters.g0, np.zeros_like(queues.virtual)
    if drift == "printed":
        return DriftWeights(wS=queues.virtual, wS2=none, wG=none, wP=queues.virtual, wE=queues.energy, skip=none)
    mixed = drift == "mixed"
    return DriftWeights(
        wS=none,
        wS2=owed * parameters.phi**2 / num_blocks,
        wG=none if mixed else owed,
        wP=queues.virtual if mixed else none,
        wE=queues.energy,
        skip=owed * silent_distortion,
    )
