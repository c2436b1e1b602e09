"""SecAgg+ with three real clients and the real server in one process: attacks on its masks, and hostile replies."""

import copy
import secrets
from importlib import import_module

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

from helpers.fake_grid import FIRST_NODE, FakeGrid
from strategies.aggregation.secagg import SecureGrid, secure_mod
from strategies.aggregation.secagg_masks import use_whole_seeds
from strategies.records import ARRAYS, CONFIG, ROUND_KEY, reply_content, to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")

START = {"w": torch.zeros(6, 8), "bias": torch.ones(3), "scale": torch.tensor(0.5)}
KEYS, RANGE, UNKNOWN_BITS = "secaggplus_configs", 2**32, 12
CLIENT_END = "flwr.client.mod.secure_aggregation.secaggplus_mod"
SERVER_END = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"


def weights_of(cluster):
    generator = torch.Generator().manual_seed(cluster)
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in START.items()}


def trained(weights, weight=50):
    return reply_content(weights, weight=weight, loss=1.0, steps=1, wall_s=0.0, report={"cluster": 0})


class Clusters:
    """The clients' ends, each with a state of its own, and what went over the wire.

    ``train(cluster)`` gives a cluster's weights; ``hostile`` may change its answers, by cluster and stage.
    """

    def __init__(self, train=weights_of, num_clusters=3, hostile=None, weight=50):
        self.contexts = [Context(1, FIRST_NODE + n, {}, RecordDict(), {}) for n in range(num_clusters)]
        self.train, self.hostile, self.weight = train, hostile or {}, weight
        self.seen = []

    def answer(self, message, cluster):
        # As over a real wire: nothing is shared.
        message = copy.deepcopy(message)
        stage = message.content.config_records[KEYS]["stage"]
        if (cluster, stage) in self.hostile and self.hostile[cluster, stage] is None:
            raise RuntimeError("no power")
        reply = secure_mod(
            message,
            self.contexts[cluster],
            lambda m, c: Message(trained(self.train(cluster), self.weight), reply_to=m),
        )
        if change := self.hostile.get((cluster, stage)):
            change(reply.content)
        self.seen.append((cluster, stage, copy.deepcopy(reply.content)))
        return reply

    def round(self):
        """Run a round; returns each cluster's weights, or the reason why there are none."""
        content = {n: RecordDict({ARRAYS: to_arrays(START), CONFIG: ConfigRecord({ROUND_KEY: 1})}) for n in range(9)}
        grid = SecureGrid(FakeGrid(self.answer, len(self.contexts)), max_weight=100.0)
        orders = [
            Message(content[n], dst_node_id=FIRST_NODE + n, message_type=MessageType.TRAIN)
            for n in range(len(self.contexts))
        ]
        for order in orders:
            order.metadata.__dict__["_message_id"] = secrets.token_hex(8)
        replies = grid.send_and_receive(orders)
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        found = [by_node[FIRST_NODE + n] for n in range(len(self.contexts))]
        return [r.error.reason if r.has_error() else to_tensors(r.content.array_records[ARRAYS]) for r in found]

    def said(self, cluster, stage):
        return next(content for n, s, content in self.seen if (n, s) == (cluster, stage)).config_records[KEYS]


def mean_of(clusters):
    return {name: torch.stack([weights_of(n)[name] for n in clusters]).mean(0) for name in START}


def assert_mean(found, clusters):
    for name, value in mean_of(clusters).items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)


