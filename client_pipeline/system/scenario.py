"""Scenario files: a network of clusters in natural units (dB, dBm, MHz, GHz, GB, Mbit), converted to SI at load.

A quantity is a number, a range ``{min, max}`` (drawn once, seeded) or a list with one entry for each device, cluster or
channel. Keys that are absent have the values of Table II, as calibrated in ``configs/scenarios/table2.toml``. Clusters
are all alike, or each as its table ``[[cluster]]`` says; see :mod:`client_pipeline.system.cluster_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from client_pipeline.documents import toml_table
from client_pipeline.near_names import did_you_mean
from client_pipeline.system.cluster_tables import CLUSTER_TABLES, NOT_NEGATIVE, ScenarioClusters
from client_pipeline.system.devices import DeviceProfile, UplinkProfile
from client_pipeline.system.energy import EnergyMode, TailEnergy
from client_pipeline.system.latency import LatencyForm, Scaling, Tail
from client_pipeline.system.radio import DistortionForm
from client_pipeline.system.scenario_table import MOST_COUNT, Quantity, ScenarioTable
from client_pipeline.system.step_costs import PlanForms, StepCosts
from client_pipeline.system.units import giga, mega, watt_from_dbm

SCENARIO_FORMAT = "collapipe-scenario/1"
_BLOCK = {
    "memory-gb": Quantity(giga),
    "forward-gflop": Quantity(giga, default=2.0),
    "backward-gflop": Quantity(giga, default=2.0),
    "weight-gradient-share": Quantity(sign=NOT_NEGATIVE, default=0.5),
    "attention-share": Quantity(sign=NOT_NEGATIVE, default=0.1),
    "kept-keys-share": Quantity(sign=NOT_NEGATIVE, default=0.12),
    "activation-memory-gb": Quantity(giga, NOT_NEGATIVE, default=0.0),
    "overhead-s": Quantity(sign=NOT_NEGATIVE, default=0.0),
    "activations-mbit": Quantity(mega, NOT_NEGATIVE, default=1.25),
    "gradient-mbit": Quantity(mega, NOT_NEGATIVE, default=1.25),
    "link-latency-s": Quantity(sign=NOT_NEGATIVE, default=0.0),
    "upload-mbit": Quantity(mega, NOT_NEGATIVE, default=19.0),
    "upload-energy-mbit": Quantity(mega, NOT_NEGATIVE),
    "upload-activations-mbit": Quantity(mega, NOT_NEGATIVE, default=0.0),
    "downlink-mbit-per-s": Quantity(mega, NOT_NEGATIVE, default=0.0),
    "decoder-s": Quantity(sign=NOT_NEGATIVE, default=0.0),
}
_PLANNER = {
    "v": Quantity(sign=NOT_NEGATIVE, default=1.0),
    "gamma-max": Quantity(default=2.6),
    "participation-max": Quantity(default=0.1),
    "energy-price": Quantity(sign=NOT_NEGATIVE, default=0.0),
    "g0": Quantity(default=1.0),
    "phi": Quantity(default=1.0),
    "distortion-scale": Quantity(sign=NOT_NEGATIVE, default=0.2),
}
_MOST_GAINS = 1_000_000
"""Most gains, of all clusters on all channels."""
_NOISE = Quantity(watt_from_dbm, "any", default=-174.0)

Bandwidth = Literal["channels", "split"]
Bound = Literal["gamma", "participation"]


@dataclass(frozen=True, kw_only=True)
class ChannelModel:
    """Source of the uplinks' gains and the devices' speeds; see :mod:`client_pipeline.system.channels`."""

    large_scale_gain: tuple[tuple[float, ...], ...]
    """Gain of each cluster on each channel before fading: path loss and shadowing, (N, J), linear."""
    fading_floor: tuple[float, ...]
    """Fading multiplies a cluster's gain by floor + (1 - floor) Exp(1): mean 1, (N,)."""
    interference_w: tuple[float, float]
    """Range from which each channel's interference is drawn every round [W]."""
    speed_factor: tuple[tuple[float, float], ...]
    """Range from which the share of its frequency is drawn every round for each device of a cluster, (N, 2)."""


