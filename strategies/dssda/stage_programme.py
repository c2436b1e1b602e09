"""The least sum of S stages within a bottleneck: a dynamic programme over the devices of a cluster, exact."""

from __future__ import annotations

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.block_price import StageSums


def least_sums(sums: StageSums, max_size: int) -> Array:
    """A(T) for S = 1 to ``max_size``, (P, S); inf where no S devices hold the L TEBs."""
    return np.asarray(_states(sums, max_size)[-1][:, 1, 1:, -1])


def least_segments(sums: StageSums, size: int) -> tuple[list[int], int]:
    """TEBs of each device and the last device, for the least sum of S segments at a single pair of m and T."""
    states = _states(sums, size)
    teb, link, middle, end = sums.teb_s[0], sums.link_s[0], sums.middle[0], sums.end[0]
    delta, last = [0] * len(teb), -1
    num_chosen, blocks = 1, sums.num_blocks
    for k in range(len(teb) - 1, -1, -1):
        value, previous_state = states[k + 1][0, num_chosen, size, blocks], states[k][0]
        if previous_state[num_chosen, size, blocks] == value:
            continue
        options = [(count, False) for count in range(1, min(int(middle[k]), blocks) + 1)]
        options += [(count, True) for count in range(1, min(int(end[k]), blocks) + 1) if num_chosen]
        for count, ends in options:
            cost = count * teb[k] + (0.0 if ends else link[k])
            if previous_state[0 if ends else num_chosen, size - 1, blocks - count] + cost == value:
                delta[k], size, blocks = count, size - 1, blocks - count
                if ends:
                    last, num_chosen = k, 0
                break
    return delta, last


def _states(sums: StageSums, max_size: int) -> list[Array]:
    """Least sums after each device, (P, last chosen or not, S + 1, L + 1) each."""
    middle, end, num_blocks = sums.middle, sums.end, sums.num_blocks
    state = np.full((len(middle), 2, max_size + 1, num_blocks + 1), np.inf)
    state[:, 0, 0, 0] = 0.0
    states = [state]
    for k in range(middle.shape[1]):
        next_state = state.copy()
        chosen = min(k + 1, max_size)  # of the devices so far
        for blocks in range(1, int(max(middle[:, k].max(), end[:, k].max())) + 1):
            seconds = blocks * sums.teb_s[:, k]
            source = state[:, :, :chosen, : num_blocks + 1 - blocks]
            target = next_state[:, :, 1 : chosen + 1, blocks:]
            inner = np.where(middle[:, k] >= blocks, seconds + sums.link_s[:, k], np.inf)
            np.minimum(target, source + inner[:, None, None, None], out=target)
            outer = np.where(end[:, k] >= blocks, seconds, np.inf)
            np.minimum(target[:, 1], source[:, 0] + outer[:, None, None], out=target[:, 1])
        state = next_state
        states.append(state)
    return states
