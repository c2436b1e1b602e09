"""The decoder's barrier and sync modes, without a network where none is needed."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight
from helpers.decoder_cases import (
    PATIENT_S,
    all_at_once,
    batch_of,
    central_step,
    head_trainer,
    service_of,
    step_id,
    train_round,
    train_step,
    trainer_of,
    whole_batch,
)
from strategies.decoder.member import Refusal
from strategies.decoder.trainer import DecoderTrainer

SHORT_S = 0.2


def train(trainer, cluster, steps=1, round_=1):
    """A cluster's round on the trainer itself; returns the mode it was told."""
    seat = trainer.join(round_, cluster)
    for step in range(1, steps + 1):
        seat.micro_batch(whole_batch(cluster, step, round_))
        seat.close_step(step, 1.0)
    seat.finish()
    return seat.sync


def seated(trainer, *clusters):
    """Each cluster's seat in round 1, with its first step sent and not closed."""
    seats = [trainer.join(1, cluster) for cluster in clusters]
    for seat in seats:
        seat.micro_batch(whole_batch(seat.cluster))
    return seats


def shares(clusters, step=1):
    return [((b.hidden_BTD, b.mask_BT, b.targets), 1.0) for b in (whole_batch(c, step) for c in clusters)]


def assert_close(found, expected):
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6)


def test_a_step_is_taken_only_when_all_clusters_have_closed_it():
    trainer = trainer_of()
    trainer.open_round(1, [0, 1], 1)
    before = {n: p.detach().clone() for n, p in trainer.head.named_parameters()}
    quick, slow = seated(trainer, 0, 1)
    fast = threading.Thread(target=quick.close_step, args=(1, 1.0), daemon=True)
    fast.start()
    fast.join(0.1)
    assert fast.is_alive()
    assert all(torch.equal(p, before[n]) for n, p in trainer.head.named_parameters())
    slow.close_step(1, 1.0)
    fast.join(PATIENT_S)
    assert not fast.is_alive()
    assert_close(trainer.finish_round().head, central_step(head_trainer().head, shares([0, 1]))[0])


def test_a_stream_that_breaks_frees_the_other_clusters():
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 2)
        broken = DecoderStream.open(addresses[1])
        batch = batch_of(1, 3)
        broken.begin_step(step_id(1), 2, target_weight(batch[2]))
        broken.send(0, *(x[:1] if not isinstance(x, dict) else {"labels": x["labels"][:1]} for x in batch))
        broken.receive()

        def break_off():
            time.sleep(0.1)
            broken.abort()

        results = all_at_once(lambda: train_round(addresses[0], [batch_of(0, 3), batch_of(0, 4)]), break_off)
        assert len(results[0]) == 2
        summary = service.finish_round()
    assert summary.clusters[0].steps == 2 and summary.clusters[0].departure is None
    assert summary.clusters[1].departure == "its stream broke off"


def test_a_refused_cluster_frees_the_other_clusters():
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)

        def diverge():
            hidden, mask, targets = batch_of(1, 2)
            with DecoderStream.open(addresses[1]) as stream:
                train_step(stream, step_id(1), (hidden * torch.nan, mask, targets), 1)

        results = all_at_once(lambda: train_round(addresses[0], [batch_of(0, 3)]), diverge)
        assert isinstance(results[0], list)
        assert isinstance(results[1], LinkError) and "NaN" in str(results[1])
        assert "NaN" in service.finish_round().clusters[1].departure


def test_clusters_that_do_not_close_their_step_are_left_behind_by_name():
    trainer = trainer_of(step_s=SHORT_S)
    trainer.open_round(1, [0, 1, 2], 1)
    seats = [trainer.join(1, cluster) for cluster in (0, 1, 2)]
    seats[0].micro_batch(whole_batch(0))
    seats[0].close_step(1, 1.0)
    with pytest.raises(Refusal, match=r"cluster 1 has left round 1: it did not close step 1 within 0.2 s"):
        seats[1].micro_batch(whole_batch(1))
    seats[0].finish()
    summary = trainer.finish_round()
    assert summary.clusters[0].steps == 1
    assert all("it did not close step 1" in summary.clusters[n].departure for n in (1, 2))


