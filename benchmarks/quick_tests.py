"""Files that are mutated, and the quick tests of each: none needs Ray or Flower processes."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODULES = (
    "strategies/dssda/*.py",
    "strategies/dssda/paper/*.py",
    "client_pipeline/system/*.py",
    "client_pipeline/link/*.py",
    "client_pipeline/partition/dropout_seed.py",
    "client_pipeline/partition/micro_batches.py",
    "client_pipeline/runtime/*/*.py",
    "client_pipeline/timetable/*.py",
    "strategies/decoder/*.py",
    "strategies/aggregation/*.py",
)

LEFT_OUT = ("client_pipeline/runtime/control_unit/ray_probe.py",)
"""No sample is drawn of them: they lean on parts of Ray that are not public."""

_TESTS: dict[str, str] = {
    "strategies/dssda/answer.py": "evaluation segments unequal_tebs split_band repeated_plans",
    "strategies/dssda/block_price.py": "planner_scale repeated_plans",
    "strategies/dssda/bottleneck.py": "segments planner_scale repeated_plans",
    "strategies/dssda/branching.py": "certificate planner planner_scale uploaded_activations split_band repeated_plans",
    "strategies/dssda/convergence.py": "convergence queues participation_gap",
    "strategies/dssda/deadline.py": "certificate planner planner_scale uploaded_activations repeated_plans",
    "strategies/dssda/closed_form_segments.py": "segments planner_scale uploaded_activations repeated_plans",
    "strategies/dssda/evaluation.py": "evaluation energy_price planner split_band repeated_plans",
    "strategies/dssda/flow_shop.py": "segments planner_scale repeated_plans",
    "strategies/dssda/instance.py": "evaluation power segments repeated_plans",
    "strategies/dssda/instance_file.py": "instance_file plan_command evaluation segments repeated_plans",
    "strategies/dssda/limits.py": "limits segments repeated_plans",
    "strategies/dssda/matching.py": "matching planner_scale repeated_plans",
    "strategies/dssda/paper/paper*.py": "paper repeated_plans",
    "strategies/dssda/per_round_bound.py": "paper",
    "strategies/dssda/planner.py": "planner planner_scale uploaded_activations split_band repeated_plans",
    "strategies/dssda/power.py": "power certificate sca repeated_plans",
    "strategies/dssda/serving_segments.py": "serving_segments",
    "strategies/dssda/shadow_prices.py": "shadow_prices",
    "strategies/dssda/split_band.py": "bounds split_band repeated_plans",
    "strategies/dssda/least_band.py": "bounds split_band repeated_plans",
    "strategies/dssda/paper/paper_printed.py": "paper_printed",
    "strategies/dssda/priced_choices.py": "energy_price repeated_plans",
    "strategies/dssda/paper/joint_power.py": "joint_power round_planner",
    "strategies/dssda/paper/power_control.py": "round_planner joint_power",
    "strategies/dssda/prices.py": "planner_scale repeated_plans",
    "strategies/dssda/queues.py": "queues round_planner participation_gap",
    "strategies/dssda/round_problem.py": "round_planner policies queues",
    "strategies/dssda/paper/sca.py": "sca paper",
    "strategies/dssda/unequal_tebs.py": "unequal_tebs",
    "strategies/dssda/segments.py": "segments uploaded_activations energy_price repeated_plans",
    "client_pipeline/system/channels.py": "channels drawn_networks",
    "client_pipeline/system/costs.py": "counted_costs costs device_memory kinds_of_tebs",
    "client_pipeline/system/device_memory.py": "device_memory counted_costs planned_memory",
    "client_pipeline/system/live_memory.py": "counted_costs device_memory costs",
    "client_pipeline/system/devices.py": "scenario drawn_networks policies",
    "client_pipeline/system/energy.py": "energy",
    "client_pipeline/system/latency.py": "latency",
    "client_pipeline/system/radio.py": "radio power uploaded_activations",
    "client_pipeline/system/cluster_tables.py": "unequal_clusters scenario drawn_networks",
    "client_pipeline/system/scenario*.py": "scenario unequal_clusters drawn_networks",
    "client_pipeline/system/step_costs.py": "scenario instance_file",
    "client_pipeline/system/units.py": "scenario radio drawn_networks",
    "client_pipeline/link/activation_codec.py": "activation_codec",
    "client_pipeline/link/address.py": "addresses decoder_tls",
    "client_pipeline/link/base.py": "privacy",
    "client_pipeline/link/cluster_news.py": "cluster_news news round_faults",
    "client_pipeline/link/compression.py": "update_codec activation_codec config",
    "client_pipeline/link/reopened_connection.py": "decoder_stream stream_cuts stream_security news",
    "client_pipeline/link/frame_limits.py": "frames weight_pull documented_limits",
    "client_pipeline/link/frames.py": "frames hostile_decoder fuzz news",
    "client_pipeline/link/hosts.py": "addresses decoder_config decoder_tls",
    "client_pipeline/runtime/control_unit/local_decoder.py": "link_order tied_stream decoder_stream runtime_in_threads",
    "client_pipeline/link/keepalive.py": "addresses",
    "client_pipeline/link/kept_examples.py": "kept_activations kept_stream",
    "client_pipeline/link/privacy.py": "noise privacy",
    "client_pipeline/link/privacy_config.py": "noise privacy config",
    "client_pipeline/link/stream.py": (
        "link_order decoder_stream tied_stream hostile_decoder stream_cuts activation_codec news"
    ),
    "client_pipeline/link/tied.py": "tied_stream",
    "client_pipeline/link/update_codec.py": "update_codec",
    "client_pipeline/link/weight_pull.py": "weight_pull",
    "client_pipeline/runtime/control_unit/actors.py": "asking_control_units",
    "client_pipeline/runtime/ray/arrangement.py": "arrangement",
    "client_pipeline/runtime/devices/batch_run.py": "runtime_in_threads steps_after_a_doubt",
    "client_pipeline/runtime/devices/block_moves.py": "block_moves cut_parts runtime_in_threads",
    "client_pipeline/runtime/control_unit/cluster_checkpoint.py": "cluster_checkpoint control_unit",
    "client_pipeline/runtime/config.py": "config",
    "client_pipeline/runtime/control_unit/own_labels.py": "own_labels_stream runtime_in_threads",
    "client_pipeline/runtime/control_unit/control_unit.py": "control_unit steps_after_a_doubt runtime_in_threads",
    "client_pipeline/runtime/control_unit/data_order.py": "data_order",
    "client_pipeline/runtime/transport/deadline.py": "deadline",
    "client_pipeline/runtime/devices/device.py": "device device_pool runtime_in_threads accelerator cut_parts",
    "client_pipeline/runtime/devices/device_pool.py": "device_pool runtime_in_threads steps_after_a_doubt",
    "client_pipeline/runtime/devices/frozen_devices.py": "device_pool runtime_in_threads",
    "client_pipeline/timetable/event_simulator.py": "event_simulator sliced_schedules run_actions latency",
    "client_pipeline/runtime/fault_config.py": "drawn_faults",
    "client_pipeline/runtime/control_unit/fault_files.py": "drawn_faults control_unit",
    "client_pipeline/runtime/control_unit/fault_injection.py": "drawn_faults",
    "client_pipeline/runtime/transport/faults.py": "drawn_faults asking_control_units",
    "client_pipeline/runtime/devices/group.py": "group runtime_in_threads",
    "client_pipeline/runtime/stage/decoder_update.py": "decoder_trainer decoder_barrier accelerator split_verification",
    "client_pipeline/runtime/stage/held_memory.py": "held_memory",
    "client_pipeline/runtime/ray/unused_actors.py": "unused_actors",
    "client_pipeline/runtime/ray/machine.py": "machine",
    "client_pipeline/runtime/devices/measurement.py": "measurement measured_links",
    "client_pipeline/runtime/stage/memory.py": "device runtime_in_threads",
    "client_pipeline/partition/dropout_seed.py": "micro_batches stage",
    "client_pipeline/partition/micro_batches.py": "micro_batches",
    "client_pipeline/runtime/stage/optimizer.py": "optimizer stage",
    "client_pipeline/runtime/stage/learning_rate.py": "optimizer config",
    "client_pipeline/timetable/pacing.py": "run_actions steps_after_a_doubt control_unit",
    "client_pipeline/runtime/devices/device_nodes.py": "device_nodes",
    "client_pipeline/runtime/ray/placement.py": "device_nodes device_pool",
    "client_pipeline/runtime/ray/private_ray.py": "private_ray",
    "client_pipeline/runtime/control_unit/recovery.py": "recovery_decisions relief runtime_in_threads",
    "client_pipeline/timetable/replanning.py": "replanning relief recovery_decisions",
    "client_pipeline/runtime/devices/life_signs.py": "life_signs",
    "client_pipeline/runtime/control_unit/round_faults.py": "round_faults recovery_decisions runtime_in_threads",
    "client_pipeline/timetable/schedules.py": "schedules sliced_schedules event_simulator run_actions stage",
    "client_pipeline/runtime/devices/shared_actor.py": "members asking_control_units device_pool",
    "client_pipeline/runtime/transport/shared_process.py": "runtime_in_threads tls_transport",
    "client_pipeline/runtime/control_unit/speed.py": "replanning relief",
    "client_pipeline/runtime/devices/snapshots.py": "block_moves runtime_in_threads",
    "client_pipeline/runtime/stage/stage.py": "stage run_actions device sliced_pipeline weight_gradients",
    "client_pipeline/runtime/transport/transport.py": "stage measured_links runtime_in_threads",
    "client_pipeline/runtime/control_unit/control_unit_actor.py": "control_unit_actor asking_control_units weight_pull",
    "client_pipeline/runtime/control_unit/round_report.py": "round_times runtime_in_threads",
    "client_pipeline/runtime/transport/meeting_point.py": "tls_transport cluster_authority",
    "client_pipeline/runtime/transport/node_tls.py": "cluster_authority tls_transport",
    "client_pipeline/runtime/transport/tensor_mailbox.py": "tensor_mailbox tls_transport",
    "client_pipeline/runtime/transport/tls_transport.py": "tls_transport cluster_authority",
    "client_pipeline/runtime/control_unit/verification.py": "split_verification",
    "client_pipeline/runtime/stage/whole.py": "split_verification",
    "client_pipeline/runtime/control_unit/spare_devices.py": "device_pool",
    "client_pipeline/runtime/devices/pipeline.py": "runtime_in_threads steps_after_a_doubt sliced_pipeline",
    "client_pipeline/runtime/stage/accelerator.py": "accelerator",
    "client_pipeline/runtime/stage/moved_block.py": "block_moves device runtime_in_threads",
    "client_pipeline/runtime/stage/tried_block.py": "device_pool",
    "client_pipeline/runtime/*/*.py": "runtime_in_threads",
    "strategies/decoder/config.py": "decoder_config decoder_tls config",
    "strategies/decoder/kept_activations.py": "kept_activations kept_stream",
    "strategies/decoder/limits.py": "admission stream_security decoder_barrier news fuzz documented_limits",
    "strategies/decoder/member.py": "decoder_barrier decoder_trainer decoder_stream stream_cuts tied_stream",
    "strategies/decoder/reception.py": (
        "admission stream_security decoder_barrier decoder_stream news documented_limits"
    ),
    "strategies/decoder/revoked_certificates.py": "decoder_tls",
    "strategies/decoder/round.py": "decoder_barrier decoder_trainer stream_cuts news tied_stream",
    "strategies/decoder/service.py": "decoder_stream decoder_config stream_security decoder_barrier news decoder_tls",
    "strategies/decoder/step_limits.py": "step_limits stream_security",
    "strategies/decoder/tokens.py": "admission stream_security decoder_stream",
    "strategies/decoder/weight_source.py": "weight_pull",
    "strategies/decoder/*.py": "decoder_barrier decoder_trainer step_limits decoder_stream",
    "strategies/aggregation/config.py": "aggregator server_optimizer config",
    "strategies/aggregation/rules.py": "aggregator product_mean",
    "strategies/aggregation/update_rule.py": "aggregator outside_classes",
    "strategies/aggregation/weighted_mean.py": "weighted_mean",
    "strategies/aggregation/server_optimizers.py": "server_optimizer state_across_resume",
    "strategies/aggregation/accountant.py": "privacy state_across_resume",
    "strategies/aggregation/central_privacy.py": "central_privacy state_across_resume",
    "strategies/aggregation/product_mean.py": "product_mean",
    "strategies/aggregation/adapter_products.py": "product_mean",
}


def tests_of(file: str) -> tuple[str, ...]:
    """Test files of a module, the most likely to notice first."""
    if patterns := [pattern for pattern in _TESTS if fnmatch(file, pattern)]:
        # The longest says most of the file.
        return tuple(test_file(name) for name in _TESTS[max(patterns, key=len)].split())
    raise SystemExit(f"{file}: benchmarks/quick_tests.py names no tests for it")


def test_file(name: str) -> str:
    """Path of ``test_<name>.py`` from the root; its folder mirrors the package."""
    paths = sorted((ROOT / "tests").rglob(f"test_{name}.py"))
    if len(paths) != 1:
        raise SystemExit(f"tests: expected one test_{name}.py, found {len(paths)}")
    return paths[0].relative_to(ROOT).as_posix()
