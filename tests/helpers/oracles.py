"""Brute force to test against: written from the formulas, without the code under test."""

import functools
import itertools
import math

import numpy as np
from scipy.optimize import brentq

# Matching, power and the round


def cheapest_matching(costs, skip):
    """Cost of the best matching of min(N, J) clusters by trying all; inf if none is possible."""
    num_clusters, num_channels = len(costs), len(costs[0])
    best = math.inf
    for channel_of in all_matchings(num_clusters, num_channels):
        pairs = [skip[n] if j is None else costs[n][j] for n, j in enumerate(channel_of)]
        best = min(best, math.fsum(pairs) if all(map(math.isfinite, pairs)) else math.inf)
    return best


def all_matchings(num_clusters, num_channels):
    """For each matching of min(N, J) clusters, the channel of each cluster or None."""
    if num_clusters <= num_channels:
        yield from itertools.permutations(range(num_channels), num_clusters)
        return
    for clusters in itertools.permutations(range(num_clusters), num_channels):
        yield tuple(clusters.index(n) if n in clusters else None for n in range(num_clusters))


class Upload:
    """One control unit on one channel, as functions of the power in W; arrays welcome."""

    def __init__(self, instance, n, j):
        self.weights = instance["clusters"][n]
        self.up = self.weights["up"]
        self.bandwidth, self.gain, self.interference = (self.weights[name][j] for name in "BhI")
        self.noise = self.interference + self.bandwidth * instance["N0"]
        self.joule = instance.get("wJ", 0.0)

    def seconds(self, p, activations=0.0):
        bits = self.up["t_bits"] + activations
        return bits / self._rate(p) if bits else np.zeros_like(p)

    def energy(self, p):
        return p * self.up["e_bits"] / self._rate(p) if self.up["e_bits"] else np.zeros_like(p)

    def _rate(self, p):
        return self.bandwidth * np.log1p(p * self.gain / self.noise) / math.log(2)

    def distortion(self, p):
        if self.up["eps_mode"] == "paper":
            return self.up["C"] / (p * self.gain + self.interference)
        return self.up["C"] / (1 + p * self.gain / self.noise)

    def cost(self, p):
        w = self.weights
        return (
            w["wP"] * p + (w["wE"] + self.joule) * self.energy(p) + (w["wG"] * self.distortion(p) if w["wG"] else 0.0)
        )

    def allowed(self):
        """Least and largest power, or None. Nothing is known but that energy rises and distortion falls."""
        least, most = self.up["Pmax"] * 1e-12, self.up["Pmax"]
        if self.up["eps_max"] is not None:
            if self.distortion(most) > self.up["eps_max"]:
                return None
            if self.distortion(least) > self.up["eps_max"]:
                least = brentq(lambda p: self.distortion(p) - self.up["eps_max"], least, most, xtol=1e-16, rtol=1e-15)
        if self.energy(least) > self.up["Emax"]:
            return None
        if self.energy(most) > self.up["Emax"]:
            most = brentq(lambda p: self.energy(p) - self.up["Emax"], least, most, xtol=1e-16, rtol=1e-15)
        return least, most

    def powers(self, weight=0.0, count=2000):
        """Allowed powers as a fine grid, with each local minimum of weight t + cost found more closely; or None."""
        allowed = self.allowed()
        if allowed is None:
            return None
        grid = np.unique(np.concatenate([np.linspace(*allowed, count), np.geomspace(*allowed, count)]))

        def total(p):
            return (weight * self.seconds(p) if weight else 0.0) + self.cost(p)

        values = total(grid)
        dips = np.flatnonzero((values[1:-1] <= values[:-2]) & (values[1:-1] < values[2:])) + 1
        closer = [golden_section(total, grid[i - 1], grid[i + 1])[0] for i in dips]
        return np.unique(np.concatenate([grid, closer]))


