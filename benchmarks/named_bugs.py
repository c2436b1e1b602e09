"""Bugs made by hand, each with the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass

from quick_tests import test_file


@dataclass(frozen=True, kw_only=True)
class NamedBug:
    """One bug: a text of a file, which stands there once, and what takes its place."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def _bug(name: str, file: str, before: str, after: str, *tests: str) -> NamedBug:
    paths = tuple(test_file(test.split(".py")[0]) + test.partition(".py")[2] for test in tests)
    return NamedBug(name=name, file=file, before=before, after=after, tests=paths)


DSSDA = "strategies/dssda"

BUGS = (
    _bug(
        "a step is replayed from an older copy, though snapshots = round keeps none",
        "client_pipeline/runtime/control_unit/recovery.py",
        "        if not self._replayable:\n",
        "        if False:\n",
        "recovery_decisions.py",
    ),
    _bug(
        "the bound of an interval is that of its first end",
        f"{DSSDA}/branching.py",
        "IntervalBound(min(bounds), taken",
        "IntervalBound(bounds[0], taken",
        "certificate.py",
    ),
    _bug(
        "V is dropped from the costs of the paper's matching",
        "strategies/dssda/paper/paper.py",
        "self._instance.V * uplinks.seconds(x) + uplinks.cost(x)",
        "uplinks.cost(x)",
        "paper.py::test_the_weight_of_time_counts_where_channels_are_matched",
    ),
    _bug(
        "the last device sends nothing, whatever the latency",
        f"{DSSDA}/evaluation.py",
        'silent = last if instance.latency == "flowshop" or instance.tail_energy == "none" else None',
        "silent = last",
        "evaluation.py",
    ),
    _bug(
        "a device that is exactly full does not bind",
        f"{DSSDA}/evaluation.py",
        "(blocks + 1) * instance.gamma0",
        "blocks * instance.gamma0",
        "evaluation.py",
    ),
    _bug(
        "a device of capacity 1 holds nothing",
        "client_pipeline/timetable/replanning.py",
        "if self.capacity[k] > 0}",
        "if self.capacity[k] > 1}",
        "replanning.py",
    ),
    _bug(
        "the farther of two channels is told",
        f"{DSSDA}/power.py",
        "nearest = int(np.argmin(missing if",
        "nearest = int(np.argmax(missing if",
        "power.py",
    ),
    _bug(
        "the first of two channels is told",
        f"{DSSDA}/power.py",
        "nearest = int(np.argmin(missing if np.any(np.isfinite(missing)) else worst))",
        "nearest = 0",
        "power.py",
    ),
    _bug(
        "C5 is not reported where a cluster may go without a channel",
        f"{DSSDA}/planner.py",
        "if instance.num_clusters > instance.num_channels or num_matched < sound:",
        "if num_matched < sound:",
        "planner.py::test_too_few_channels_in_use_are_reported_beside_the_clusters_at_fault",
    ),
    _bug(
        "a signal without noise counts as none",
        "client_pipeline/system/radio.py",
        "out=np.where(signal > 0, np.inf, 0.0), where=noise > 0)",
        "out=np.zeros(signal.shape), where=noise > 0)",
        "radio.py",
    ),
    _bug(
        "bytes of an upload are its bits",
        "strategies/planning/costs.py",
        "cluster_costs.share * instance.upload_bits(n, plan.m) / 8,",
        "cluster_costs.share * instance.upload_bits(n, plan.m),",
        "accounting.py",
    ),
    _bug(
        "a later step may be replayed, whatever the copies are",
        "client_pipeline/runtime/control_unit/control_unit.py",
        "replayable=number == 1 or committed == global_step - 1",
        "replayable=True",
        "runtime_in_threads.py::test_with_one_copy_a_round_only_the_first_step_can_be_played_again",
    ),
    _bug(
        "gradient accumulation counts the last batch's weight alone",
        "client_pipeline/runtime/devices/pipeline.py",
        "sum(target_weight(targets(batch)) for batch in batches)",
        "target_weight(targets(batches[-1]))",
        "runtime_in_threads.py::test_batches_that_accumulate_are_one_step_of_the_large_batch",
    ),
    _bug(
        "devices that said what they hold are in no group",
        "client_pipeline/runtime/devices/pipeline.py",
        "        if not self.placement.sure:\n",
        "        if False:\n",
        "runtime_in_threads.py::test_a_device_that_is_back_and_not_needed_disturbs_nobody",
    ),
    _bug(
        "the cluster with most uses has spent most",
        "strategies/aggregation/accountant.py",
        "key=lambda n: uses[n] * longest[n])",
        "key=lambda n: uses[n])",
        "privacy.py::test_few_uses_of_a_long_example_may_cost_more_than_many_of_a_short_one",
    ),
    _bug(
        "an absence counts on when the cluster is back",
        "strategies/decoder/member.py",
        "self.seat, self.away_since = seat, None",
        "self.seat = seat",
        "decoder_barrier.py::test_an_absence_counts_until_the_cluster_is_back_and_no_longer",
    ),
    _bug(
        "a round may end without the server's confirmation of its steps",
        "client_pipeline/link/stream.py",
        "!= self._num_ended_steps:",
        "> self._num_ended_steps:",
        "hostile_decoder.py::test_a_goodbye_before_all_steps_are_confirmed_is_an_error",
    ),
    _bug(
        "a rule bears with one cluster too few",
        "strategies/aggregation/update_rule.py",
        "if f >= 0 and num_answers >= self.fewest(self.config, f):",
        "if f >= 0 and num_answers > self.fewest(self.config, f):",
        "aggregator.py::test_a_rule_knows_how_many_clusters_it_needs",
        "aggregator.py::test_a_cluster_that_fails_is_the_one_that_the_rule_may_bear_with",
        "aggregator.py::test_a_rule_still_bears_with_the_malicious_ones_that_are_left",
    ),
    _bug(
        "the older of the committed checkpoints is read",
        "strategies/checkpoint.py",
        "for round_, folder in reversed(folders.items()):",
        "for round_, folder in folders.items():",
        "checkpoint.py::test_of_two_committed_rounds_the_newer_is_read",
    ),
    _bug(
        "a member that has flushed has not waited",
        "client_pipeline/runtime/transport/transport.py",
        "                work.wait(self._timeout)\n            except RuntimeError as error:\n"
        '                raise TransportError(f"sending',
        "                pass\n            except RuntimeError as error:\n"
        '                raise TransportError(f"sending',
        "stage.py::test_what_was_sent_is_with_the_neighbour_when_a_member_has_flushed",
        "stage.py::test_a_flush_that_nobody_reads_ends_with_the_groups_timeout",
    ),
    _bug(
        "a step ends before what it sent has been read",
        "client_pipeline/runtime/stage/stage.py",
        "    transport.flush()\n    return done_actions\n",
        "    return done_actions\n",
        "stage.py",
    ),
    _bug(
        "the bound of a divided band is paid at the upper end of each interval",
        f"{DSSDA}/split_band.py",
        "self._search(self._uplinks(lower, upper), lower, price)",
        "self._search(self._uplinks(lower, upper), upper, price)",
        "bounds.py",
    ),
    _bug(
        "segments that fit the memory are chosen by the time of one local step",
        "strategies/planning/schedule_choice.py",
        "instance.V * instance.steps * seconds(n, plan)",
        "instance.V * seconds(n, plan)",
        "schedule_choice.py::test_segments_planned_for_memory_cost_least_over_all_local_steps",
    ),
    _bug(
        "the gap of a plan is added to what its powers may cost",
        "strategies/dssda/paper/power_control.py",
        "MOST_GAP - (answer.gap or 0.0)",
        "MOST_GAP + (answer.gap or 0.0)",
        "round_planner.py::test_what_a_plan_and_its_powers_leave_open_is_bounded_together",
    ),
    _bug(
        "a resumed run counts on devices that were lost",
        "strategies/estimation/cluster_times.py",
        '        cluster.away = set(raw["away"])\n',
        "",
        "state_across_resume.py",
    ),
    _bug(
        "a clip that adapts begins anew with a resume",
        "strategies/aggregation/central_privacy.py",
        "        aggregator.clipping_norm = float(clip)\n",
        "        pass\n",
        "state_across_resume.py",
    ),
    _bug(
        "each record of a parcel has room for itself",
        "strategies/grid/parcels.py",
        "        left -= len(packed)\n",
        "",
        "parcels.py::test_the_records_of_a_parcel_are_small_together",
    ),
    _bug(
        "a parcel is refused by its largest record alone",
        "strategies/grid/parcels.py",
        "sum(map(len, contents.values()))",
        "max(map(len, contents.values()), default=0)",
        "parcels.py::test_an_order_that_lies_is_refused",
    ),
    _bug(
        "two threads may write to one place of the updates' file",
        "strategies/grid/update_spool.py",
        "        with self._lock:\n            begin, self._end",
        "        if True:\n            begin, self._end",
        "update_spool.py::test_a_thread_that_is_interrupted_anywhere_writes_beside_another",
    ),
    _bug(
        "two threads may open a file each for one round",
        "strategies/grid/update_spool.py",
        "        with self._lock:\n            if self._file is None:",
        "        if True:\n            if self._file is None:",
        "update_spool.py::test_a_thread_that_is_interrupted_anywhere_writes_beside_another",
    ),
    _bug(
        "a target of adapters is any end of a layer's name",
        "client_pipeline/families/lora.py",
        'path.endswith(f".{name}")',
        "path.endswith(name)",
        "lora.py::test_a_target_is_one_or_more_whole_parts_of_a_name",
    ),
    _bug(
        "a TEB keeps its weights after a pass that failed",
        "client_pipeline/weights/on_demand.py",
        "self._after, always_call=True)",
        "self._after)",
        "on_demand.py",
    ),
    _bug(
        "an update that nobody has confirmed is forgotten with a resume",
        "client_pipeline/link/update_codec.py",
        "self.residual, self.pending, self.pending_round = residual, pending, pending_round",
        "self.residual = residual",
        "state_across_resume.py",
        "control_unit.py::test_a_control_unit_that_goes_on_has_all_that_it_had",
    ),
    _bug(
        "a device gets the number after those that are taken, whichever they are",
        "flower_app/joining/approval.py",
        "[next(n for n in range(len(taken) + 1) if n not in taken)]",
        "[len(taken)]",
        "joining.py::test_a_device_without_a_number_gets_the_first_that_is_free",
    ),
    _bug(
        "a relative list of revoked certificates is seen from wherever a program works",
        "flower_app/config/sources.py",
        '    "decoder.tls-crl",\n',
        "",
        "config.py::test_every_path_of_a_file_is_seen_from_its_folder_and_every_one_of_a_pair_from_here",
    ),
    _bug(
        "a matrix in few bits stays on the host",
        "client_pipeline/weights/low_bits.py",
        "        self.packed_matrix = tuple(fn(tensor) for tensor in self.packed_matrix)\n",
        "",
        "low_bits.py::test_a_matrix_in_few_bits_goes_where_its_layer_goes",
    ),
    _bug(
        "the head of a model with adapters stays tied to the embedding",
        "client_pipeline/families/lora.py",
        "    return untie(head)\n",
        "    return head\n",
        "lora.py::test_a_head_over_a_frozen_embedding_is_tied_to_nothing",
    ),
    _bug(
        "the thread of a dismissed member waits for ever",
        "client_pipeline/runtime/devices/shared_actor.py",
        "                member.thread.shutdown(wait=False)\n",
        "                pass\n",
        "members.py::test_a_dismissed_thread_ends_though_somebody_keeps_an_error_of_its_member",
    ),
    _bug(
        "the folder of another user's run goes",
        "client_pipeline/runtime/ray/ray_folder.py",
        "status.st_uid == os.geteuid() and ",
        "",
        "ray_folders.py::test_a_folder_of_another_user_stays",
    ),
    _bug(
        "a failure whose log cannot be written is not told",
        "flower_app/runs/run_directory.py",
        "    with contextlib.suppress(OSError):\n        # On a full disk",
        "    with contextlib.suppress():\n        # On a full disk",
        "run_directory.py::test_where_no_log_can_be_written_the_failure_is_told_all_the_same",
    ),
    _bug(
        "the privacy spent is forgotten with a resume",
        "flower_app/training/round_closer.py",
        '= run.resumed.state["privacy"]["record"] if run.resumed else None',
        "= None",
        "training_parts.py",
        "state_across_resume.py",
    ),
    _bug(
        "the clock of a run begins anew with a resume",
        "flower_app/training/round_closer.py",
        "run.started, run.wall_before_s",
        "run.started, 0.0",
        "training_parts.py",
        "state_across_resume.py",
    ),
    _bug(
        "bands below a thousandth of all are not tried",
        f"{DSSDA}/split_band.py",
        "_ALMOST_NONE = 1e-6",
        "_ALMOST_NONE = 1e-3",
        "bounds.py",
    ),
    _bug(
        "the optimizer of a decoder in the cluster begins anew with a resume",
        "client_pipeline/runtime/control_unit/control_unit.py",
        '        if "head" in checkpoint.states:\n',
        "        if False:\n",
        "state_across_resume.py",
    ),
)
