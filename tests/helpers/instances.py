"""Random planning problems, small enough for brute force, as the JSON values of ``collapipe-instance/1``."""

from typing import Any

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan
from helpers import oracles
from strategies.dssda.answer import Answer
from strategies.dssda.evaluation import Match, violations
from strategies.dssda.instance import Instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.planner import plan_round


def random_instance(generator: np.random.Generator, **overrides: Any) -> dict[str, Any]:
    """Draw a problem in which any constraint may bind, infeasible ones included.

    Parameters
    ----------
    generator : draws
    overrides : top-level keys; and ``num_clusters``, ``num_channels``, ``num_devices``, ``upload_scale``
    """
    g = generator
    clusters = overrides.pop("num_clusters", int(g.integers(1, 4)))
    channels = overrides.pop("num_channels", int(g.integers(1, 4)))
    devices = overrides.pop("num_devices", None)
    upload_scale = overrides.pop("upload_scale", 1.0)
    num_blocks, batch = int(g.integers(1, 7)), int(g.integers(2, 17))
    energy = str(g.choice(["none", "c9p", "c9", "exact"]))
    micro_batches = sorted({int(v) for v in g.integers(1, batch + 1, int(g.integers(1, 6)))})
    instance: dict[str, Any] = {
        "format": "collapipe-instance/1",
        "L": num_blocks,
        "b": batch,
        "m_set": micro_batches,
        "S_min": int(g.choice([1, 1, 1, 2])),
        "S_max": None if g.random() < 0.7 else int(g.integers(1, 5)),
        "V": float(g.choice([0.01, 0.1, 0.5, 1.0])),
        "steps": int(g.choice([1, 1, 2, 4])),
        "latency": str(g.choice(["eq15", "flowshop"])),
        "tail": str(g.choice(["none", "last"])),
        "energy": energy,
        "work": {
            "o_f": float(g.uniform(0.5e9, 4e9)),
            "o_b": float(g.uniform(0.5e9, 4e9)),
            "o_b_scaling": str(g.choice(["microbatch", "sample"])),
            "t0": float(g.choice([0.0, g.uniform(0, 0.5)])),
        },
        "act": {
            # Long links matter: some tau_k exceed the time of a TEB.
            "z_bits": float(10 ** g.uniform(5, 7.7)),
            "g_bits": float(10 ** g.uniform(5, 7.7)),
            "scaling": str(g.choice(["microbatch", "sample"])),
            "lat": float(g.choice([0.0, g.uniform(0, 0.5)])),
        },
        "gamma0": 0.375e9,
        "N0": 10 ** (-17.4) * 1e-3,
        "clusters": [],
    }
    instance.update(overrides)
    chunks = {"none": 1, "c9p": 1, "c9": 2 * np.mean(micro_batches), "exact": np.mean(micro_batches)}[
        instance["energy"]
    ]
    for _ in range(clusters):
        count = devices or int(g.integers(1, 5))
        instance["clusters"].append(_cluster(g, count, channels, float(chunks), upload_scale))
    return instance


def _cluster(g: np.random.Generator, devices: int, channels: int, chunks: float, upload_scale: float) -> dict[str, Any]:
    bandwidth = float(g.uniform(0.4e6, 0.6e6))
    bits = float(g.uniform(5e6, 35e6)) * upload_scale
    return {
        "wS": float(g.choice([0.0, g.uniform(0, 1)])),
        "wS2": float(g.choice([0.0, g.uniform(0, 1)])),
        "wP": float(g.choice([0.0, g.uniform(0, 10)])),
        "wE": float(g.choice([0.0, g.uniform(0, 1)])),
        "wG": float(g.choice([0.0, g.uniform(0, 5)])),
        "skip": float(g.choice([0.0, g.uniform(0, 20)])),
        "devices": [
            {
                "phi": float(g.uniform(10, 24)),
                "f": float(g.uniform(0.1e9, 0.8e9)),
                "kappa": 1e-27,
                "p": float(g.uniform(0.07, 0.1)),
                "B": float(g.uniform(0.3e6, 0.7e6)),
                "h": float(10 ** g.uniform(-5, -3)),
                "I": 5e-10,
                "mem": float(g.uniform(0.2e9, 2.5e9)),
                "Emax": float(g.uniform(0.5, 6.0)) * chunks,
            }
            for _ in range(devices)
        ],
        "up": {
            "t_bits": bits,
            "e_bits": float(g.choice([bits, 0.5 * bits])),
            "Pmax": float(g.uniform(0.2, 0.6)),
            "Emax": 10.0,
            "eps_mode": str(g.choice(["paper", "sinr"])),
            "C": float(g.uniform(0.02, 0.3)),
            "eps_max": None if g.random() < 0.8 else float(g.uniform(0.05, 2.0)),
        },
        "h": [float(v) for v in 0.98 * (0.2 + 0.8 * g.exponential(1.0, channels))],
        "I": [float(v) for v in g.uniform(0.06, 0.08, channels)],
        "B": [bandwidth] * channels,
    }


