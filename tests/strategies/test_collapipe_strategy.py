"""The strategy alone, in a real simulation: its clients do one decoder step by hand and answer with known weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam

import strategies
from client_pipeline.partition.families import build_parts
from client_pipeline.runtime.decoder_update import HeadTrainer
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.system.scenario import load_scenario
from flower_app.training.cluster_setup import wait_for_nodes
from helpers.cluster_states import states
from helpers.replies import index_of
from helpers.simulation import simulate
from helpers.tiny_models import CLASSIC, NUM_BLOCKS
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer
from strategies.grid.recording import RecordingGrid, RoundFailed
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy
from strategies.records import to_arrays, to_tensors

pytestmark = pytest.mark.slow

SGD = OptimizerConfig(name="sgd", lr=0.1)


def one_step(message, cluster):
    """Answer of a client whose encoder ends at ``cluster + 1`` everywhere, with weight 2 or 3."""
    from client_pipeline.link.stream import DecoderStream
    from client_pipeline.partition.micro_batches import StepId
    from helpers.replies import answer_to
    from strategies.records import ARRAYS, CONFIG, read_train_config, to_tensors

    order = read_train_config(message.content.config_records[CONFIG])
    round_, plan, decoder = order.round, order.plan, order.decoder
    received = to_tensors(message.content.array_records[ARRAYS])
    assert plan.m == 4
    assert decoder.cluster == cluster
    assert not any(name.startswith("head.") for name in received)
    weight = 2 + cluster
    with DecoderStream.open(decoder) as link:
        link.begin_step(StepId(seed=0, round=round_, step=1, cluster=cluster), 1, weight)
        link.send(0, torch.ones(1, 3, 16), torch.ones(1, 3, dtype=torch.bool), {"labels": torch.full((1, weight), 5)})
        link.receive()
        link.end_step(1.0)
    answer = {name: torch.full_like(value, cluster + 1.0) for name, value in received.items()}
    return answer_to(message, cluster, answer, weight=weight)


def run(client, rounds=1, leaves_head=False, **arguments):
    """Train two clusters; returns initial and final weights, the plans seen, and the clusters.

    ``leaves_head``: the arrays are without it, and the final weights have the service's own.
    """
    initial = build_parts(CLASSIC, seed=1).weights()

    def server(grid):
        parts, plans = build_parts(CLASSIC, seed=1), []
        trainer = DecoderTrainer(HeadTrainer(parts.head, SGD, unit=NUM_BLOCKS), "step", join_timeout_s=5.0)
        service = DecoderService(DecoderConfig(), trainer, num_clusters=2)
        service.start()
        try:
            nodes = wait_for_nodes(grid, 2, 60)
            clusters = states()[:2]
            indices = index_of(grid, nodes)
            for state in clusters:
                state.node_id = indices[state.cluster]
            scenario = load_scenario("default").first(2)
            settings = replace(scenario.planner, num_blocks=NUM_BLOCKS, batch_size=4, local_steps=1)
            planner = RoundPlanner(replace(scenario, planner=settings), make_policy("uniform"))
            strategy = strategies.CollaPipe(
                planner=planner,
                decoder=service,
                clusters=clusters,
                on_plan=lambda number, chosen: plans.append((number, chosen)),
                **arguments,
            )
            recording = RecordingGrid(grid, {state.node_id: state.cluster for state in clusters})
            names = [name for name in initial if not (leaves_head and name.startswith("head."))]
            arrays = to_arrays({name: initial[name] for name in names})
            final = to_tensors(strategy.start(recording, initial_arrays=arrays, num_rounds=rounds).arrays)
            assert final.keys() == set(names)
            return {f"head.{n}": p.detach() for n, p in parts.head.named_parameters()} | final, plans, clusters
        finally:
            service.stop()

    final, plans, clusters = simulate(server, client)
    return initial, final, plans, clusters


def test_encoders_are_averaged_by_what_each_cluster_trained_and_the_decoder_is_the_servers():
    initial, final, plans, clusters = run(one_step)
    assert final.keys() == initial.keys()
    for name, value in final.items():
        if name.startswith("head."):
            continue
        torch.testing.assert_close(value, torch.full_like(value, (2 * 1 + 3 * 2) / 5))
    heads = [name for name in initial if name.startswith("head.")]
    assert any(not torch.equal(final[name], initial[name]) for name in heads)
    assert [(number, [plan.m for plan in chosen]) for number, chosen in plans] == [(1, [4, 4])]
    assert [state.last_loss for state in clusters] == [1.0, 1.0]


def test_a_decoder_that_the_arrays_leave_out_is_trained_all_the_same():
    (_, expected, _, _), (_, final, _, _) = run(one_step), run(one_step, leaves_head=True)
    assert final.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in final.items())


def test_a_stock_strategy_can_do_the_averaging():
    adam = FedAdam(eta=0.5, beta_1=0.0, beta_2=0.0, tau=1e-3)
    initial, final, _, _ = run(one_step, aggregator=adam)
    for name in (name for name in initial if not name.startswith("head.")):
        step = final[name] - initial[name]
        target = torch.full_like(step, 1.6) - initial[name]
        # With both betas 0, Adam goes eta in the direction of the average, almost whatever its distance.
        expected = 0.5 * target / (target.abs() + 1e-3)
        np.testing.assert_allclose(step.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_one_cluster_that_fails_is_left_out_of_average_and_decoder():
    def client(message, cluster):
        if cluster == 1:
            raise RuntimeError("no power")
        return one_step(message, cluster)

    _, final, _, _ = run(client)
    for name in (name for name in final if not name.startswith("head.")):
        torch.testing.assert_close(final[name], torch.ones_like(final[name]))


def test_a_round_without_any_cluster_is_an_error():
    def client(message, cluster):
        raise RuntimeError("no power")

    with pytest.raises(RoundFailed, match="no power"):
        run(client)


def test_array_records_keep_every_parameter_once():
    weights = build_parts(CLASSIC, seed=1).weights()
    record = to_arrays(weights)
    assert isinstance(record, ArrayRecord)
    assert record.keys() == weights.keys()
    for name, value in to_tensors(record).items():
        assert torch.equal(value, weights[name])
