"""The format ``collapipe-instance/1``: one round's planning problem as JSON, all SI, no dB."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from client_pipeline.documents import json_value
from client_pipeline.near_names import did_you_mean
from client_pipeline.system.energy import EnergyMode, TailEnergy
from client_pipeline.system.latency import LatencyForm, Scaling, Tail
from client_pipeline.system.radio import DistortionForm
from client_pipeline.system.scenario_table import MOST_COUNT
from strategies.dssda.instance import Cluster, Device, Instance, Uplink

INSTANCE_FORMAT = "collapipe-instance/1"
_MOST = 1_000_000
"""Most examples, micro-batches, steps and segments."""


def read_instance(text: str, location: str) -> Instance:
    """Read an instance from JSON text; ``location`` names the file in messages.

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    """
    try:
        raw = json_value(text)
    except ValueError as error:
        raise ValueError(f"{location}: expected JSON, {error}") from error
    return parse_instance(raw, location)


_TOP = {"format", "L", "b", "m_set", "S_min", "S_max", "V", "steps", "latency", "tail", "energy", "work", "act"}
_TOP |= {"gamma0", "N0", "clusters", "tail_energy", "wJ", "band_hz", "gamma_act", "kept_keys_share"}
_OPTIONAL_TOP = {"steps", "S_min", "S_max", "tail", "tail_energy", "wJ", "band_hz", "gamma_act", "kept_keys_share"}


def parse_instance(raw: Any, location: str) -> Instance:
    """Check :func:`read_instance`'s object."""
    top = _Table(raw, location, _TOP, _OPTIONAL_TOP)
    if raw["format"] != INSTANCE_FORMAT:
        raise ValueError(f"{location}: format: expected {INSTANCE_FORMAT!r}, found {raw['format']!r}")
    optional_work = {"t0", "weight_share", "attention_share", "teb_shares"}
    work = _Table(raw["work"], f"{location}: work", {"o_f", "o_b", "o_b_scaling", *optional_work}, optional_work)
    optional_act = {"lat", "z_enc_bits", "downlink_rate", "decoder_s"}
    act = _Table(raw["act"], f"{location}: act", {"z_bits", "g_bits", "scaling"} | optional_act, optional_act)
    m_set = raw["m_set"]
    if not isinstance(m_set, list) or not m_set or not all(_is_count(m) for m in m_set):
        raise ValueError(f"{location}: m_set: expected a list of integers of at least 1, found {m_set!r}")
    if max(m_set) > _MOST:
        raise ValueError(f"{location}: m_set: expected at most {_MOST:,}, found {max(m_set)}")
    s_max = top.get("S_max")
    clusters = raw["clusters"]
    if not isinstance(clusters, list) or not clusters:
        raise ValueError(f"{location}: clusters: expected a list of at least one cluster, found {clusters!r}")
    parsed_clusters = tuple(_parse_cluster(c, f"{location}: clusters[{n}]") for n, c in enumerate(clusters))
    for n, cluster in enumerate(parsed_clusters):
        if len(cluster.B) != len(parsed_clusters[0].B):
            raise ValueError(
                f"{location}: clusters[{n}].B: has {len(cluster.B)} channels, clusters[0] has "
                f"{len(parsed_clusters[0].B)}; expected one value for each of the J channels in every cluster"
            )
    shares = {key: work.number(key) for key in ("weight_share", "attention_share") if key in raw["work"]}
    shares |= {key: top.number(key) for key in ("kept_keys_share",) if key in raw}
    for key, share in shares.items():
        if share > 1:
            table = location if key in raw else f"{location}: work"
            raise ValueError(f"{table}: {key}: expected a share from 0 to 1, found {share:g}")
    gamma0, gamma_act = top.number("gamma0"), top.number("gamma_act") if "gamma_act" in raw else 0.0
    if gamma_act > gamma0:
        raise ValueError(f"{location}: gamma_act: expected a part of gamma0, {gamma0:g}, found {gamma_act:g}")
    return Instance(
        L=top.count("L"),
        b=top.count("b"),
        m_set=tuple(sorted(set(m_set))),
        S_min=top.count("S_min") if "S_min" in raw else 1,
        S_max=None if s_max is None else top.count("S_max"),
        V=top.number("V"),
        steps=top.count("steps") if "steps" in raw else 1,
        wJ=top.number("wJ") if "wJ" in raw else 0.0,
        latency=top.choice("latency", get_args(LatencyForm)),
        tail=top.choice("tail", get_args(Tail)) if "tail" in raw else "none",
        energy=top.choice("energy", get_args(EnergyMode)),
        tail_energy=top.choice("tail_energy", get_args(TailEnergy)) if "tail_energy" in raw else "link",
        o_f=work.number("o_f", positive=True),
        o_b=work.number("o_b"),
        teb_shares=_teb_shares(raw["work"], top.count("L"), location),
        o_b_scaling=work.choice("o_b_scaling", get_args(Scaling)),
        t0=work.number("t0") if "t0" in raw["work"] else 0.0,
        z_bits=act.number("z_bits"),
        g_bits=act.number("g_bits"),
        act_scaling=act.choice("scaling", get_args(Scaling)),
        z_enc_bits=act.number("z_enc_bits") if "z_enc_bits" in raw["act"] else 0.0,
        lat=act.number("lat") if "lat" in raw["act"] else 0.0,
        **{key: act.number(key) for key in ("downlink_rate", "decoder_s") if key in raw["act"]},
        **shares,
        gamma0=gamma0,
        gamma_act=gamma_act,
        memory=None,
        N0=top.number("N0"),
        band_hz=None if top.get("band_hz") is None else top.number("band_hz", positive=True),
        clusters=parsed_clusters,
    )