def fold(seed):
    """The 32 bits that Flower's own expansion keeps of a seed."""
    return int(np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")))


def found_mask(masked, hint):
    """Search for the seed of the one mask on small numbers; all but 12 of the 32 bits that count are known."""
    masked = np.concatenate([part.ravel() for part in masked])
    for low in range(2**UNKNOWN_BITS):
        generator = np.random.RandomState(hint << UNKNOWN_BITS | low)
        mask = generator.randint(0, RANGE - 1, masked.shape, dtype=np.int64)
        for sign in (1, -1):
            # The quantised update has 22 bits, and what is still masked has 32.
            if ((masked + sign * mask) & (RANGE - 1)).max() < 2**23:
                return low
    return None


def what_hides_the_first_update(clusters):
    """A round that loses the last of three clusters: what the server then holds of the first's vector, and the seed.

    The mask with the lost cluster comes off by shares that the server is given, as does the private one: that with the
    second cluster alone is left.
    """
    clusters.round()
    shares = {}
    for n in (0, 1):
        said = clusters.said(n, "unmask")
        for node, share in zip(said["nids"], said["shares"], strict=True):
            shares.setdefault(node, []).append(share)
    secret = {node - FIRST_NODE: combine_shares(own) for node, own in shares.items()}
    public = {n: bytes_to_public_key(clusters.said(n, "setup")["pk1"]) for n in range(3)}
    vector = [bytes_to_ndarray(data) for data in clusters.said(0, "collect_masked_vectors")["masked_params"]]
    shapes = [part.shape for part in vector]
    expand = import_module(SERVER_END).pseudo_rand_gen
    private = expand(secret[0], RANGE, shapes)
    with_lost = expand(generate_shared_key(bytes_to_private_key(secret[2]), public[0]), RANGE, shapes)
    # Node numbers rise: the first subtracts its masks with both others.
    masked = [(v - p + m) & (RANGE - 1) for v, p, m in zip(vector, private, with_lost, strict=True)]
    own = clusters.contexts[0].state.config_records["secaggplus_state"]["sk1"]
    return masked, generate_shared_key(bytes_to_private_key(own), public[1])


@pytest.mark.slow
def test_a_search_for_the_seed_takes_no_mask_off():
    clusters = Clusters(hostile={(2, "collect_masked_vectors"): None})
    masked, seed = what_hides_the_first_update(clusters)
    assert found_mask(masked, fold(seed) >> UNKNOWN_BITS) is None
    # That mask is all there is: who has the seed reads the update.
    own = import_module(CLIENT_END).pseudo_rand_gen(seed, RANGE, [part.shape for part in masked])
    bare = [(part + mask) & (RANGE - 1) for part, mask in zip(masked, own, strict=True)]
    assert max(int(part.max()) for part in bare) < 2**23
    # The attack itself works: it finds what Flower's own expansion hides.
    weak = pseudo_rand_gen(seed, RANGE, [part.shape for part in masked])
    broken = [(part - mask) & (RANGE - 1) for part, mask in zip(bare, weak, strict=True)]
    assert found_mask(broken, fold(seed) >> UNKNOWN_BITS) == fold(seed) % 2**UNKNOWN_BITS


def test_seeds_whose_words_cancel_out_have_other_masks():
    """Flower's expansion takes the exclusive or of a seed's words: these three had one mask."""
    one = secrets.token_bytes(32)
    swapped = one[4:8] + one[:4] + one[8:]
    flipped = bytes(b ^ 255 for b in one[:8]) + one[8:]
    use_whole_seeds()
    for end in (CLIENT_END, SERVER_END):
        expand = import_module(end).pseudo_rand_gen
        masks = [expand(seed, RANGE, [(64,)])[0].tolist() for seed in (one, swapped, flipped)]
        assert masks[0] != masks[1] and masks[0] != masks[2], end
        assert expand(one, RANGE, [(64,)])[0].tolist() == masks[0]


def test_all_clusters_and_two_of_three_give_their_mean():
    for found in Clusters().round():
        assert_mean(found, range(3))
    for stage in ("setup", "share_keys", "collect_masked_vectors"):
        found = Clusters(hostile={(1, stage): None}).round()
        assert "no power" in found[1], stage
        for n in (0, 2):
            assert isinstance(found[n], dict), (stage, found[n])
            assert_mean(found[n], (0, 2))


@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "w holds NaN or Inf"), (float("-inf"), "NaN or Inf"), (9.0, "w holds 9")]
)
def test_what_cannot_be_quantised_fails_its_cluster_alone(value, reason):
    """NaN used to become a whole number, and then part of everybody's mean; 9 was cut to 8 without a word."""

    def train(cluster):
        weights = weights_of(cluster)
        if cluster == 1:
            weights["w"][2, 3] = value
        return weights

    found = Clusters(train).round()
    assert isinstance(found[1], str) and reason in found[1]
    for n in (0, 2):
        assert_mean(found[n], (0, 2))


