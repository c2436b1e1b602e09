"""Scenario files: a network of clusters in natural units (dB, dBm, MHz, GHz, GB, Mbit), converted to SI at load.

A quantity is a number, a range ``{min, max}`` (drawn once, seeded) or a list with one entry for each device, cluster or
channel. Keys that are absent have the values of Table II, as calibrated in ``configs/scenarios/table2.toml``.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from client_pipeline.system.devices import DeviceProfile, UplinkProfile
from client_pipeline.system.energy import EnergyMode
from client_pipeline.system.latency import Scaling, Tail
from client_pipeline.system.scenario_table import Quantity, ScenarioTable
from client_pipeline.system.units import from_db, giga, mega, watt_from_dbm

SCENARIO_FORMAT = "collapipe-scenario/1"
_NOT_NEGATIVE = "of at least 0"

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
    "interference-w": Quantity(sign=_NOT_NEGATIVE, default=5e-10),
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
    "path-loss-exponent": Quantity(sign=_NOT_NEGATIVE, default=0.0),
    "shadowing-db": Quantity(sign=_NOT_NEGATIVE, default=0.0),
    "fading-floor": Quantity(sign=_NOT_NEGATIVE, default=0.2),
    "interference-w": Quantity(sign=_NOT_NEGATIVE, default=(0.06, 0.08)),
}
_BLOCK = {
    "memory-gb": Quantity(giga),
    "forward-gflop": Quantity(giga, default=2.0),
    "backward-gflop": Quantity(giga, default=2.0),
    "overhead-s": Quantity(sign=_NOT_NEGATIVE, default=0.0),
    "activations-mbit": Quantity(mega, _NOT_NEGATIVE, default=1.25),
    "gradient-mbit": Quantity(mega, _NOT_NEGATIVE, default=1.25),
    "link-latency-s": Quantity(sign=_NOT_NEGATIVE, default=0.0),
    "upload-mbit": Quantity(mega, _NOT_NEGATIVE, default=19.0),
    "upload-energy-mbit": Quantity(mega, _NOT_NEGATIVE),
}
_PLANNER = {
    "v": Quantity(sign=_NOT_NEGATIVE, default=1.0),
    "gamma-max": Quantity(default=2.6),
    "g0": Quantity(default=1.0),
    "phi": Quantity(default=1.0),
    "distortion-scale": Quantity(sign=_NOT_NEGATIVE, default=0.2),
}
_NOISE = Quantity(watt_from_dbm, "any", default=-174.0)

DistortionForm = Literal["paper", "sinr"]
LatencyForm = Literal["eq15", "flowshop"]


@dataclass(frozen=True, kw_only=True)
class ChannelModel:
    """How the uplinks' gains and the devices' speeds come about; see :mod:`client_pipeline.system.channels`."""

    large_scale_gain: tuple[tuple[float, ...], ...]
    """Gain of each cluster on each channel before fading: path loss and shadowing, (N, J), linear."""
    fading_floor: float
    """Fading multiplies the gain by floor + (1 - floor) Exp(1): mean 1."""
    interference_w: tuple[float, float]
    """Range from which each channel's interference is drawn every round [W]."""
    speed_factor: tuple[float, float]
    """Range from which each device's share of its frequency is drawn every round."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What TEBs and uploads cost."""

    o_f: float
    """Forward FLOP of one TEB for one sample."""
    o_b: float
    """Backward FLOP of one TEB: for one micro-batch, or for one sample."""
    o_b_scaling: Scaling
    t0: float
    """Seconds of one TEB for one micro-batch beside its FLOP."""
    z_bits: float
    """Activations on a link [bit]: of a micro-batch, or of a sample."""
    g_bits: float
    """Their gradient, likewise."""
    act_scaling: Scaling
    lat: float
    """Seconds of one micro-batch on a link beside its bits."""
    upload_time_bits: float
    """D_t: a round's upload, activations included [bit]."""
    upload_energy_bits: float
    """D_e: the encoder's part of it [bit]."""
    block_memory: float
    """gamma_0: memory of one TEB with its gradients, optimizer state and stored activations [byte]."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """What is planned, and how it is charged."""

    num_blocks: int
    """L."""
    batch_size: int
    """b."""
    max_micro_batches: int
    """Largest m."""
    local_steps: int
    gradient_accumulation: int = 1
    """Batches of a local step: each goes through the pipeline."""
    v: float
    """V [1/s]."""
    gamma_max: float
    """Threshold of the mean convergence bound, C10."""
    g0: float
    """beta eta^2 / (2N)."""
    phi: float
    distortion_scale: float
    """C of Eq. (25)."""
    distortion: DistortionForm
    latency: LatencyForm
    tail: Tail
    energy: EnergyMode


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A network: N clusters of K devices, J channels."""

    name: str
    clusters: tuple[tuple[DeviceProfile, ...], ...]
    uplinks: tuple[UplinkProfile, ...]
    """Uplinks of the control units, (N,)."""
    num_channels: int
    """J."""
    noise_psd: float
    """N0 [W/Hz]."""
    channels: ChannelModel
    costs: Costs
    planner: PlannerSettings
    seed: int

    @property
    def num_clusters(self) -> int:
        """N."""
        return len(self.clusters)

    @property
    def block_memory(self) -> float:
        """gamma_0 [byte]."""
        return self.costs.block_memory