def test_targets_that_the_decoder_does_not_know_are_refused():
    trainer = trainer_of()
    trainer.open_round(1, [0], 1)
    targets = {"labels": whole_batch(0).targets["labels"] + 1000}
    with pytest.raises(Refusal, match="the decoder cannot take micro-batch 0: "):
        trainer.join(1, 0).micro_batch(replace(whole_batch(0), targets=targets, weight=12.0, total_weight=12.0))


def test_a_cluster_stands_where_its_stream_is():
    trainer = trainer_of()
    trainer.open_round(1, [2, 0, 1], 1)
    cut, done = trainer.join(1, 0), trainer.join(1, 1)
    assert [standing.place for standing in trainer.current.standings().values()] == ["trains", "trains", "awaited"]
    cut.away()
    done.finish()
    assert [standing.place for standing in trainer.current.standings().values()] == ["away", "finished", "awaited"]
    cut.leave("gone")
    assert [standing.place for standing in trainer.current.standings().values()] == ["left", "finished", "awaited"]


def test_a_round_that_ends_early_frees_and_refuses_everyone():
    trainer = trainer_of()
    trainer.open_round(1, [0, 1], 1)
    seat, _ = (trainer.join(1, cluster) for cluster in (0, 1))
    seat.micro_batch(whole_batch(0))
    waiting = threading.Event()

    def close():
        waiting.set()
        seat.close_step(1, 1.0)

    def end():
        waiting.wait()
        time.sleep(0.1)
        return trainer.finish_round()

    refused, summary = all_at_once(close, end)
    assert isinstance(refused, Refusal) and "round 1 of the decoder is not open" in str(refused)
    assert {s.departure for s in summary.clusters.values()} == {"did not finish before the round ended"}


def test_a_mode_can_be_restored_and_a_wrong_one_is_refused():
    trainer = trainer_of("step")
    trainer.settle_sync("round")
    trainer.open_round(5, [0, 1], 1)
    assert trainer.join(5, 0).sync == "round"
    with pytest.raises(ValueError, match="decoder-sync: expected one of step, round, found 'epoch'"):
        trainer.settle_sync("epoch")


def test_in_mode_step_a_late_cluster_is_left_out_and_its_hello_refused():
    trainer = trainer_of(join_s=SHORT_S)
    trainer.open_round(1, [0, 1], 1)
    assert train(trainer, 0) == "step"
    with pytest.raises(Refusal, match="cluster 1 has left round 1: it did not join within 0.2 s of the first"):
        trainer.join(1, 1)
    summary = trainer.finish_round()
    assert "did not join" in summary.clusters[1].departure
    assert_close(summary.head, central_step(head_trainer().head, shares([0]))[0])


def test_mode_round_with_one_step_of_sgd_equals_mode_step():
    heads = {}
    for sync in ("step", "round"):
        trainer = trainer_of(sync)
        trainer.open_round(1, [0, 1], 1)
        all_at_once(lambda t=trainer: train(t, 0), lambda t=trainer: train(t, 1))
        heads[sync] = trainer.finish_round().head
    assert_close(heads["round"], heads["step"])


def test_mode_round_averages_copies_by_what_each_trained():
    trainer = trainer_of("round")
    trainer.open_round(1, [0, 1], 2)
    train(trainer, 0, steps=2)
    train(trainer, 1, steps=2)
    summary = trainer.finish_round()
    ends, weights = [], []
    for cluster in (0, 1):
        head = head_trainer().head
        for step in (1, 2):
            head.load_state_dict(central_step(head, shares([cluster], step))[0])
        ends.append(head.state_dict())
        weights.append(sum(whole_batch(cluster, step).weight for step in (1, 2)))
    assert [summary.clusters[c].weight for c in (0, 1)] == weights
    mean = {n: sum(w * end[n] for w, end in zip(weights, ends, strict=True)) / sum(weights) for n in ends[0]}
    assert_close(summary.head, mean)