@dataclass(frozen=True, kw_only=True)
class Costs(StepCosts):
    """Costs of TEBs and uploads."""

    upload_time_bits: float
    """D_t: a round's upload, but for ``upload_activation_bits`` [bit]."""
    upload_energy_bits: float
    """D_e: the encoder's part of it [bit]."""
    upload_activation_bits: float = 0.0
    """z_enc of Eq. (11): activations that go up from each micro-batch, or sample, beside D_t [bit]."""
    block_memory: float
    """gamma_0: memory of one TEB with its gradients, optimizer state and stored activations [byte]."""
    activation_memory: float
    """Part of ``block_memory`` that is activations of a whole batch, as GPipe keeps them [byte]."""
    device_memory: float = 0.0
    """Memory that a device needs beside its TEBs, taken off before they are counted (C7) [byte]; 0 but for costs of
    a model."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings(PlanForms):
    """Subject of a plan, and its charges."""

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
    energy_price: float = 0.0
    """Cost of a joule of devices and uploads in the objective, beside V of a second [1/J]."""
    gamma_max: float
    """Threshold of the mean convergence bound, C10."""
    participation_max: float = 0.1
    """Its threshold under ``bound = "participation"``."""
    bound: Bound = "gamma"
    """What the virtual queues keep below its threshold on average: Gamma of Eq. (28); or how much a cluster lacks of
    its share of the updates, :func:`strategies.dssda.convergence.participation_gap`."""
    g0: float
    """beta eta^2 / (2N)."""
    phi: float
    distortion_scale: float
    """C of Eq. (25)."""
    distortion: DistortionForm
    bandwidth: Bandwidth = "channels"
    """``channels``: each control unit has its own bandwidth on whatever channel; ``split``: the matched ones divide as
    much as they would have on average."""

    @property
    def threshold(self) -> float:
        """Threshold of the bound that the queues keep."""
        return self.participation_max if self.bound == "participation" else self.gamma_max


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A network: N clusters, each of its own number K of devices, and J channels."""

    name: str
    clusters: tuple[tuple[DeviceProfile, ...], ...]
    """Devices of each cluster, (N,) of (K,)."""
    names: tuple[str, ...]
    """Sites of the clusters, (N,); empty where a cluster has no name."""
    data_shares: tuple[float, ...]
    """Relative weight of each cluster's share of the training data, (N,)."""
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

    def first(self, num_clusters: int) -> Scenario:
        """The first clusters of the network; its channels stay."""
        channels = replace(
            self.channels,
            large_scale_gain=self.channels.large_scale_gain[:num_clusters],
            fading_floor=self.channels.fading_floor[:num_clusters],
            speed_factor=self.channels.speed_factor[:num_clusters],
        )
        return replace(
            self,
            clusters=self.clusters[:num_clusters],
            names=self.names[:num_clusters],
            data_shares=self.data_shares[:num_clusters],
            uplinks=self.uplinks[:num_clusters],
            channels=channels,
        )


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
        raw = toml_table(content.decode())
    except ValueError as error:
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
                f"{did_you_mean(name, names)}"
            )
        return packaged.read_bytes()
    if not path.is_file():
        raise FileNotFoundError(f"scenario: no file {path}")
    return path.read_bytes()