def load_scenario(name: str, seed: int | None = None) -> Scenario:
    """Load a scenario by the name of a packaged one, or by path.

    Parameters
    ----------
    name : ``table2`` for instance, or a path that ends in .toml
    seed : instead of the file's: other devices and other rounds from the same ranges

    Raises
    ------
    FileNotFoundError, ValueError
        Naming the file and the key at fault.
    """
    content = scenario_content(name)
    try:
        raw = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected TOML, {error}") from error
    return parse_scenario(raw if seed is None else raw | {"seed": seed}, name)


def scenario_content(name: str) -> bytes:
    """Read the file of a scenario, by the name of a packaged one or by path.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    path = Path(name)
    if path.suffix != ".toml":
        packaged = resources.files("configs") / "scenarios" / f"{name}.toml"
        if not packaged.is_file():
            names = sorted(f.name.removesuffix(".toml") for f in (resources.files("configs") / "scenarios").iterdir())
            raise FileNotFoundError(
                f"scenario: no packaged scenario {name!r}; expected one of {', '.join(names)} or a path to a .toml file"
            )
        return packaged.read_bytes()
    if not path.is_file():
        raise FileNotFoundError(f"scenario: no file {path}")
    return path.read_bytes()


def parse_scenario(raw: dict[str, Any], location: str) -> Scenario:
    """Check a scenario and convert it to SI; ``location`` names the file in messages.

    A cluster's draws depend on the seed and its index alone: it keeps its devices when others come or go.

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    """
    tables = ("device", "link", "uplink", "channel", "block", "planner")
    counts = ("format", "clusters", "devices", "channels", "seed", "noise-dbm-per-hz")
    top = ScenarioTable(raw, "", (*counts, *tables), location)
    if raw.get("format") != SCENARIO_FORMAT:
        raise ValueError(f"{location}: format: expected {SCENARIO_FORMAT!r}, found {raw.get('format')!r}")
    for name in ("device", "block"):
        if name not in raw:
            raise ValueError(f"{location}: missing table [{name}]")
    num_clusters, num_devices = top.count("clusters"), top.count("devices")
    num_channels, seed = top.count("channels", 4), top.count("seed", 0, least=0)

    def table(name: str, *keys: str) -> ScenarioTable:
        return ScenarioTable(raw.get(name, {}), name, keys, location)

    device, link = table("device", *_DEVICE, "speed-factor"), table("link", *_LINK)
    uplink, channel = table("uplink", *_UPLINK), table("channel", *_CHANNEL)
    # A key of its own stream: one key more or less does not change the draws of the others.
    clusters = tuple(_devices(device, link, num_devices, np.random.default_rng([seed, n])) for n in range(num_clusters))
    speed_factor = device.limits("speed-factor", _SPEED_FACTOR)
    if speed_factor[1] > 1:
        raise ValueError(f"{location}: device.speed-factor: expected at most 1, found {speed_factor[1]:g}")
    channels = _channels(channel, num_clusters, num_channels, seed, speed_factor, location)
    planner = _planner(table("planner", *_PLANNER, *_PLANNER_COUNTS, *_PLANNER_CHOICES))
    if planner.distortion == "paper" and channels.interference_w[0] == 0:
        raise ValueError(
            f"{location}: channel.interference-w: expected above 0, found 0: Eq. (25) has no finite distortion without "
            'interference and power; set planner.distortion = "sinr"'
        )
    return Scenario(
        name=Path(location).stem,
        clusters=clusters,
        uplinks=_uplinks(uplink, num_clusters, np.random.default_rng([seed, 0, 1])),
        num_channels=num_channels,
        noise_psd=top.number("noise-dbm-per-hz", _NOISE),
        channels=channels,
        costs=_costs(table("block", *_BLOCK, "backward-per", "activations-per")),
        planner=planner,
        seed=seed,
    )


def _devices(
    device: ScenarioTable, link: ScenarioTable, num_devices: int, generator: np.random.Generator
) -> tuple[DeviceProfile, ...]:
    of_device = {key: device.draw(key, q, num_devices, generator) for key, q in _DEVICE.items()}
    of_link = {key: link.draw(key, q, num_devices, generator) for key, q in _LINK.items()}
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


def _uplinks(table: ScenarioTable, num_clusters: int, generator: np.random.Generator) -> tuple[UplinkProfile, ...]:
    keys = ("bandwidth-mhz", "max-power-w", "energy-budget-j")
    drawn_values = {key: table.draw(key, _UPLINK[key], num_clusters, generator) for key in keys}
    mean = table.optional("mean-energy-j", _UPLINK["mean-energy-j"])
    return tuple(
        UplinkProfile(
            bandwidth_hz=float(drawn_values["bandwidth-mhz"][n]),
            max_power_w=float(drawn_values["max-power-w"][n]),
            energy_budget_j=float(drawn_values["energy-budget-j"][n]),
            mean_energy_j=mean,
        )
        for n in range(num_clusters)
    )


def _channels(
    table: ScenarioTable, num_clusters: int, num_channels: int, seed: int, speed: tuple[float, float], location: str
) -> ChannelModel:
    distance = table.draw("distance-m", _CHANNEL["distance-m"], num_clusters, np.random.default_rng([seed, 0, 2]))
    exponent = table.number("path-loss-exponent", _CHANNEL["path-loss-exponent"])
    deviation = table.number("shadowing-db", _CHANNEL["shadowing-db"])
    floor = table.number("fading-floor", _CHANNEL["fading-floor"])
    if floor > 1:
        raise ValueError(f"{location}: channel.fading-floor: expected at most 1, found {floor:g}")
    gains = []
    for n in range(num_clusters):
        generator = np.random.default_rng([seed, n, 3])
        gain_db = table.draw("gain-db", _CHANNEL["gain-db"], num_channels, generator)
        # Shadowing is of the place: the same on all channels.
        gain_db = gain_db - 10 * exponent * np.log10(distance[n]) + deviation * generator.standard_normal()
        gains.append(tuple(_linear_gain(float(v), location) for v in gain_db))
    return ChannelModel(
        large_scale_gain=tuple(gains),
        fading_floor=floor,
        interference_w=table.limits("interference-w", _CHANNEL["interference-w"]),
        speed_factor=speed,
    )


def _linear_gain(gain_db: float, location: str) -> float:
    try:
        gain = from_db(gain_db)
    except OverflowError:
        gain = math.inf
    if not 0 < gain < math.inf:
        raise ValueError(
            f"{location}: channel.gain-db: expected a gain that can be held as a plain factor, found {gain_db:g} dB "
            "with path loss and shadowing; check distance-m, path-loss-exponent and shadowing-db, too"
        )
    return gain


def _costs(table: ScenarioTable) -> Costs:
    value = {key: table.number(key, q) for key, q in _BLOCK.items() if key != "upload-energy-mbit"}
    energy_bits = table.optional("upload-energy-mbit", _BLOCK["upload-energy-mbit"])
    return Costs(
        o_f=value["forward-gflop"],
        o_b=value["backward-gflop"],
        o_b_scaling=table.choice("backward-per", get_args(Scaling), "microbatch"),
        t0=value["overhead-s"],
        z_bits=value["activations-mbit"],
        g_bits=value["gradient-mbit"],
        act_scaling=table.choice("activations-per", get_args(Scaling), "microbatch"),
        lat=value["link-latency-s"],
        upload_time_bits=value["upload-mbit"],
        upload_energy_bits=value["upload-mbit"] if energy_bits is None else energy_bits,
        block_memory=value["memory-gb"],
    )


_PLANNER_COUNTS = {"blocks": 12, "batch-size": 64, "max-micro-batches": 64, "local-steps": 1}
_PLANNER_CHOICES = {
    "distortion": (get_args(DistortionForm), "paper"),
    "latency": (get_args(LatencyForm), "eq15"),
    "tail": (get_args(Tail), "last"),
    "energy": (get_args(EnergyMode), "c9p"),
}


def _planner(table: ScenarioTable) -> PlannerSettings:
    count = {key: table.count(key, default) for key, default in _PLANNER_COUNTS.items()}
    choice = {key: table.choice(key, names, default) for key, (names, default) in _PLANNER_CHOICES.items()}
    number = {key: table.number(key, q) for key, q in _PLANNER.items()}
    return PlannerSettings(
        num_blocks=count["blocks"],
        batch_size=count["batch-size"],
        max_micro_batches=min(count["max-micro-batches"], count["batch-size"]),
        local_steps=count["local-steps"],
        v=number["v"],
        gamma_max=number["gamma-max"],
        g0=number["g0"],
        phi=number["phi"],
        distortion_scale=number["distortion-scale"],
        distortion=choice["distortion"],
        latency=choice["latency"],
        tail=choice["tail"],
        energy=choice["energy"],
    )
