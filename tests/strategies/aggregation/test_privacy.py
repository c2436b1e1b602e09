"""Clipping and noise on what leaves a cluster, and what they guarantee."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from scipy.optimize import brentq
from scipy.stats import norm

from client_pipeline.families.families import build_parts
from client_pipeline.link.privacy import NoiseSource, PrivateLink, clip_tokens, private_activations, private_update
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.link.stream import DecoderStream
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from flower_app.config.privacy_checks import check_shared_matrices
from flower_app.config.run_config import RunConfig
from flower_app.training.releases import Releases, state_after
from helpers.decoder_cases import WIDTH, batch_of, head_trainer, service_of, step_id, train_step
from helpers.tiny_models import tiny_spec
from strategies.aggregation.accountant import PrivacyAccountant, Sent, epsilon
from strategies.decoder.round import Seat
from strategies.grid.recording import RecordingGrid
from strategies.records import CONFIG, ROUND_KEY
from strategies.traits import Traits

NOISY = PrivacyConfig(update_clip=2.0, update_noise=0.5, activation_clip=3.0, activation_noise=0.25, seed=7)


def weights(scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.table.weight": (40, 30), "blocks.0.bias": (50,), "scale": ()}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def distance(one, other):
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))


@pytest.mark.parametrize("far", [0.0, 1e-3, 1.0, 100.0])
def test_an_update_is_bounded_as_one_vector_and_keeps_its_direction(far):
    start, way = weights(), weights(seed=1)
    trained = {name: start[name] + far * way[name] for name in start}
    sent = private_update(start, trained, replace(NOISY, update_noise=0.0), NoiseSource())
    assert distance(sent, start) == pytest.approx(min(distance(trained, start), 2.0), rel=1e-4, abs=1e-6)
    factor = min(1.0, 2.0 / distance(trained, start)) if far else 1.0
    for name in start:
        torch.testing.assert_close(sent[name], start[name] + factor * (trained[name] - start[name]))


def test_the_noise_of_an_update_has_the_multiplier_times_the_clip_and_no_mean():
    start = {"w": torch.zeros(200_000), "v": torch.zeros(100, 100)}
    sent = private_update(start, start, NOISY, NoiseSource())
    values = torch.cat([value.flatten() for value in sent.values()])
    assert float(values.std()) == pytest.approx(0.5 * 2.0, rel=0.01)
    assert abs(float(values.mean())) < 0.01
    # As a normal distribution has it, not only its spread.
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert float(values.quantile(quantile)) == pytest.approx(norm.ppf(quantile), abs=0.03)


def test_noise_is_new_every_time_unless_a_seed_asks_for_the_same():
    zeros = torch.zeros(3, 4)
    secret = NoiseSource()
    assert not torch.equal(secret.like(zeros, 1), secret.like(zeros, 1))
    assert torch.equal(NoiseSource(5).like(zeros, 1, "a"), NoiseSource(5).like(zeros, 1, "a"))
    for other in (NoiseSource(5).like(zeros, 1, "b"), NoiseSource(6).like(zeros, 1, "a")):
        assert not torch.equal(other, NoiseSource(5).like(zeros, 1, "a"))


def test_an_update_that_is_not_finite_is_not_sent():
    start = weights()
    with pytest.raises(RuntimeError, match="NaN or Inf: training diverged"):
        private_update(start, {**start, "scale": torch.tensor(math.nan)}, NOISY, NoiseSource())


def test_every_token_is_bounded_and_padding_says_nothing():
    hidden, mask, _ = batch_of(0, 5)
    hidden = hidden * torch.linspace(0.1, 30, 5)[:, None, None]
    rows, factor = clip_tokens(hidden, mask, 3.0)
    norms = rows.norm(dim=-1)
    assert float(norms.max()) <= 3.0 + 1e-5 and not mask.all()
    torch.testing.assert_close(norms[mask], hidden.norm(dim=-1)[mask].clamp_max(3.0))
    assert torch.equal(rows[~mask], torch.zeros_like(rows[~mask]))
    noisy = private_activations(hidden, mask, NOISY, NoiseSource())
    assert torch.equal(noisy[~mask], torch.zeros_like(rows[~mask]))
    many = torch.zeros(100, 50, WIDTH)
    spread = private_activations(many, torch.ones(100, 50, dtype=torch.bool), NOISY, NoiseSource())
    assert float(spread.std()) == pytest.approx(0.25 * 3.0, rel=0.02)


def test_the_gradient_comes_back_through_the_clipping():
    """Autograd goes the whole way: clip, add the same noise, decode."""
    hidden, mask, targets = batch_of(0, 4)
    hidden = (hidden * torch.tensor([0.2, 1.0, 5.0, 20.0])[:, None, None]).requires_grad_()
    trainer, noise = head_trainer(), NoiseSource(7)
    step = step_id(0)
    weight = int((targets["labels"] >= 0).sum())
    rows, factor = clip_tokens(hidden, mask, NOISY.activation_clip)
    assert bool((factor < 1).any()) and bool((factor == 1).any())
    drawn = noise.like(rows, step.round, step.step, step.cluster, 0).float() * mask[..., None]
    loss = trainer.head(rows + 0.25 * 3.0 * drawn, mask, targets) / weight
    (expected,) = torch.autograd.grad(loss, hidden)
    link = PrivateLink(LocalDecoder(trainer, 1, 10.0), NOISY, noise)
    (found,) = train_step(link, step, (hidden.detach(), mask, targets), 1)
    torch.testing.assert_close(found.tensor, expected, atol=1e-6, rtol=1e-4)
    link.close()


def test_the_server_sees_clipped_rows_with_noise_and_nothing_else(monkeypatch):
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 2)[0]
        seen, take = [], Seat.micro_batch
        monkeypatch.setattr(Seat, "micro_batch", lambda seat, batch: seen.append(batch) or take(seat, batch))
        batches = [batch_of(0, 5, seed=s) for s in (1, 2)]
        link = PrivateLink(DecoderStream.open(address), NOISY, NoiseSource(7))
        for step, batch in enumerate(batches, start=1):
            train_step(link, step_id(0, step), batch, 2)
        link.close()
        assert service.finish_round().clusters[0].steps == 2
    assert link.bytes_up > link.payload_up > 0 and link.bytes_down > link.payload_down > 0
    assert len(seen) == 4
    for i, batch in enumerate(seen):
        hidden = batches[i // 2][0].split([3, 2])[i % 2]
        place = (1, 1 + i // 2, 0, i % 2)
        expected = private_activations(hidden, batch.mask_BT, NOISY, NoiseSource(7), *place)
        assert torch.equal(batch.hidden_BTD, expected)
    # It knows what to account for.
    sent = service.sent[0]
    assert (sent.examples, sent.repeats) == (10, 0)
    assert sent.tokens == sum(int(batch[1].sum()) for batch in batches) and sent.longest == 5


@pytest.mark.parametrize("multiplier", [20.0, 5.0, 1.0, 0.3, 0.1, 0.01])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_epsilon_is_an_upper_bound_close_to_that_of_the_gaussian_mechanism(multiplier, delta):
    """The exact one: Theorem 8 of Balle and Wang, arXiv:1805.06530."""
    mu = 1 / multiplier

    def excess(eps):
        tail = math.exp(min(eps + norm.logcdf(-eps / mu - mu / 2), 700))
        return norm.cdf(-eps / mu + mu / 2) - tail - delta

    exact = brentq(excess, 0, 10 * mu * mu + 50 * mu + 10)
    assert exact <= epsilon(multiplier, delta) <= 1.25 * exact + 0.01


def sent(examples, tokens, longest, repeats=0):
    return Sent(examples=examples, tokens=tokens, longest=longest, repeats=repeats)


def test_what_is_spent_is_that_of_the_cluster_that_has_spent_most():
    accountant = PrivacyAccountant(NOISY, {0: 100, 1: 10})
    for _ in range(3):
        accountant.count_round([0], [1], {0: sent(64, 500, 9), 1: sent(64, 400, 8)})
    found = accountant.record()
    # Replacing a cluster's text moves its update by twice the clip.
    spent = {"unit": "cluster", "mechanism": "local", "releases": 3, "epsilon": epsilon(0.5 / 2 / 3**0.5, 1e-5)}
    assert found["updates"] == spent
    # Seven epochs of ten examples, and after every failure they may come again.
    assert found["activations"]["releases"] == 7 + 1 and found["activations"]["longest"] == 8
    assert found["activations"]["epsilon"] == epsilon(0.25 / 2 / (8 * 8) ** 0.5, 1e-5)
    both = 4 * 3 / 0.5**2 + 4 * 500 / 0.25**2
    assert found["together"] == {"unit": "cluster", "epsilon": epsilon(both**-0.5, 1e-5)}
    assert found["delta"] == 1e-5 and found["seeded"]


def test_gradients_of_states_count_as_the_activations_that_they_belong_to():
    config = replace(NOISY, gradient_clip=2.0, gradient_noise=0.5)
    accountant = PrivacyAccountant(config, {0: 10})
    accountant.count_round([0], [], {0: sent(20, 300, 30)})
    found = accountant.record()
    spent = pytest.approx(epsilon(0.5 / 2 / 60**0.5, 1e-5), rel=1e-9)
    assert found["gradients"] == found["activations"] | {"epsilon": spent}
    both = 4 * 1 / 0.5**2 + 4 * 300 / 0.25**2 + 4 * 300 / 0.5**2
    assert found["together"]["epsilon"] == pytest.approx(epsilon(both**-0.5, 1e-5), rel=1e-9)
    open_labels = PrivacyAccountant(NOISY, {0: 10}, returns_gradients=True)
    open_labels.count_round([0], [], {0: sent(20, 300, 30)})
    assert open_labels.record()["together"] is None
    assert PrivacyAccountant(PrivacyConfig(gradient_clip=1.0, gradient_noise=1.0), {0: 1}).on


def test_few_uses_of_a_long_example_may_cost_more_than_many_of_a_short_one():
    accountant = PrivacyAccountant(NOISY, {0: 10, 1: 10})
    # Ten epochs of examples of 2 tokens, and two of examples of 30.
    accountant.count_round([0, 1], [], {0: sent(100, 200, 2), 1: sent(20, 300, 30)})
    found = accountant.record()["activations"]
    assert (found["releases"], found["longest"]) == (2, 30)
    assert found["epsilon"] == pytest.approx(epsilon(0.25 / 2 / 60**0.5, 1e-5), rel=1e-9)
    # And the other way round.
    accountant.count_round([], [], {0: sent(500, 200, 2), 1: sent(20, 300, 3)})
    found = accountant.record()["activations"]
    assert (found["releases"], found["longest"]) == (50, 2)


@pytest.mark.parametrize(
    ("examples", "recalled", "releases"),
    [
        (320, 7 * 320, 1),
        # All but one found room: that one was sent in each of eight epochs.
        (320 + 7, 7 * 319, 8),
        # Two more came than there are: either one in three epochs, or two in two.
        (320 + 2, 2 * 320 - 2, 3),
        (160, 0, 1),
        (0, 0, 0),
    ],
)
def test_an_example_that_found_no_room_is_sent_in_every_epoch(examples, recalled, releases):
    accountant = PrivacyAccountant(NOISY, {0: 320})
    accountant.count_round([0], [], {0: Sent(examples=examples, recalled=recalled, tokens=9 * examples, longest=9)})
    assert accountant.record()["activations"]["releases"] == releases


def test_epsilon_grows_with_every_round_and_survives_a_restart():
    accountant = PrivacyAccountant(replace(NOISY, seed=-1), {0: 50})
    spent, seen = [], Sent()
    for round_ in range(1, 5):
        seen.add((round_, 1), 0, torch.ones(8, 6, dtype=torch.bool))
        accountant.count_round([0], [], {0: seen})
        spent.append(accountant.record())
        if round_ == 2:
            state = accountant.state()
            accountant = PrivacyAccountant(replace(NOISY, seed=-1), {0: 50})
            seen = accountant.restore(state)[0]
            assert accountant.record() == spent[1]
    for what in ("updates", "together"):
        values = [record[what]["epsilon"] for record in spent]
        assert values == sorted(set(values))
    assert not spent[-1]["seeded"] and spent[-1]["activations"]["releases"] == 1


def test_rounds_that_are_lost_with_the_server_have_released_what_they_could(tmp_path):
    """The server dies in round 7 with a checkpoint of round 5: updates and activations of two rounds may be out."""
    mask, num_examples = torch.ones(8, 6, dtype=torch.bool), {0: 50, 1: 50, 2: 50}
    accountant, received = PrivacyAccountant(NOISY, num_examples), {}
    releases = Releases(tmp_path, accountant, received, examples=16, length=9)

    def receive(round_):
        for cluster in (0, 1):
            for step in (1, 2):
                if received.setdefault(cluster, Sent()).add((round_, step), 0, mask):
                    releases.keep()

    for round_ in (5, 6):
        releases.begin_round(round_, [0, 1])
        receive(round_)
        accountant.count_round([0, 1], [], received)
        if round_ == 5:
            committed = accountant.state()
            assert state_after(tmp_path, 5, committed, num_examples) == committed
    true = accountant.record()
    releases.begin_round(7, [0, 2])

    def gone_on():
        found = PrivacyAccountant(NOISY, num_examples)
        sent = found.restore(state_after(tmp_path, 5, committed, num_examples))
        return found, sent

    found, sent = gone_on()
    assert found.updates == {0: 3, 1: 2, 2: 1}
    assert (sent[0].tokens, sent[1].tokens, sent[2].tokens) == (32 * 6 + 16 * 9, 32 * 6, 16 * 9)
    # 32 examples of 50 may lie in two epochs.
    assert sent[0].repeats == 2 and sent[0].longest == 9 and sent[1].longest == 6
    for what in ("updates", "activations", "together"):
        assert found.record()[what]["epsilon"] > true[what]["epsilon"]
    # Nothing was asked for since: to go on once more changes nothing.
    assert gone_on()[0].state() == found.state()
    # What comes again is not a repeat of each of its steps as well.
    assert not sent[0].add((6, 1), 0, mask)
    # A step that is begun again goes beyond the bound, and is kept at once.
    received[0].add((7, 1), 0, mask)
    received[0].add((7, 1), 0, mask)
    releases.keep()
    assert gone_on()[1][0].tokens == 32 * 6 + 2 * 8 * 6 + 16 * 9 and gone_on()[1][0].repeats == 3


def test_a_round_is_kept_before_anyone_is_asked_to_train():
    told = []

    def dies(messages, timeout):
        assert told == [(3, [1, 0])]
        raise ConnectionError

    content = RecordDict({CONFIG: ConfigRecord({ROUND_KEY: 3})})
    train = [SimpleNamespace(dst_node_id=node, message_type=MessageType.TRAIN) for node in (20, 10)]
    orders = [SimpleNamespace(content=content, metadata=metadata) for metadata in train]
    grid = RecordingGrid(
        SimpleNamespace(send_and_receive=dies), {10: 0, 20: 1}, on_train=lambda *round_: told.append(round_)
    )
    with pytest.raises(ConnectionError):
        grid.send_and_receive(orders)


def test_what_was_received_is_counted_by_examples_and_tokens():
    seen = Sent()
    assert (seen.examples, seen.tokens, seen.longest, seen.repeats) == (0, 0, 0, 0)
    none = torch.zeros(2, 4, dtype=torch.bool)
    assert not seen.add((1, 1), 0, none)
    assert (seen.examples, seen.tokens, seen.longest) == (2, 0, 0)
    some = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert not seen.add((1, 1), 1, some)
    assert (seen.examples, seen.tokens, seen.longest, seen.step_examples) == (4, 4, 3, 4)
    # The next step begins to count anew; what has no lengths counts as one token each.
    assert not seen.add((1, 2), 0, torch.ones(5, dtype=torch.bool))
    assert (seen.examples, seen.tokens, seen.longest, seen.step_examples) == (9, 9, 3, 5)
    assert seen.add((1, 2), 0, some) and seen.add((1, 1), 0, some) and seen.repeats == 2
    assert not seen.add((2, 1), 0, torch.zeros(0, 4, dtype=torch.bool))
    assert (seen.examples, seen.longest, seen.step_examples) == (13, 3, 0)
    # A packed sequence is one example, whatever it holds.
    seen = Sent()
    assert not seen.add((1, 1), 0, torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 3]], dtype=torch.int16))
    assert (seen.examples, seen.tokens, seen.longest, seen.step_examples) == (2, 11, 6, 2)


def test_only_what_is_noised_is_accounted_for():
    updates = PrivacyAccountant(PrivacyConfig(update_clip=1.0, update_noise=1.0), {0: 10})
    updates.count_round([0], [], {0: sent(8, 40, 6)})
    found = updates.record()
    assert "activations" not in found and found["together"] is None
    assert not PrivacyAccountant(PrivacyConfig(update_clip=1.0, activation_clip=1.0), {0: 10}).on


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"update_noise": 1.0}, "privacy.update-noise: 1 needs a bound.*set privacy.update-clip above 0"),
        ({"gradient_noise": 0.5}, "privacy.gradient-noise: 0.5 needs a bound.*privacy.gradient-clip"),
        ({"activation_noise": 0.5}, "privacy.activation-noise: 0.5 needs a bound.*privacy.activation-clip"),
        ({"update_clip": -1.0}, "privacy.update-clip: expected a number of at least 0, found -1"),
        ({"delta": 0.0}, r"privacy.delta: expected a number in \(0, 1\), found 0"),
        ({"seed": -2}, "privacy.seed: expected -1"),
        ({"update_mechanism": "global"}, "privacy.update-mechanism: expected one of local, server-fixed"),
        ({"update_mechanism": "server-fixed"}, "server-fixed needs privacy.update-clip above 0"),
        (
            {"update_mechanism": "client-fixed", "update_clip": 1.0, "seed": 1},
            "privacy.seed: the noise of client-fixed is Flower's",
        ),
    ],
)
def test_settings_without_a_meaning_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(**values)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"privacy.activation-clip": 1.0, "strategy": "vanilla-fl"}, "with strategy = vanilla-fl, and split.labels as"),
        (
            {"privacy.activation-clip": 1.0, "split.labels": "cluster"},
            "split.labels as it is, no activation leaves",
        ),
        ({"privacy.gradient-clip": 1.0}, 'privacy.gradient-clip: .* found 1; set split.labels = "cluster" with a lang'),
        (
            {
                "privacy.gradient-clip": 1.0,
                "privacy.gradient-noise": 1.0,
                "optimizer.clip-norm": 1.0,
                "split.labels": "cluster",
                "task.name": "causal-lm",
                "model.family": "llama",
            },
            "optimizer.clip-norm: 1 makes each control unit send how large its gradient was",
        ),
        ({"privacy.update-clip": 1.0, "strategy": "pipeline"}, "privacy.update-clip: strategy = pipeline uploads no"),
        (
            {"privacy.update-clip": 1.0, "privacy.update-noise": 1.0, "optimizer.clip-norm": 1.0},
            "optimizer.clip-norm: 1 makes each control unit send how large its gradient was",
        ),
    ],
)
def test_runs_that_would_guarantee_nothing_are_refused(flat, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_flat(flat)


def test_noise_is_refused_where_the_embedding_itself_is_sent():
    parts = build_parts(tiny_spec("bert", "masked-lm"), seed=0)
    assert parts.tied
    noisy = PrivacyConfig(update_clip=1.0, update_noise=1.0)
    run = {"traits": Traits(decoder_on_server=True), "family": "bert", "shared": parts.tied.values()}
    with pytest.raises(ValueError, match="reads the embedding's .* set local-steps = 1"):
        check_shared_matrices(noisy, local_steps=2, **run)
    check_shared_matrices(noisy, local_steps=1, **run)
    check_shared_matrices(PrivacyConfig(), local_steps=2, **run)


@pytest.mark.parametrize(
    ("multiplier", "expected"),
    [
        (0.003, 57155.271685661),
        (0.02, 1495.213914857),
        (0.2, 35.126631103850),
        (1.0, 4.728507067218),
        (3.0, 1.407039483933),
        (8.0, 0.477838061755),
        (50.0, 0.070204816248),
        (1e3, 0.002435114147),
        (1e5, 5.019327406e-5),
    ],
)
def test_the_orders_of_the_bound_suit_weak_and_strong_noise(multiplier, expected):
    assert epsilon(multiplier, 1e-5) == pytest.approx(expected, rel=1e-9)