def parse_scenario(raw: dict[str, Any], location: str) -> Scenario:
    """Check a scenario and convert it to SI; ``location`` names the file in messages.

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    """
    counts = ("format", "clusters", "devices", "channels", "seed", "noise-dbm-per-hz")
    top = ScenarioTable(raw, "", (*counts, "cluster", *CLUSTER_TABLES, "block", "planner"), location)
    if raw.get("format") != SCENARIO_FORMAT:
        raise ValueError(f"{location}: format: expected {SCENARIO_FORMAT!r}, found {raw.get('format')!r}")
    num_channels, seed = top.count("channels", 4), top.count("seed", 0, least=0, most=2**63 - 1)

    def table(name: str, *keys: str) -> ScenarioTable:
        return ScenarioTable(raw.get(name, {}), name, keys, location)

    clusters = ScenarioClusters(raw, top, seed, location)
    if (gains := num_channels * len(clusters.names)) > _MOST_GAINS:
        raise ValueError(
            f"{location}: channels: expected at most {_MOST_GAINS:,} for all clusters together, found {gains:,}"
        )
    if "block" not in raw:
        raise ValueError(f"{location}: missing table [block]")
    devices = clusters.devices()
    channels = ChannelModel(
        large_scale_gain=clusters.large_scale_gains(num_channels),
        fading_floor=clusters.fading_floors(),
        interference_w=clusters.interference(),
        speed_factor=clusters.speed_factors(),
    )
    planner = _planner(table("planner", *_PLANNER, *_PLANNER_COUNTS, *_PLANNER_CHOICES))
    if planner.distortion == "paper" and channels.interference_w[0] == 0:
        raise ValueError(
            f"{location}: channel.interference-w: expected above 0, found 0: Eq. (25) has no finite distortion without "
            'interference and power; set planner.distortion = "sinr"'
        )
    return Scenario(
        name=Path(location).stem,
        clusters=devices,
        names=clusters.names,
        data_shares=clusters.data_shares(),
        uplinks=clusters.uplinks(),
        num_channels=num_channels,
        noise_psd=top.number("noise-dbm-per-hz", _NOISE),
        channels=channels,
        costs=_costs(table("block", *_BLOCK, "backward-per", "activations-per")),
        planner=planner,
        seed=seed,
    )


def _costs(table: ScenarioTable) -> Costs:
    value = {key: table.number(key, q) for key, q in _BLOCK.items() if key != "upload-energy-mbit"}
    energy_bits = table.optional("upload-energy-mbit", _BLOCK["upload-energy-mbit"])
    for key in ("weight-gradient-share", "attention-share", "kept-keys-share"):
        if (share := value[key]) > 1:
            raise ValueError(f"{table.place(key)}: expected a share from 0 to 1, found {share:g}")
    if (kept := value["activation-memory-gb"]) and kept >= value["memory-gb"]:
        raise ValueError(
            f"{table.place('activation-memory-gb')}: expected a part of block.memory-gb, {value['memory-gb'] / 1e9:g}, "
            f"found {kept / 1e9:g}"
        )
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
        upload_activation_bits=value["upload-activations-mbit"],
        downlink_rate=value["downlink-mbit-per-s"],
        decoder_s=value["decoder-s"],
        block_memory=value["memory-gb"],
        weight_share=value["weight-gradient-share"],
        attention_share=value["attention-share"],
        activation_memory=value["activation-memory-gb"],
        kept_keys_share=value["kept-keys-share"],
    )


_PLANNER_COUNTS = {"blocks": 12, "batch-size": 64, "max-micro-batches": 64, "local-steps": 1}
_MOST_EXAMPLES = 1_000_000
"""Most examples of a batch, and most local steps."""
_PLANNER_CHOICES = {
    "distortion": (get_args(DistortionForm), "paper"),
    "latency": (get_args(LatencyForm), "eq15"),
    "tail": (get_args(Tail), "last"),
    "energy": (get_args(EnergyMode), "c9p"),
    "tail-energy": (get_args(TailEnergy), "link"),
    "bandwidth": (get_args(Bandwidth), "channels"),
    "bound": (get_args(Bound), "gamma"),
}


def _planner(table: ScenarioTable) -> PlannerSettings:
    most = {key: _MOST_EXAMPLES for key in ("batch-size", "local-steps")}
    count = {key: table.count(key, default, most=most.get(key, MOST_COUNT)) for key, default in _PLANNER_COUNTS.items()}
    choice = {key: table.choice(key, names, default) for key, (names, default) in _PLANNER_CHOICES.items()}
    number: dict[str, Any] = {key: table.number(key, q) for key, q in _PLANNER.items()}
    return PlannerSettings(
        num_blocks=count["blocks"],
        batch_size=count["batch-size"],
        max_micro_batches=min(count["max-micro-batches"], count["batch-size"]),
        local_steps=count["local-steps"],
        **{key.replace("-", "_"): value for key, value in (number | choice).items()},
    )
