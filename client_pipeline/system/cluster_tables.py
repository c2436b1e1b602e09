"""Clusters of a scenario file: all alike, or each ``[[cluster]]`` table with keys that override the file's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_pipeline.system.devices import DeviceProfile, UplinkProfile
from client_pipeline.system.radio import Array
from client_pipeline.system.scenario_table import MOST_COUNT, Quantity, ScenarioTable, draw_each
from client_pipeline.system.units import from_db, giga, mega

NOT_NEGATIVE = "of at least 0"

_DEVICE = {
    "flop-per-cycle": Quantity(),
    "frequency-ghz": Quantity(giga),
    "memory-gb": Quantity(giga),
    "kappa": Quantity(default=1e-27),
    "energy-budget-j": Quantity(default=5.0),
}
_SPEED_FACTOR = Quantity(default=(0.7, 1.0))
_LINK = {
    "power-w": Quantity(default=(0.07, 0.1)),
    "bandwidth-mhz": Quantity(mega, default=0.5),
    "gain-db": Quantity(from_db, "any", default=-30.0),
    "interference-w": Quantity(sign=NOT_NEGATIVE, default=5e-10),
}
_UPLINK = {
    "bandwidth-mhz": Quantity(mega, default=(0.4, 0.6)),
    "max-power-w": Quantity(default=0.5),
    "energy-budget-j": Quantity(default=10.0),
    "mean-energy-j": Quantity(),
}
_CHANNEL = {
    "gain-db": Quantity(sign="any", default=(-0.12, -0.08)),
    "distance-m": Quantity(default=1.0),
    "path-loss-exponent": Quantity(sign=NOT_NEGATIVE, default=0.0),
    "shadowing-db": Quantity(sign=NOT_NEGATIVE, default=0.0),
    "fading-floor": Quantity(sign=NOT_NEGATIVE, default=0.2),
}
_INTERFERENCE = Quantity(sign=NOT_NEGATIVE, default=(0.06, 0.08))
_DATA_SHARE = Quantity(default=1.0)

CLUSTER_TABLES: dict[str, tuple[str, ...]] = {
    "device": (*_DEVICE, "speed-factor"),
    "link": tuple(_LINK),
    "uplink": tuple(_UPLINK),
    "channel": (*_CHANNEL, "interference-w"),
}
"""Tables that describe clusters, at the file's top or in a ``[[cluster]]``, with their keys."""
_CLUSTER_KEYS = ("name", "count", "devices", "data-share")
_LONGEST_NAME = 60
_MOST_DEVICES = 100_000

# Streams of draws; [seed, n] and [seed, n, 3] are of cluster n alone, the others have a number for each cluster.
_UPLINKS, _DISTANCES, _GAINS, _NUM_DEVICES, _DATA_SHARES = 1, 2, 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class ClusterTables:
    """One cluster as a file describes it, before anything is drawn."""

    name: str
    """Name of the site; empty: none."""
    num_devices: int
    """K_n."""
    cluster: ScenarioTable
    """Its ``[[cluster]]``; empty where clusters are all alike."""
    device: ScenarioTable
    link: ScenarioTable
    uplink: ScenarioTable
    channel: ScenarioTable


