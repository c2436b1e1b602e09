"""Token slices by brute force: a step's time and a slice's cost, written from their definitions."""

import functools

from helpers.oracles import _actions_of


def sliced_makespan(schedule, times, num_slices, decoder=0.0):
    """Longest path of a step with blocking links; ``times`` as the simulator takes them, columns i Q + q."""
    forward, backward, there, back, weight = (t.tolist() for t in times)
    num_stages, m = len(forward), len(forward[0]) // num_slices

    def column(i, q):
        return i * num_slices + q

    lists = []
    for s in range(num_stages):
        own = []
        for kind, i in _actions_of(schedule, s, num_stages, m):
            own += [(kind, i, q) for q in (range(num_slices) if kind == "F" else range(num_slices - 1, -1, -1))]
        lists.append(own)

    @functools.cache
    def start(s, place):
        """Return the start of the action at a place of a device's list: it is free, and the input is there."""
        kind, i, q = lists[s][place]
        free = sent(s, place - 1) if place else 0.0
        return max(free, arrival(kind, s, i, q))

    @functools.cache
    def end(s, place):
        kind, i, q = lists[s][place]
        later = weight[s][column(i, q)] if schedule == "zb-h1" else 0.0
        seconds = {"F": forward[s][column(i, q)], "B": backward[s][column(i, q)] - later, "W": later}[kind]
        return start(s, place) + seconds

    @functools.cache
    def sent(s, place):
        """Return the time when the device has sent its result and is free."""
        kind, i, q = lists[s][place]
        if kind == "F" and s < num_stages - 1:
            return end(s, place) + there[s][column(i, q)]
        if kind == "B" and s > 0:
            return end(s, place) + back[s - 1][column(i, q)]
        return end(s, place)

    def arrival(kind, s, i, q):
        if kind == "W":
            return end(s, lists[s].index(("B", i, q)))
        if kind == "F":
            return sent(s - 1, lists[s - 1].index(("F", i, q))) if s else 0.0
        if s == num_stages - 1:
            # The decoder has the micro-batch when its last slice is through, and answers for all of it.
            return max(end(s, lists[s].index(("F", i, p))) for p in range(num_slices)) + decoder
        return sent(s + 1, lists[s + 1].index(("B", i, q)))

    return max(sent(s, place) for s in range(num_stages) for place in range(len(lists[s])))


def pairs_seen(length, num_slices):
    """Return each slice's share of all pairs of a token and one that it sees, each token half of itself."""
    size = length // num_slices
    seen = [
        sum(position + 0.5 for position in range(q * size, (q + 1) * size)) / (length**2 / 2) for q in range(num_slices)
    ]
    return seen