def _teb_shares(work: Mapping[str, Any], num_blocks: int, location: str) -> tuple[float, ...]:
    if (shares := work.get("teb_shares")) is None:
        return ()
    if not isinstance(shares, list) or len(shares) != num_blocks:
        raise ValueError(
            f"{location}: work: teb_shares: expected a list of {num_blocks} shares, one for each of the L TEBs, "
            f"found {shares!r}"
        )
    numbers = tuple(_number(share, f"{location}: work: teb_shares[{i}]", True, False) for i, share in enumerate(shares))
    if max(numbers) > 1:
        raise ValueError(
            f"{location}: work: teb_shares: expected shares of the costliest TEB's o_f and o_b, at most 1, found "
            f"{max(numbers):g}"
        )
    return numbers if len(set(numbers)) > 1 or numbers[0] != 1 else ()


def _parse_cluster(raw: Any, location: str) -> Cluster:
    weights = {"wS", "wS2", "wP", "wE", "wG", "skip"}
    table = _Table(raw, location, weights | {"devices", "up", "h", "I", "B"}, weights)
    devices = raw["devices"]
    if not isinstance(devices, list) or not devices:
        raise ValueError(f"{location}.devices: expected a list of at least one device, found {devices!r}")
    uplink = _Table(raw["up"], f"{location}.up", set(Uplink.__dataclass_fields__), {"eps_max"})
    return Cluster(
        **{name: table.number(name, any_sign=name in ("wS", "wS2", "skip")) for name in weights & raw.keys()},
        **{name: 0.0 for name in weights - raw.keys()},
        devices=tuple(_parse_device(d, f"{location}.devices[{k}]") for k, d in enumerate(devices)),
        up=Uplink(
            t_bits=uplink.number("t_bits"),
            e_bits=uplink.number("e_bits"),
            Pmax=uplink.number("Pmax", positive=True),
            Emax=uplink.number("Emax"),
            eps_mode=uplink.choice("eps_mode", get_args(DistortionForm)),
            C=uplink.number("C"),
            eps_max=None if uplink.get("eps_max") is None else uplink.number("eps_max", positive=True),
        ),
        h=table.column("h", positive=True),
        I=table.column("I"),
        B=table.column("B", positive=True),
    )


def _parse_device(raw: Any, location: str) -> Device:
    measured = {"t0", "lat"}
    table = _Table(raw, location, set(Device.__dataclass_fields__), measured)
    positive = ("phi", "f", "p", "B", "h")
    names = [name for name in Device.__dataclass_fields__ if name in raw or name not in measured]
    return Device(**{name: table.number(name, positive=name in positive) for name in names})


class _Table:
    """A JSON object whose keys are known, with messages that name file and key."""

    def __init__(self, raw: Any, location: str, keys: set[str], optional: set[str]) -> None:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{location}: expected an object, found {raw!r}")
        for key in raw:
            if key not in keys:
                hint = did_you_mean(key, sorted(keys)) or f"; expected {', '.join(sorted(keys))}"
                raise ValueError(f"{location}: unknown key {key!r}{hint}")
        if missing := sorted(keys - optional - raw.keys()):
            raise ValueError(f"{location}: missing key {missing[0]!r}")
        self._raw, self._location = raw, location

    def get(self, key: str) -> Any:
        return self._raw.get(key)

    def number(self, key: str, *, positive: bool = False, any_sign: bool = False) -> float:
        return _number(self._raw.get(key), f"{self._location}: {key}", positive, any_sign)

    def column(self, key: str, *, positive: bool = False) -> tuple[float, ...]:
        values = self._raw[key]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{self._location}: {key}: expected a list, one number a channel, found {values!r}")
        if len(values) != len(self._raw["B"]):
            raise ValueError(
                f"{self._location}: {key}: has {len(values)} values, B has {len(self._raw['B'])}; "
                "expected one for each channel"
            )
        return tuple(_number(v, f"{self._location}: {key}[{j}]", positive, False) for j, v in enumerate(values))

    def count(self, key: str) -> int:
        value, most = self._raw[key], MOST_COUNT if key == "L" else _MOST
        if not _is_count(value):
            raise ValueError(f"{self._location}: {key}: expected an integer of at least 1, found {value!r}")
        if value > most:
            raise ValueError(f"{self._location}: {key}: expected at most {most:,}, found {value!r}")
        return int(value)

    def choice(self, key: str, names: Sequence[str]) -> Any:
        value = self._raw[key]
        if value not in names:
            raise ValueError(f"{self._location}: {key}: expected one of {', '.join(names)}, found {value!r}")
        return value


def _number(value: Any, location: str, positive: bool, any_sign: bool) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{location}: expected a finite number, found {value!r}")
    if positive and value <= 0:
        raise ValueError(f"{location}: expected a number above 0, found {value!r}")
    if not any_sign and value < 0:
        raise ValueError(f"{location}: expected a number of at least 0, found {value!r}")
    return float(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