def golden_section(function, low, high, steps=80):
    """Minimum of a function with one minimum between low and high: the place and the value."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(steps):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return min([(a, at_a), (b, at_b)], key=lambda found: found[1])


def cheapest_upload(instance, n, j, weight=0.0):
    """Least weight t_up + wP p + wE E_up + wG eps by a grid; None without an allowed power."""
    upload = Upload(instance, n, j)
    powers = upload.powers(weight)
    if powers is None:
        return None
    return float(np.min((weight * upload.seconds(powers) if weight else 0.0) + upload.cost(powers)))


def cheapest_round(instance):
    """Objective of the best round by trying all matchings, segments, micro-batches, deadlines; None if infeasible."""
    clusters, num_channels = instance["clusters"], len(instance["clusters"][0]["h"])
    sizes = [best_pipelines(instance, n, key_of=_size_bits_and_joules) for n in range(len(clusters))]
    options = {}
    for n, j in itertools.product(range(len(clusters)), range(num_channels)):
        upload = Upload(instance, n, j)
        powers = upload.powers()
        if powers is not None:
            from_here = np.minimum.accumulate(upload.cost(powers)[::-1])[::-1]
            options[n, j] = upload, powers, from_here
    plans = []
    for channel_of in all_matchings(len(clusters), num_channels):
        pairs = [(n, j) for n, j in enumerate(channel_of) if j is not None]
        if all(pair in options for pair in pairs):
            unmatched = math.fsum(c["skip"] for c, j in zip(clusters, channel_of, strict=True) if j is None)
            for chosen in itertools.product(*(sizes[n].items() for n, _ in pairs)):
                plans.append(_RoundPlan(instance, [(n, options[n, j]) for n, j in pairs], chosen, unmatched))
    if not plans:
        return None
    if instance["V"] == 0:
        return min(plan.cost(np.inf) for plan in plans)
    plans.sort(key=lambda plan: plan.rough)
    close = plans[0].rough + 0.02 * abs(plans[0].rough)
    return min(plan.refined() for plan in plans if plan.rough <= close)


def cheapest_powers(instance, matches):
    """Objective of the best powers and deadline when segments and channels are given.

    ``matches`` has None, or the channel, S, m and pipeline seconds of each cluster.
    """
    matched, chosen, unmatched = [], [], []
    for n, match in enumerate(matches):
        if match is None:
            unmatched.append(instance["clusters"][n]["skip"])
            continue
        channel, size, m, seconds = match
        upload = Upload(instance, n, channel)
        powers = upload.powers()
        from_here = np.minimum.accumulate(upload.cost(powers)[::-1])[::-1]
        matched.append((n, (upload, powers, from_here)))
        chosen.append(((size, activation_bits(instance, m), 0.0), seconds))
    return _RoundPlan(instance, matched, chosen, math.fsum(unmatched)).refined()


class _RoundPlan:
    """A matching with segments; what is left is the deadline, and the power of each control unit."""

    def __init__(self, instance, matched, chosen, unmatched):
        """``chosen``: S, bits of activations and cost of joules, and seconds, of each matched cluster."""
        self.weight = instance["V"]
        self.matched = [
            (option, instance["steps"] * seconds, bits)
            for (_, option), ((_, bits, _), seconds) in zip(matched, chosen, strict=True)
        ]
        sizes = [
            instance["clusters"][n]["wS"] * s + instance["clusters"][n]["wS2"] * s**2 + joules
            for (n, _), ((s, _, joules), _) in zip(matched, chosen, strict=True)
        ]
        self.fixed = math.fsum(sizes) + unmatched
        self.first = max(float(upload.seconds(powers[-1], bits)) + d for (upload, powers, _), d, bits in self.matched)
        if self.weight:
            span = (self.cost(self.first) - self.cost(np.inf)) / self.weight
            shares = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 150), np.linspace(0.01, 1.0, 100)])
            self.deadlines = self.first + span * np.unique(shares)
            values = self.weight * self.deadlines + self.cost(self.deadlines)
            self.best = int(np.argmin(values))
            self.rough = float(values[self.best])

    def cost(self, deadline):
        """All but V T, for deadlines that are not too early."""
        total = self.fixed
        for (upload, powers, from_here), seconds, bits in self.matched:
            left = np.maximum(deadline - seconds, 1e-300)
            bits_per_hz = (upload.up["t_bits"] + bits) / upload.bandwidth
            with np.errstate(over="ignore"):
                least = np.expm1(np.log(2) * bits_per_hz / left) * upload.noise / upload.gain
            least = np.clip(least, powers[0], powers[-1])
            total = total + np.minimum(upload.cost(least), from_here[np.searchsorted(powers, least)])
        return total

    def refined(self):
        around = self.deadlines[max(self.best - 1, 0)], self.deadlines[min(self.best + 1, len(self.deadlines) - 1)]
        _, value = golden_section(lambda t: float(self.weight * t + self.cost(t)), *around)
        return min(self.rough, value)


# Segments, from an instance as JSON values


def activation_bits(instance, m):
    """Bits that the activations of a round's local steps add to an upload."""
    units = instance["b"] if instance["act"]["scaling"] == "sample" else m
    return instance["steps"] * instance["act"].get("z_enc_bits", 0.0) * units