@pytest.mark.parametrize(("value", "fits"), [(7.9, True), (-7.9, True), (9.0, False), (-9.0, False), (8.0, False)])
def test_weights_beyond_the_range_are_refused_on_either_side(value, fits, monkeypatch):
    weights = START | {"bias": torch.tensor([0.0, value, 0.0])}
    monkeypatch.setitem(START, "bias", weights["bias"])
    clusters = Clusters(train=lambda n: weights)
    if fits:
        assert all(isinstance(found, dict) for found in clusters.round())
        return
    with pytest.raises(ValueError, match=f"secure-aggregation: bias holds {abs(value):g}.*between -8 and 8"):
        clusters.round()
    assert not clusters.seen


def zeros_in_place(content):
    masked = content.config_records[KEYS]["masked_params"]
    content.config_records[KEYS]["masked_params"] = [ndarray_to_bytes(0 * bytes_to_ndarray(data)) for data in masked]


def put(key, value):
    return lambda content: content.config_records[KEYS].__setitem__(key, value)


def header_of(shape):
    return ndarray_to_bytes(np.zeros(2, np.int64)).replace(b"(2,), }" + b" " * 9, f"({shape},), }}".encode().ljust(16))


COLLECT = "collect_masked_vectors"
HOSTILE = {
    "no record": ("setup", lambda content: content.config_records.clear()),
    "junk keys": ("setup", put("pk1", b"junk")),
    "another curve": (
        "setup",
        put(
            "pk1",
            b"-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
            b"-----END PUBLIC KEY-----\n",
        ),
    ),
    "shares for nobody": ("share_keys", put("ctxts", [])),
    "shares for a stranger": ("share_keys", put("dsts", [FIRST_NODE, 999])),
    "no vector": (COLLECT, put("masked_params", [])),
    "vector of text": (COLLECT, put("masked_params", ["a", "b", "c", "d"])),
    "junk vector": (COLLECT, put("masked_params", [b"junk"] * 4)),
    "a vector of a terabyte": (COLLECT, put("masked_params", [header_of(2**37)] * 4)),
    "no loss": (COLLECT, lambda content: content.metric_records.clear()),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_malformed_answer_fails_its_cluster_alone(what):
    stage, change = HOSTILE[what]
    found = Clusters(hostile={(1, stage): change}).round()
    assert isinstance(found[1], str) and f"secure aggregation: {stage}: expected" in found[1]
    for n in (0, 2):
        assert isinstance(found[n], dict), found[n]
        assert_mean(found[n], (0, 2))


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        (COLLECT, zeros_in_place),
        (
            "unmask",
            lambda content: put("shares", [share[:4] + bytes(len(share) - 4) for share in shares_of(content)])(content),
        ),
        ("unmask", lambda content: put("shares", [b""] * 3)(content)),
    ],
)
def test_a_lie_about_masks_costs_the_round_and_not_the_run(stage, change):
    found = Clusters(hostile={(1, stage): change}).round()
    assert all(isinstance(one, str) for one in found), found
    assert "secure mean" in found[0]


def shares_of(content):
    return content.config_records[KEYS]["shares"]


def test_a_flower_that_expands_masks_elsewhere_is_refused(monkeypatch):
    from strategies.aggregation import secagg_masks as secure_masks

    monkeypatch.delattr(import_module(SERVER_END), secure_masks.REPLACED)
    with pytest.raises(RuntimeError, match=f"expected pseudo_rand_gen in {SERVER_END}"):
        Clusters().round()


def test_masks_are_uniform_over_their_range_and_short_seeds_are_refused():
    from strategies.aggregation.secagg_masks import expand_mask

    (mask,) = expand_mask(bytes(32), 2**32, [(1_000_000,)])
    assert mask.dtype == np.int64 and 0 <= mask.min() < 10_000 and 2**32 - 10_000 < mask.max() < 2**32
    counts = np.bincount(mask >> 24, minlength=256)
    assert ((counts - 1e6 / 256) ** 2 / (1e6 / 256)).sum() < 400
    assert [part.shape for part in expand_mask(bytes(32), 2**20, [(), (2, 0), (3, 2)])] == [(), (2, 0), (3, 2)]
    assert max(part.max(initial=0) for part in expand_mask(bytes(32), 2**20, [(1000,)])) < 2**20
    for seed, num_range, message in ((bytes(31), 2**32, "at least 32 bytes, found 31"), (bytes(32), 3, "found 3")):
        with pytest.raises(ValueError, match=message):
            expand_mask(seed, num_range, [(1,)])
