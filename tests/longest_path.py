"""The makespan of a pipeline as the longest path through its actions and messages, independent of the simulator."""

from __future__ import annotations

import functools


def makespan(schedule, forward, backward, forward_link, backward_link, *, links="blocking", decoder=0.0, medium=None):
    """Longest path; ``medium`` lists the messages of a shared medium in the order in which they were sent.

    Nodes are ("F" | "B" | "FB", stage, i) and ("z" | "g" | "zg", link, i).
    """
    num_stages, m = len(forward), len(forward[0])
    lists = [_actions(schedule, s, num_stages, m) for s in range(num_stages)]
    duration, before = {}, {}
    for s, own in enumerate(lists):
        previous = None
        for kind, i in own:
            node = (kind, s, i)
            duration[node] = {"F": forward[s][i], "B": backward[s][i], "FB": forward[s][i] + backward[s][i]}[kind]
            before[node] = [] if previous is None else [previous]
            if kind in ("F", "FB") and s > 0:
                before[node].append(("z" if kind == "F" else "zg", s - 1, i))
            if kind == "B" and s < num_stages - 1:
                before[node].append(("g", s, i))
            if kind == "B" and s == num_stages - 1:
                duration["decoder", s, i] = decoder
                before["decoder", s, i] = [("F", s, i)]
                before[node].append(("decoder", s, i))
            previous = node
            message = None
            if kind in ("F", "FB") and s < num_stages - 1:
                message = ("z" if kind == "F" else "zg", s, i)
                duration[message] = forward_link[s][i] + (backward_link[s][i] if kind == "FB" else 0.0)
            if kind == "B" and s > 0:
                message = ("g", s - 1, i)
                duration[message] = backward_link[s - 1][i]
            if message:
                before[message] = [node]
                if links == "blocking":
                    previous = message
    if links == "overlapping":
        for s, own in enumerate(lists):
            for message_kind, kind, link in (("z", "F", s), ("zg", "FB", s), ("g", "B", s - 1)):
                sent = [(message_kind, link, i) for k, i in own if k == kind and (message_kind, link, i) in before]
                for first, second in zip(sent, sent[1:], strict=False):
                    before[second].append(first)
    if links == "shared":
        assert sorted(medium) == sorted(n for n in before if n[0] in ("z", "g", "zg"))
        for first, second in zip(medium, medium[1:], strict=False):
            before[second].append(first)

    @functools.cache
    def end(node):
        return max((end(b) for b in before[node]), default=0.0) + duration[node]

    return max(end(node) for node in before)


def _actions(schedule, stage, num_stages, m):
    if schedule == "fused":
        return [("FB", i) for i in range(m)]
    if schedule == "gpipe":
        return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]
    ahead = min(num_stages - 1 - stage, m)
    order = [("F", i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            order.append(("F", ahead + i))
        order.append(("B", i))
    return order