class ScenarioClusters:
    """The clusters of a file, with everything that is drawn once for each.

    A cluster's draws depend on the seed and its index alone: it keeps its devices when others come, go or change.

    Parameters
    ----------
    raw : the whole file
    top : its top-level keys
    seed : of the draws
    location : names the file in messages

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    """

    def __init__(self, raw: Mapping[str, Any], top: ScenarioTable, seed: int, location: str) -> None:
        self._seed, self._location = seed, location
        self._unequal = "cluster" in raw
        self._tables = {
            name: ScenarioTable(raw.get(name, {}), name, keys, location) for name, keys in CLUSTER_TABLES.items()
        }
        if not self._unequal and "device" not in raw:
            raise ValueError(f"{location}: missing table [device]")
        self._all = self._unequal_clusters(raw, top) if self._unequal else self._equal_clusters(raw, top)
        self._check_names()
        if (num_devices := sum(cluster.num_devices for cluster in self._all)) > _MOST_DEVICES:
            raise ValueError(
                f"{location}: devices: expected at most {_MOST_DEVICES:,} of all clusters together, found "
                f"{num_devices:,}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites, (N,); empty where a cluster has none."""
        return tuple(cluster.name for cluster in self._all)

    def data_shares(self) -> tuple[float, ...]:
        """Relative weight of each cluster's training data, (N,)."""
        generator = np.random.default_rng([self._seed, 0, _DATA_SHARES])
        return tuple(map(float, draw_each([c.cluster for c in self._all], "data-share", _DATA_SHARE, generator)))

    def devices(self) -> tuple[tuple[DeviceProfile, ...], ...]:
        """Devices of each cluster, (N,) of (K_n,)."""
        return tuple(
            # A key of its own stream: one key more or less does not change the draws of the others.
            _devices(cluster, n, np.random.default_rng([self._seed, n]))
            for n, cluster in enumerate(self._all)
        )

    def speed_factors(self) -> tuple[tuple[float, float], ...]:
        """Range of each cluster's share of its devices' frequency, (N, 2)."""
        factors = tuple(cluster.device.limits("speed-factor", _SPEED_FACTOR) for cluster in self._all)
        for cluster, (_, high) in zip(self._all, factors, strict=True):
            if high > 1:
                raise ValueError(f"{cluster.device.place('speed-factor')}: expected at most 1, found {high:g}")
        return factors

    def uplinks(self) -> tuple[UplinkProfile, ...]:
        """Uplinks of the control units, (N,)."""
        tables = [cluster.uplink for cluster in self._all]
        one_stream = np.random.default_rng([self._seed, 0, _UPLINKS])
        drawn_values = {}
        for i, key in enumerate(("bandwidth-mhz", "max-power-w", "energy-budget-j")):
            # Where clusters are alike, all keys share one stream, in which a second range begins after the first's N
            # numbers: there it depends on N. With [[cluster]] each key has its own; the first key's is the same.
            own_stream = np.random.default_rng([self._seed, 0, _UPLINKS, i]) if self._unequal and i else one_stream
            drawn_values[key] = draw_each(tables, key, _UPLINK[key], own_stream)
        return tuple(
            UplinkProfile(
                bandwidth_hz=float(drawn_values["bandwidth-mhz"][n]),
                max_power_w=float(drawn_values["max-power-w"][n]),
                energy_budget_j=float(drawn_values["energy-budget-j"][n]),
                mean_energy_j=table.optional("mean-energy-j", _UPLINK["mean-energy-j"]),
            )
            for n, table in enumerate(tables)
        )

    def large_scale_gains(self, num_channels: int) -> tuple[tuple[float, ...], ...]:
        """Gain of each cluster on each channel before fading, (N, J), linear."""
        tables = [cluster.channel for cluster in self._all]
        distances = draw_each(
            tables, "distance-m", _CHANNEL["distance-m"], np.random.default_rng([self._seed, 0, _DISTANCES])
        )
        gains = []
        for n, (table, distance) in enumerate(zip(tables, distances, strict=True)):
            exponent = table.number("path-loss-exponent", _CHANNEL["path-loss-exponent"])
            deviation = table.number("shadowing-db", _CHANNEL["shadowing-db"])
            generator = np.random.default_rng([self._seed, n, _GAINS])
            gain_db = table.draw("gain-db", _CHANNEL["gain-db"], num_channels, generator, " (one for each channel)")
            # Shadowing is of the place: the same on all channels.
            gain_db = gain_db - 10 * exponent * np.log10(distance) + deviation * generator.standard_normal()
            gains.append(_linear_gains(gain_db, table))
        return tuple(gains)

    def fading_floors(self) -> tuple[float, ...]:
        """Smallest share of each cluster's gain under fading, (N,)."""
        floors = tuple(c.channel.number("fading-floor", _CHANNEL["fading-floor"]) for c in self._all)
        for cluster, floor in zip(self._all, floors, strict=True):
            if floor > 1:
                raise ValueError(f"{cluster.channel.place('fading-floor')}: expected at most 1, found {floor:g}")
        return floors

    def interference(self) -> tuple[float, float]:
        """Range of each channel's interference, the same for all clusters [W]."""
        return self._tables["channel"].limits("interference-w", _INTERFERENCE)

    def _equal_clusters(self, raw: Mapping[str, Any], top: ScenarioTable) -> list[ClusterTables]:
        if isinstance(raw.get("clusters"), list | dict):
            raise ValueError(
                f"{self._location}: clusters: expected a number of equal clusters, found {raw['clusters']!r}; a table "
                "of one cluster's own values is [[cluster]]"
            )
        none_own = ScenarioTable({}, "cluster", _CLUSTER_KEYS, self._location)
        return [
            ClusterTables(name="", num_devices=self._num_devices(top, n), cluster=none_own, **self._tables)
            for n in range(top.count("clusters"))
        ]

    def _unequal_clusters(self, raw: Mapping[str, Any], top: ScenarioTable) -> list[ClusterTables]:
        """Expand the ``[[cluster]]`` tables, in the file's order."""
        tables, location = raw["cluster"], self._location
        if not isinstance(tables, list) or not tables:
            raise ValueError(
                f"{location}: cluster: expected one or more tables [[cluster]], in double brackets, found {tables!r}; "
                "a number of equal clusters is the key 'clusters'"
            )
        clusters: list[ClusterTables] = []
        for i, own_raw in enumerate(tables):
            name = f"cluster[{i}]"
            cluster_table = ScenarioTable(own_raw, name, (*_CLUSTER_KEYS, *CLUSTER_TABLES), location)
            nested = {key: self._nested(own_raw, name, key) for key in CLUSTER_TABLES}
            if "devices" in raw and own_raw.get("devices", raw["devices"]) != raw["devices"]:
                raise ValueError(
                    f"{location}: {name}.devices: found {own_raw['devices']!r}, but the file's key devices says "
                    f"{raw['devices']!r} for every cluster; remove that key and give each [[cluster]] its own devices"
                )
            count = cluster_table.count("count", 1)
            if (together := len(clusters) + count) > MOST_COUNT:
                raise ValueError(
                    f"{location}: {name}.count: expected at most {MOST_COUNT:,} clusters of all [[cluster]] together, "
                    f"found {together:,}"
                )
            site = _site_name(cluster_table, own_raw)
            counted = top if "devices" in raw else cluster_table
            for place in range(count):
                clusters.append(
                    ClusterTables(
                        name=f"{site} {place + 1}" if site and count > 1 else site,
                        num_devices=self._num_devices(counted, len(clusters)),
                        cluster=cluster_table,
                        **nested,
                    )
                )
        if "clusters" in raw and (expected := top.count("clusters")) != len(clusters):
            raise ValueError(
                f"{location}: clusters: found {expected}, but the [[cluster]] tables describe {len(clusters)}; remove "
                "the key clusters, or correct it or a table's count"
            )
        return clusters

    def _nested(self, own_raw: Mapping[str, Any], name: str, key: str) -> ScenarioTable:
        if key == "channel" and isinstance(own_raw.get(key), dict) and "interference-w" in own_raw[key]:
            raise ValueError(
                f"{self._location}: {name}.channel.interference-w: a channel's interference is the same for all "
                "clusters; expected it in the file's own [channel] alone"
            )
        keys = [k for k in CLUSTER_TABLES[key] if k != "interference-w" or key != "channel"]
        return ScenarioTable(own_raw.get(key, {}), f"{name}.{key}", keys, self._location, self._tables[key])

    def _num_devices(self, table: ScenarioTable, n: int) -> int:
        return table.whole_number("devices", np.random.default_rng([self._seed, n, _NUM_DEVICES]))

    def _check_names(self) -> None:
        for name, times in Counter(self.names).items():
            if name and times > 1:
                numbers = ", ".join(str(n) for n, other in enumerate(self.names) if other == name)
                raise ValueError(
                    f"{self._location}: cluster.name: the clusters {numbers} are all called {name!r}; expected a name "
                    "of its own for each site"
                )


def _site_name(own: ScenarioTable, own_raw: Mapping[str, Any]) -> str:
    name = own_raw.get("name", "")
    plain = isinstance(name, str) and name == name.strip() and name.isprintable() and len(name) <= _LONGEST_NAME
    if not plain or ("name" in own_raw and not name):
        raise ValueError(
            f"{own.place('name')}: expected a text of 1 to {_LONGEST_NAME} printable characters without blanks at its "
            f"ends, found {name!r}"
        )
    return str(name)


def _devices(cluster: ClusterTables, n: int, generator: np.random.Generator) -> tuple[DeviceProfile, ...]:
    num_devices = cluster.num_devices
    hint = f" (cluster {n} has {num_devices} devices)"
    of_device = {key: cluster.device.draw(key, q, num_devices, generator, hint) for key, q in _DEVICE.items()}
    of_link = {key: cluster.link.draw(key, q, num_devices, generator, hint) for key, q in _LINK.items()}
    return tuple(
        DeviceProfile(
            flop_per_cycle=float(of_device["flop-per-cycle"][k]),
            frequency=float(of_device["frequency-ghz"][k]),
            memory=float(of_device["memory-gb"][k]),
            kappa=float(of_device["kappa"][k]),
            energy_budget_j=float(of_device["energy-budget-j"][k]),
            link_power_w=float(of_link["power-w"][k]),
            link_bandwidth_hz=float(of_link["bandwidth-mhz"][k]),
            link_gain=float(of_link["gain-db"][k]),
            link_interference_w=float(of_link["interference-w"][k]),
        )
        for k in range(num_devices)
    )


def _linear_gains(gains_db: Array, table: ScenarioTable) -> tuple[float, ...]:
    gains: list[float] = []
    for gain_db in map(float, gains_db):
        try:
            gain = from_db(gain_db)
        except OverflowError:
            gain = math.inf
        if not 0 < gain < math.inf:
            raise ValueError(
                f"{table.place('gain-db')}: expected a gain that can be held as a plain factor, found {gain_db:g} dB "
                "with path loss and shadowing; check distance-m, path-loss-exponent and shadowing-db, too"
            )
        gains.append(gain)
    return tuple(gains)