def _size_bits_and_joules(instance, cluster, delta, m, last):
    """Return the terms of a round's cost beside the seconds of a pipeline."""
    joules = 0.0
    if instance.get("wJ"):
        joules = instance["wJ"] * instance["steps"] * math.fsum(device_joules(instance, cluster, delta, m, last))
    return sum(d > 0 for d in delta), activation_bits(instance, m), joules


def device_joules(instance, cluster, delta, m, last):
    """Joules of each device in one local step, all m micro-batches."""
    b_hat = instance["b"] / m
    work, act, joules = instance["work"], instance["act"], []
    flop = b_hat * work["o_f"] + work["o_b"] * (b_hat if work["o_b_scaling"] == "sample" else 1)
    bits = (act["z_bits"] + act["g_bits"]) * (b_hat if act["scaling"] == "sample" else 1)
    for k, (blocks, d) in enumerate(zip(delta, instance["clusters"][cluster]["devices"], strict=True)):
        rate = d["B"] * math.log2(1 + d["p"] * d["h"] / (d["I"] + d["B"] * instance["N0"]))
        sending = 0.0 if blocks == 0 or k == last else d["p"] * (bits / rate + act.get("lat", 0.0))
        joules.append(m * (blocks * d["kappa"] * flop / d["phi"] * d["f"] ** 2 + sending))
    return joules


def best_pipelines(instance, cluster, key_of=None):
    """Least D of a cluster for every S that is possible, over all sets, compositions, last devices and m.

    With ``key_of`` for every value of it that no other of the same S and bits beats in cost and seconds.
    """
    best = {}
    unequal = "teb_shares" in instance["work"]
    lasts_matter = instance["latency"] == "flowshop" or instance.get("tail_energy", "link") == "none"
    for m in instance["m_set"]:
        for delta in _compositions(instance["L"], len(instance["clusters"][cluster]["devices"])):
            size = sum(d > 0 for d in delta)
            if size < instance.get("S_min", 1) or (instance.get("S_max") or size) < size:
                continue
            for last, loads in _ends_and_loads(instance, delta) if unequal else _ends(delta, lasts_matter):
                key = size if key_of is None else key_of(instance, cluster, delta, m, last)
                seconds = pipeline_time(instance, cluster, delta, m, last if lasts_matter else None, loads)
                if seconds is not None and seconds < best.get(key, math.inf):
                    best[key] = seconds
    if key_of is not None and instance.get("wJ"):
        return {
            key: seconds
            for key, seconds in best.items()
            if not any(
                other[:2] == key[:2] and other != key and other[2] <= key[2] and faster <= seconds
                for other, faster in best.items()
            )
        }
    return best


def _ends(delta, lasts_matter):
    """Each possible last device, and the TEBs of all."""
    return [(k, delta) for k, d in enumerate(delta) if d] if lasts_matter else [(None, delta)]


def _ends_and_loads(instance, delta):
    """For each order of the busy devices, the last one, and the work of all where TEBs cost differently."""
    shares = instance["work"]["teb_shares"]
    for order in itertools.permutations(k for k, d in enumerate(delta) if d):
        loads, first = [0.0] * len(delta), 0
        for k in order:
            loads[k] = math.fsum(shares[first : first + delta[k]])
            first += delta[k]
        yield order[-1], loads


