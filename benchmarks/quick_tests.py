"""Which files are mutated, and the quick tests of each: none needs Ray or Flower processes."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODULES = (
    "strategies/dssda/*.py",
    "client_pipeline/system/*.py",
    "client_pipeline/link/*.py",
    "client_pipeline/partition/micro_batches.py",
    "client_pipeline/runtime/*.py",
    "strategies/decoder/*.py",
    "strategies/aggregation/*.py",
)

_TESTS: dict[str, str] = {
    "strategies/dssda/answer.py": "evaluation segments",
    "strategies/dssda/block_price.py": "planner_scale",
    "strategies/dssda/bottleneck.py": "segments planner_scale",
    "strategies/dssda/branching.py": "certificate planner planner_scale",
    "strategies/dssda/convergence.py": "convergence queues",
    "strategies/dssda/deadline.py": "certificate planner planner_scale",
    "strategies/dssda/closed_form_segments.py": "segments planner_scale",
    "strategies/dssda/evaluation.py": "evaluation",
    "strategies/dssda/flow_shop.py": "segments planner_scale",
    "strategies/dssda/instance.py": "evaluation power segments",
    "strategies/dssda/instance_file.py": "instance_file plan_command",
    "strategies/dssda/limits.py": "limits segments",
    "strategies/dssda/matching.py": "matching planner_scale",
    "strategies/dssda/paper*.py": "paper",
    "strategies/dssda/per_round_bound.py": "paper",
    "strategies/dssda/planner.py": "planner",
    "strategies/dssda/power.py": "power certificate",
    "strategies/dssda/split_band.py": "split_band",
    "strategies/dssda/least_band.py": "split_band",
    "strategies/dssda/paper_printed.py": "paper_printed",
    "strategies/dssda/priced_choices.py": "energy_price",
    "strategies/dssda/last_device.py": "uploaded_activations",
    "strategies/dssda/joint_power.py": "joint_power round_planner",
    "strategies/dssda/power_control.py": "round_planner joint_power",
    "strategies/dssda/prices.py": "planner_scale",
    "strategies/dssda/queues.py": "queues round_planner",
    "strategies/dssda/round_problem.py": "round_planner policies queues",
    "strategies/dssda/sca.py": "sca paper",
    "strategies/dssda/segments.py": "segments",
    "strategies/dssda/stage_programme.py": "segments planner_scale",
    "client_pipeline/system/channels.py": "channels",
    "client_pipeline/system/costs.py": "costs",
    "client_pipeline/system/devices.py": "scenario policies",
    "client_pipeline/system/energy.py": "energy",
    "client_pipeline/system/latency.py": "latency",
    "client_pipeline/system/radio.py": "radio power",
    "client_pipeline/system/cluster_tables.py": "unequal_clusters scenario",
    "client_pipeline/system/scenario*.py": "scenario",
    "client_pipeline/system/units.py": "scenario radio",
    "client_pipeline/link/activation_codec.py": "activation_codec",
    "client_pipeline/link/address.py": "addresses decoder_tls",
    "client_pipeline/link/base.py": "privacy",
    "client_pipeline/link/cluster_news.py": "cluster_news",
    "client_pipeline/link/compression.py": "update_codec activation_codec",
    "client_pipeline/link/reopened_connection.py": "reopened_connection decoder_stream",
    "client_pipeline/link/frame_limits.py": "frames",
    "client_pipeline/link/frames.py": "frames",
    "client_pipeline/link/hosts.py": "addresses",
    "client_pipeline/runtime/local_decoder.py": "local_decoder tied_stream",
    "client_pipeline/link/privacy.py": "noise privacy",
    "client_pipeline/link/privacy_config.py": "noise privacy",
    "client_pipeline/link/private_link.py": "privacy",
    "client_pipeline/link/stream.py": "decoder_stream tied_stream hostile_decoder",
    "client_pipeline/link/tied.py": "tied_stream",
    "client_pipeline/link/update_codec.py": "update_codec",
    "client_pipeline/runtime/actors.py": "asking_control_units",
    "client_pipeline/runtime/arrangement.py": "arrangement",
    "client_pipeline/runtime/batch_run.py": "batch_run runtime_in_threads",
    "client_pipeline/runtime/block_moves.py": "block_moves runtime_in_threads",
    "client_pipeline/runtime/cluster_checkpoint.py": "cluster_checkpoint control_unit",
    "client_pipeline/runtime/config.py": "config",
    "client_pipeline/runtime/control_unit.py": "control_unit runtime_in_threads",
    "client_pipeline/runtime/data_order.py": "data_order",
    "client_pipeline/runtime/deadline.py": "deadline",
    "client_pipeline/runtime/device.py": "device runtime_in_threads",
    "client_pipeline/runtime/device_pool.py": "device_pool runtime_in_threads",
    "client_pipeline/runtime/frozen_devices.py": "device_pool runtime_in_threads",
    "client_pipeline/runtime/event_simulator.py": "event_simulator",
    "client_pipeline/runtime/fault_config.py": "drawn_faults",
    "client_pipeline/runtime/fault_files.py": "drawn_faults",
    "client_pipeline/runtime/fault_injection.py": "drawn_faults",
    "client_pipeline/runtime/faults.py": "drawn_faults round_faults asking_control_units",
    "client_pipeline/runtime/group.py": "group runtime_in_threads",
    "client_pipeline/runtime/decoder_update.py": "decoder_update decoder_trainer",
    "client_pipeline/runtime/held_memory.py": "held_memory",
    "client_pipeline/runtime/unused_actors.py": "unused_actors",
    "client_pipeline/runtime/machine.py": "machine",
    "client_pipeline/runtime/measurement.py": "measured_links measurement",
    "client_pipeline/runtime/memory.py": "peak_memory",
    "client_pipeline/partition/micro_batches.py": "micro_batches",
    "client_pipeline/runtime/optimizer.py": "optimizer",
    "client_pipeline/runtime/optimizer_config.py": "optimizer",
    "client_pipeline/runtime/pacing.py": "run_actions",
    "client_pipeline/runtime/placement.py": "placement",
    "client_pipeline/runtime/private_ray.py": "private_ray",
    "client_pipeline/runtime/ray_probe.py": "asking_what_answers",
    "client_pipeline/runtime/recovery.py": "recovery_decisions",
    "client_pipeline/runtime/replanning.py": "replanning",
    "client_pipeline/runtime/life_signs.py": "life_signs",
    "client_pipeline/runtime/round_faults.py": "round_faults life_signs",
    "client_pipeline/runtime/schedules.py": "schedules",
    "client_pipeline/runtime/shared_actor.py": "members",
    "client_pipeline/runtime/shared_process.py": "runtime_in_threads",
    "client_pipeline/runtime/speed.py": "replanning",
    "client_pipeline/runtime/snapshots.py": "block_moves runtime_in_threads",
    "client_pipeline/runtime/stage.py": "stage run_actions device",
    "client_pipeline/runtime/transport.py": "stage measured_links",
    "client_pipeline/runtime/verification.py": "split_verification",
    "client_pipeline/runtime/whole.py": "split_verification",
    "client_pipeline/runtime/*.py": "runtime_in_threads",
    "strategies/decoder/config.py": "decoder_config decoder_tls",
    "strategies/decoder/limits.py": "stream_security decoder_barrier",
    "strategies/decoder/member.py": "decoder_barrier decoder_trainer round_of_clusters decoder_stream stream_cuts",
    "strategies/decoder/reception.py": "stream_security decoder_barrier decoder_stream",
    "strategies/decoder/revoked_certificates.py": "decoder_tls",
    "strategies/decoder/round.py": "round_of_clusters decoder_barrier decoder_trainer",
    "strategies/decoder/service.py": "decoder_stream decoder_config stream_security decoder_barrier tied_stream",
    "strategies/decoder/step_limits.py": "step_limits stream_security",
    "strategies/decoder/tokens.py": "stream_security decoder_stream",
    "strategies/decoder/*.py": "decoder_barrier decoder_trainer step_limits decoder_stream",
    "strategies/aggregation/config.py": "aggregator server_optimizer",
    "strategies/aggregation/rules.py": "aggregator",
    "strategies/aggregation/update_rule.py": "aggregator outside_classes",
    "strategies/aggregation/server_optimizers.py": "server_optimizer",
    "strategies/aggregation/accountant.py": "privacy",
    "strategies/aggregation/central_privacy.py": "central_privacy",
    "strategies/aggregation/secagg*.py": "secure_aggregation",
}


def tests_of(file: str) -> tuple[str, ...]:
    """Test files of a module, the most likely to notice first."""
    for pattern, names in _TESTS.items():
        if fnmatch(file, pattern):
            return tuple(test_file(name) for name in names.split())
    raise SystemExit(f"{file}: benchmarks/quick_tests.py names no tests for it")


def test_file(name: str) -> str:
    """Path of ``test_<name>.py`` from the root; its folder mirrors the package."""
    paths = sorted((ROOT / "tests").rglob(f"test_{name}.py"))
    if len(paths) != 1:
        raise SystemExit(f"tests: expected one test_{name}.py, found {len(paths)}")
    return paths[0].relative_to(ROOT).as_posix()
