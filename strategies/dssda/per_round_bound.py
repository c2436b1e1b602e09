"""C11 as printed: the bound Gamma <= Gamma_max in every round, where C10 asks for the mean over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Infeasibility
from strategies.dssda.convergence import BoundParameters, gamma
from strategies.dssda.instance import Instance


@dataclass(frozen=True, kw_only=True)
class PerRoundBound:
    """C11: Gamma_n = g0 (phi^2 S_n^2 / L + epsilon_n + phi^2) <= Gamma_max, Eq. (28), in this very round.

    It leaves nothing for the virtual queue to do, Y = 0; so it is off unless asked for. It binds the matched clusters:
    the Gamma of the others is not for the round to choose.
    """

    parameters: BoundParameters
    gamma_max: float

    def distortion_left(self, num_segments: int, num_blocks: int) -> float:
        """Distortion that C11 leaves to S segments of L TEBs; negative where S alone exceeds it."""
        return (self.gamma_max - float(gamma(num_segments, num_blocks, 0.0, self.parameters))) / self.parameters.g0

    def restrict(self, instance: Instance, sizes: Sequence[int | None]) -> tuple[Instance, NDArray[np.bool_]]:
        """The instance with C11 as limits of the distortion, from which powers have a lower end.

        Parameters
        ----------
        sizes : (N,), S of each cluster; None for one without segments

        Returns
        -------
        The instance, and whether C11 lets a cluster have a channel at all, (N,).
        """
        clusters, possible = [], []
        for cluster, size in zip(instance.clusters, sizes, strict=True):
            left = -np.inf if size is None else self.distortion_left(size, instance.L)
            limits = [limit for limit in (cluster.up.eps_max, left) if limit is not None and 0 < limit < np.inf]
            clusters.append(replace(cluster, up=replace(cluster.up, eps_max=min(limits, default=None))))
            possible.append(left > 0)
        return replace(instance, clusters=tuple(clusters)), np.array(possible)

    def faults(
        self, instance: Instance, sizes: Sequence[int | None], least_distortion: Array
    ) -> tuple[Infeasibility, ...]:
        """Clusters that break C11 on every channel; if there are none, too few have channels of their own.

        Parameters
        ----------
        sizes : (N,), the least S of each cluster
        least_distortion : (N,), on its best channel at the largest power
        """
        faults = []
        for n, (size, distortion) in enumerate(zip(sizes, least_distortion, strict=True)):
            if size is None or not np.isfinite(distortion):
                continue
            needs = float(gamma(size, instance.L, distortion, self.parameters))
            if needs > self.gamma_max:
                remedy = f"that is Gamma with S = {size} and the largest power; raise Gamma_max or the power allowed"
                faults.append(Infeasibility(n, "C11", needs, self.gamma_max, remedy))
        needed = instance.num_matched
        remedy = f"Gamma_max = {self.gamma_max:.6g} leaves too few clusters channels of their own; raise it"
        return tuple(faults) or (Infeasibility(None, "C5", needed, needed - 1, remedy),)


UNBOUNDED = PerRoundBound(parameters=BoundParameters(g0=1.0, phi=0.0), gamma_max=np.inf)
"""C11 off."""
