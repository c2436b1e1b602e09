"""Flower's own differential privacy around encoder updates, each in real rounds."""

import math

import pytest
import torch
from flwr.clientapp import ClientApp

from client_pipeline.link.privacy_config import UPDATE_MECHANISMS, PrivacyConfig
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.training.network import training_scenario
from helpers.federation import learned, loss_of, rounds_of
from helpers.simulation import simulate
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.rules import build_aggregator

pytestmark = pytest.mark.slow

NUM_CLUSTERS, CLIP, NOISE = 3, 0.5, 0.2


def client_app():
    """The mods of the real app around the clients of these tests; a round's configuration says which."""
    app = ClientApp()

    def chosen(message, context, call_next):
        from flwr.app import Context

        from flower_app.client_app import chosen_mods
        from strategies.records import CONFIG

        mechanism = message.content.config_records[CONFIG].get("mechanism")
        run_config = {**context.run_config, "privacy.update-mechanism": str(mechanism)}
        chosen_context = Context(context.run_id, context.node_id, context.node_config, context.state, run_config)
        return chosen_mods(message, chosen_context, call_next)

    @app.train(mods=[chosen])
    def train(message, context):
        from helpers import federation

        return federation.honest(message, int(context.node_config["partition-id"]))

    @app.query()
    def query(message, context):
        from flwr.app import ConfigRecord, Message, RecordDict

        answer = ConfigRecord({"partition": context.node_config["partition-id"]})
        return Message(RecordDict({"c": answer}), reply_to=message)

    return app


def encoder_change(final, initial):
    return torch.cat([(final[n] - initial[n]).flatten() for n in initial if not n.startswith("head.")])


@pytest.fixture(scope="module")
def outcomes():
    """One round without noise and two with it, by each of Flower's mechanisms, in one simulation."""
    initial = learned(NUM_CLUSTERS, steps=20)

    def server(grid):
        import strategies

        found = {}
        for mechanism in UPDATE_MECHANISMS:
            for noise in (0.0, NOISE):
                privacy = PrivacyConfig(update_mechanism=mechanism, update_clip=CLIP, update_noise=noise)

                def make(privacy=privacy, mechanism=mechanism, **given):
                    aggregator = build_aggregator(
                        AggregatorConfig(), ServerOptimizerConfig(), privacy, num_clusters=NUM_CLUSTERS
                    )
                    strategy = strategies.CollaPipe(aggregator=aggregator, **given)
                    configure = strategy.configure_train

                    def with_mechanism(number, arrays, config, grid):
                        config["mechanism"] = mechanism
                        return configure(number, arrays, config, grid)

                    strategy.configure_train = with_mechanism
                    return strategy

                final, strategy = rounds_of(grid, NUM_CLUSTERS, make, initial, rounds=1 + bool(noise))
                found[mechanism, bool(noise)] = final, strategy.state()["clip"]
        return found

    return initial, simulate(server, client_app(), num_nodes=NUM_CLUSTERS)


def test_clipping_alone_bounds_the_mean_and_leaves_the_decoder_alone(outcomes):
    initial, found = outcomes
    # In these tests the control unit is a stand-in that clips nothing itself.
    free = encoder_change(found["local", False][0], initial).norm()
    assert free > 2 * CLIP
    for mechanism in UPDATE_MECHANISMS[1:]:
        final, _ = found[mechanism, False]
        # An adaptive clip is used before it adapts: the bound of the first round is that of the configuration.
        most = CLIP * (math.e if mechanism == "server-adaptive" else 1)
        assert 0.2 * CLIP < encoder_change(final, initial).norm() <= most + 1e-4, mechanism
        assert loss_of(final, range(NUM_CLUSTERS)) < loss_of(initial, range(NUM_CLUSTERS)), mechanism


def test_the_noise_of_the_mean_has_the_multiplier_times_the_clip_over_the_clusters(outcomes):
    initial, found = outcomes
    for mechanism in UPDATE_MECHANISMS[1:]:
        change = encoder_change(found[mechanism, True][0], initial)
        assert len(change) > 5000
        # Of two rounds; what was learned is spread over all weights and small beside it.
        expected = math.sqrt(2) * NOISE * CLIP / NUM_CLUSTERS
        if mechanism.endswith("adaptive"):
            assert 0.7 * expected < float(change.std()) < 2.5 * expected, mechanism
        else:
            assert float(change.std()) == pytest.approx(expected, rel=0.1), mechanism


def test_an_adaptive_clip_moves_and_is_part_of_the_state(outcomes):
    _, found = outcomes
    for mechanism in UPDATE_MECHANISMS:
        _, clip = found[mechanism, True]
        assert (clip is None) == (not mechanism.endswith("adaptive"))
        # All were clipped, where half should be: Flower's formula makes the clip smaller or larger by e^(0.2 / 2).
        assert clip is None or clip != CLIP


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"privacy.update-noise": 0.5, "privacy.update-mechanism": "server-adaptive"}, "needs more than 5 clusters"),
        ({"aggregator.name": "median"}, "aggregator.name: median and privacy.update-mechanism = server-fixed"),
        ({"server-optimizer.name": "fedadam"}, "server-optimizer.name: fedadam and privacy.update-mechanism"),
        ({"strategy": "titanic"}, "server-fixed needs strategy = collapipe"),
        (
            {"privacy.update-mechanism": "client-fixed", "compression.update": "int8"},
            "compression.update: int8 sends no weights, which Flower's mod",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(flat, message):
    base = {"privacy.update-clip": 1.0, "privacy.update-noise": 0.1, "privacy.update-mechanism": "server-fixed"}
    with pytest.raises(ValueError, match=message):
        config = RunConfig.from_flat(base | flat)
        make_planner(config, training_scenario(config).first(config.num_clusters or 3))
