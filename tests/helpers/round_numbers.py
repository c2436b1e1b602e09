"""A planning problem of round numbers, which can be worked out by hand."""

import json

from strategies.dssda.instance_file import parse_instance

DEVICE = {"phi": 10.0, "f": 1e8, "kappa": 1e-25, "p": 0.1, "B": 1e6, "h": 1.0, "I": 0.1, "mem": 3e9, "Emax": 100.0}


UP = {
    "t_bits": 2e6,
    "e_bits": 1e6,
    "Pmax": 0.4,
    "Emax": 1.0,
    "eps_mode": "paper",
    "C": 0.2,
    "eps_max": None,
}


CLUSTER = {"wS": 1.0, "wS2": 10.0, "wP": 2.0, "wE": 3.0, "wG": 5.0, "skip": 7.0, "devices": [DEVICE] * 3, "up": UP}


BY_HAND = {
    "format": "collapipe-instance/1",
    "L": 3,
    "b": 4,
    "m_set": [1, 2],
    "S_min": 1,
    "S_max": 2,
    "V": 100.0,
    "steps": 2,
    "latency": "flowshop",
    "tail": "none",
    "energy": "exact",
    "work": {"o_f": 1e9, "o_b": 2e9, "o_b_scaling": "microbatch", "t0": 0.0},
    "act": {"z_bits": 0.4e6, "g_bits": 0.6e6, "scaling": "microbatch", "lat": 0.0},
    "gamma0": 1e9,
    "N0": 0.0,
    "clusters": [{**CLUSTER, "h": [1.0, 1.0], "I": [0.1, 0.1], "B": [1e6, 1e6]}] * 2,
}


def by_hand(device=None, up=None, **top):
    """The problem with other values: of cluster 0's device 0, of its upload, or of the whole."""
    raw = json.loads(json.dumps(BY_HAND)) | top
    raw["clusters"][0]["devices"][0].update(device or {})
    raw["clusters"][0]["up"].update(up or {})
    return parse_instance(raw, "by hand")