def pipeline_time(instance, cluster, delta, m, last, loads=None):
    """D of one decision, None where a device's memory or energy does not allow it.

    ``loads`` are the devices' work in TEBs of o_f and o_b, where these cost differently.
    """
    loads = loads or delta
    b_hat = instance["b"] / m
    work, act = instance["work"], instance["act"]
    flop = b_hat * work["o_f"] + work["o_b"] * (b_hat if work["o_b_scaling"] == "sample" else 1)
    bits = (act["z_bits"] + act["g_bits"]) * (b_hat if act["scaling"] == "sample" else 1)
    stages, links = [], []
    for k, (blocks, d) in enumerate(zip(delta, instance["clusters"][cluster]["devices"], strict=True)):
        if blocks == 0:
            continue
        rate = d["B"] * math.log2(1 + d["p"] * d["h"] / (d["I"] + d["B"] * instance["N0"]))
        tau = bits / rate + act.get("lat", 0.0)
        if last == k and instance["latency"] == "flowshop":
            tau = 0.0
        joules = d["kappa"] * loads[k] * flop / d["phi"] * d["f"] ** 2 + (0.0 if last == k else d["p"] * tau)
        joules *= {"none": 0, "c9p": 1, "c9": 2 * m, "exact": m}[instance["energy"]]
        if blocks * instance["gamma0"] > d["mem"] or joules > d["Emax"]:
            return None
        stages.append(loads[k] * (flop / (d["phi"] * d["f"]) + work.get("t0", 0.0)) + tau)
        links.append(tau)
    if instance["latency"] == "flowshop":
        return sum(stages) + (m - 1) * max(stages)
    return (len(stages) + m - 1) * max(stages) - (max(links) if instance["tail"] == "last" else 0.0)


def _compositions(total, parts):
    """All ways to write ``total`` as ``parts`` numbers of at least 0."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in zip(edges, edges[1:], strict=False))


# The event simulator, as the longest path through actions and messages


def makespan(
    schedule,
    forward,
    backward,
    forward_link,
    backward_link,
    weight=None,
    *,
    links="blocking",
    decoder=0.0,
    medium=None,
    answers_at_once=False,
):
    """Longest path; ``links`` of all or a list; ``medium`` lists the messages of a shared medium as they were sent.

    Nodes are ("F" | "B" | "W" | "FB", stage, i) and ("z" | "g" | "zg", link, i).
    """
    num_stages, m = len(forward), len(forward[0])
    modes = [links] * num_stages if isinstance(links, str) else [*links, None]
    lists = [_actions_of(schedule, s, num_stages - answers_at_once, m) for s in range(num_stages - answers_at_once)]
    if answers_at_once:
        lists.append([(kind, i) for i in range(m) for kind in "FB"])
    duration, before = {}, {}
    for s, own in enumerate(lists):
        previous = None
        for kind, i in own:
            node = (kind, s, i)
            later = weight[s][i] if schedule == "zb-h1" else 0.0
            duration[node] = {
                "F": forward[s][i],
                "B": backward[s][i] - later,
                "W": later,
                "FB": forward[s][i] + backward[s][i],
            }[kind]
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
                if modes[message[1]] == "blocking":
                    previous = message
    if "overlapping" in modes:
        for s, own in enumerate(lists):
            for message_kind, kind, link in (("z", "F", s), ("zg", "FB", s), ("g", "B", s - 1)):
                if not 0 <= link < num_stages - 1 or modes[link] != "overlapping":
                    continue
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


def _actions_of(schedule, stage, num_stages, m):
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
        # Weight gradients come as many micro-batches later as there are stages before this one.
        if schedule == "zb-h1" and i >= stage:
            order.append(("W", i - stage))
    if schedule == "zb-h1":
        order += [("W", i) for i in range(max(0, m - stage), m)]
    return order


def gpipe_latency(forward_s, backward_s, forward_link_s, backward_link_s, num_micro_batches):
    """Makespan of GPipe's action list when a device is busy while it sends, from the times of each stage.

        D = sum(F + c) + (m - 1) max(F + c) + sum(B + c') + (m - 1) max(B + c')

    Entry s of ``backward_link_s`` is of the link from stage s + 1 to s: stage s + 1 is busy while it sends. The last
    stage's links are 0.
    """
    forward = [f + c for f, c in zip(forward_s, forward_link_s, strict=True)]
    backward = [b + c for b, c in zip(backward_s, [0.0, *backward_link_s[:-1]], strict=True)]
    return sum(sum(chunk) + (num_micro_batches - 1) * max(chunk) for chunk in (forward, backward))
