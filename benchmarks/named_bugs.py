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


DSSDA, RUNTIME = "strategies/dssda", "client_pipeline/runtime"

BUGS = (
    _bug(
        "a step is replayed from an older copy, though snapshots = round keeps none",
        f"{RUNTIME}/recovery.py",
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
        f"{DSSDA}/paper.py",
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
        "[d + (i == k) for i, d in enumerate(choice.delta)]",
        "list(choice.delta)",
        "evaluation.py",
    ),
    _bug(
        "a device of capacity 1 holds nothing",
        f"{RUNTIME}/replanning.py",
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
        '"uplink_bytes": instance.upload_bits(n, plan.m) / 8,',
        '"uplink_bytes": instance.upload_bits(n, plan.m),',
        "accounting.py",
    ),
    _bug(
        "a later step may be replayed, whatever the copies are",
        f"{RUNTIME}/control_unit.py",
        "replayable=number == 1 or committed == global_step - 1",
        "replayable=True",
        "runtime_in_threads.py::test_with_one_copy_a_round_only_the_first_step_can_be_played_again",
    ),
    _bug(
        "gradient accumulation counts the last batch's weight alone",
        f"{RUNTIME}/pipeline.py",
        "sum(target_weight(targets(batch)) for batch in batches)",
        "target_weight(targets(batches[-1]))",
        "runtime_in_threads.py::test_batches_that_accumulate_are_one_step_of_the_large_batch",
    ),
    _bug(
        "devices that said what they hold are in no group",
        f"{RUNTIME}/pipeline.py",
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
        "the range check looks at one side",
        "strategies/aggregation/secagg.py",
        "float(np.abs(values).max(initial=0.0))",
        "float(values.max(initial=0.0))",
        "secure_aggregation.py::test_weights_beyond_the_range_are_refused_on_either_side",
    ),
    _bug(
        "a weight at the end of the range passes",
        "strategies/aggregation/secagg.py",
        "if not largest < CLIPPING_RANGE:",
        "if not largest <= CLIPPING_RANGE:",
        "secure_aggregation.py::test_weights_beyond_the_range_are_refused_on_either_side",
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
        "for round_ in reversed(rounds):",
        "for round_ in rounds:",
        "checkpoint.py::test_of_two_committed_rounds_the_newer_is_read",
    ),
    _bug(
        "a member that has flushed has not waited",
        f"{RUNTIME}/transport.py",
        "                work.wait(self._timeout)\n            except RuntimeError as error:\n"
        '                raise TransportError(f"sending',
        "                pass\n            except RuntimeError as error:\n"
        '                raise TransportError(f"sending',
        "stage.py::test_what_was_sent_is_with_the_neighbour_when_a_member_has_flushed",
        "stage.py::test_a_flush_that_nobody_reads_ends_with_the_groups_timeout",
    ),
    _bug(
        "a step ends before what it sent has been read",
        f"{RUNTIME}/stage.py",
        "    transport.flush()\n    return done_actions\n",
        "    return done_actions\n",
        "stage.py",
    ),
)