def test_mode_round_leaves_out_who_left_and_who_has_no_weight():
    trainer = trainer_of("round")
    trainer.open_round(1, [0, 1], 2)
    train(trainer, 0, steps=2)
    (leaves,) = seated(trainer, 1)
    leaves.close_step(1, 1.0)
    leaves.leave("its stream broke off")
    head = head_trainer().head
    for step in (1, 2):
        head.load_state_dict(central_step(head, shares([0], step))[0])
    assert_close(trainer.finish_round().head, head.state_dict())


def test_a_round_in_which_nobody_trained_leaves_the_decoder_alone():
    trainer = trainer_of("round")
    before = {n: p.detach().clone() for n, p in trainer.head.named_parameters()}
    trainer.open_round(1, [0, 1], 1)
    summary = trainer.finish_round({})
    assert all(torch.equal(summary.head[n], before[n]) for n in before)
    assert {s.departure for s in summary.clusters.values()} == {"did not join"}
    trainer.open_round(2, [0], 1)
    with pytest.raises(ValueError, match=r"clusters \[0\] have a weight but trained no step"):
        trainer.finish_round({0: 2.0})


def test_misuse_is_refused_with_what_was_expected():
    trainer = trainer_of()
    with pytest.raises(Refusal, match="round 1 of the decoder is not open"):
        trainer.join(1, 0)
    with pytest.raises(ValueError, match="no round of the decoder is open"):
        trainer.finish_round()
    with pytest.raises(ValueError, match="local-steps: expected at least 1, found 0"):
        trainer.open_round(1, [0], 0)
    trainer.open_round(1, [0], 1)
    with pytest.raises(ValueError, match="round 2 of the decoder cannot start: round 1 is still open"):
        trainer.open_round(2, [0], 1)
    with pytest.raises(Refusal, match="cluster 3 is not selected in round 1"):
        trainer.join(1, 3)
    with pytest.raises(Refusal, match="expected round 1, found round 2"):
        trainer.join(2, 0)
    with pytest.raises(Refusal, match="cluster 0 has not joined"):
        trainer.rejoin(1, 0, 1)
    seat = trainer.join(1, 0)
    with pytest.raises(Refusal, match="already joined"):
        trainer.join(1, 0)
    batch = whole_batch(0)
    seat.micro_batch(replace(batch, total_weight=batch.weight + 1))
    with pytest.raises(Refusal, match="the micro-batches weigh .*, announced were"):
        seat.close_step(1, 1.0)
    with pytest.raises(Refusal, match="micro-batch"):
        seat.micro_batch(replace(batch, micro_batch=1, total_weight=None))


def test_copies_of_the_decoder_are_averaged_by_the_weights_of_the_encoders():
    """A cluster that left after its goodbye, or whose update was refused, counts in neither average."""
    trainer = DecoderTrainer(head_trainer(), "round")
    trainer.open_round(1, [0, 1], 1)
    before = {name: p.detach().clone() for name, p in trainer.copies.shared.parameters.items()}
    for seat in seated(trainer, 0, 1):
        seat.close_step(1, 1.0)
        seat.finish()
    summaries = trainer.end_round()
    assert [(s.steps, s.departure) for s in summaries.values()] == [(1, None), (1, None)]
    with pytest.raises(Refusal, match="is not open"):
        trainer.join(1, 0)
    found = trainer.finish_round({1: summaries[1].weight})
    assert found.clusters == summaries
    assert_close(found.head, {n: p.detach() for n, p in trainer.copies.by_cluster[1].parameters.items()})
    assert any(not torch.equal(found.head[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match="no round of the decoder is open"):
        trainer.finish_round()