def draw(generator, **up):
    """An instance of one cluster and one channel, with weights that are often zero and any scale of budget."""
    raw = random_instance(generator, num_clusters=1, num_channels=1, num_devices=1)
    cluster = raw["clusters"][0]
    cluster["up"]["Emax"] = float(10 ** generator.uniform(-0.5, 1.5))
    cluster["up"]["Pmax"] = float(10 ** generator.uniform(-1.5, 1.0))
    cluster["h"] = [float(10 ** generator.uniform(-2.0, 1.0))]
    for name in ("wP", "wE", "wG"):
        cluster[name] = float(generator.choice([0.0, 1.0]) * 10 ** generator.uniform(-2.0, 2.0))
    cluster["up"].update(up)
    return parse_instance(raw, "drawn")


def matches_of(answer: Answer) -> list[Match | None]:
    """Return segments, channel and power of each cluster of an answer; None for one that is not selected."""
    return [Match(c.choice, c.channel, c.power_w) if c.selected else None for c in answer.clusters]


def checked_round(raw: dict[str, Any]) -> tuple[Instance, Answer] | None:
    """Hold the planner's answer against brute force; None if both say that there is no plan."""
    instance = parse_instance(raw, "drawn")
    answer, best = plan_round(instance), oracles.cheapest_round(raw)
    if best is None:
        assert answer.status == "infeasible" and answer.infeasible
        return None
    assert answer.status == "optimal" and answer.gap <= 1e-6
    assert answer.objective == pytest.approx(best, rel=5e-6, abs=1e-9)
    assert violations(instance, matches_of(answer)) == []
    return instance, answer


def drawn_plan(generator: np.random.Generator, instance: Instance, num_devices: int) -> ClusterPlan:
    """Draw a plan of one cluster in which all devices are in use."""
    spare = generator.multinomial(instance.L - num_devices, np.full(num_devices, 1 / num_devices))
    order = tuple(int(k) for k in generator.permutation(num_devices))
    m = int(generator.integers(1, instance.b + 1))
    return ClusterPlan(delta=tuple(1 + int(d) for d in spare), order=order, m=m)


def instance_to_dict(instance: Instance) -> dict[str, Any]:
    """Return an instance as JSON values, as ``parse_instance`` reads them."""
    top = {
        name: getattr(instance, name)
        for name in ("L", "b", "S_min", "S_max", "V", "steps", "latency", "tail", "energy", "gamma0", "N0")
    }
    return {
        "format": "collapipe-instance/1",
        **top,
        "tail_energy": instance.tail_energy,
        "wJ": instance.wJ,
        "band_hz": instance.band_hz,
        "gamma_act": instance.gamma_act,
        "kept_keys_share": instance.kept_keys_share,
        "m_set": list(instance.m_set),
        "work": {
            name: getattr(instance, name)
            for name in ("o_f", "o_b", "o_b_scaling", "t0", "weight_share", "attention_share")
        }
        | ({"teb_shares": list(instance.teb_shares)} if instance.teb_shares else {}),
        "act": {
            "z_bits": instance.z_bits,
            "g_bits": instance.g_bits,
            "scaling": instance.act_scaling,
            "lat": instance.lat,
            "downlink_rate": instance.downlink_rate,
            "decoder_s": instance.decoder_s,
            "z_enc_bits": instance.z_enc_bits,
        },
        "clusters": [
            {
                **{name: getattr(c, name) for name in ("wS", "wS2", "wP", "wE", "wG", "skip")},
                "devices": [{k: v for k, v in vars(d).items() if v or k not in ("t0", "lat")} for d in c.devices],
                "up": dict(vars(c.up)),
                "h": list(c.h),
                "I": list(c.I),
                "B": list(c.B),
            }
            for c in instance.clusters
        ],
    }
