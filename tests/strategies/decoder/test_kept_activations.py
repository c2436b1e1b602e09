"""``compression.cache-gb``: the store of activations that clusters send once, and the names of their examples."""

import errno
import os
import tracemalloc

import pytest
import torch

from client_pipeline.link.kept_examples import KeptExamples, split_names
from strategies.decoder import kept_activations
from strategies.decoder.kept_activations import LEAST_ENTRY, KeptActivations
from strategies.decoder.member import Refusal

MIB = 1 << 20


def frame(lengths, width=4, labels_of_tokens=True, longest=None):
    """Tensors of a micro-batch whose examples have so many tokens."""
    longest = longest or max(lengths)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    labels = torch.where(mask, torch.arange(longest)[None] + torch.tensor(lengths)[:, None], -100)
    return {
        "hidden": torch.randn(len(lengths), longest, width),
        "mask": mask,
        "target.labels": labels if labels_of_tokens else torch.tensor(lengths),
    }


@pytest.fixture
def store(tmp_path):
    kept = KeptActivations(MIB, tmp_path)
    yield kept
    kept.close()


@pytest.mark.parametrize("labels_of_tokens", [True, False])
def test_examples_come_back_in_other_micro_batches_padded_to_their_longest(store, labels_of_tokens):
    first = frame([3, 5], labels_of_tokens=labels_of_tokens)
    second = frame([2, 4], labels_of_tokens=labels_of_tokens, longest=9)
    assert store.put(0, ["a", "b"], first) and store.put(0, ["c", "d"], second)
    mixed = store.get(0, ["d", "a"])
    assert mixed["mask"].tolist() == [[True] * 4, [True] * 3 + [False]]
    assert torch.equal(mixed["hidden"][0], second["hidden"][1, :4])
    assert torch.equal(mixed["hidden"][1, :3], first["hidden"][0, :3])
    assert not mixed["hidden"][1, 3:].any()
    expected = [[4, 5, 6, 7], [3, 4, 5, -100]] if labels_of_tokens else [4, 3]
    assert mixed["target.labels"].tolist() == expected


def test_bytes_of_a_codec_come_back_as_they_were(store):
    tensors = frame([3, 2]) | {"hidden": torch.randint(0, 256, (2, 3, 8), dtype=torch.uint8)}
    store.put(0, ["a", "b"], tensors)
    assert torch.equal(store.get(0, ["a"])["hidden"][0], tensors["hidden"][0])


def test_a_cluster_has_neither_anothers_examples_nor_its_room(tmp_path):
    kept = KeptActivations(LEAST_ENTRY + 3000, tmp_path)
    assert kept.put(0, ["a"], frame([20], width=16))
    assert not kept.put(0, ["b"], frame([20], width=16))
    assert kept.put(0, ["a"], frame([20], width=16)), "it is kept already"
    assert kept.put(1, ["b"], frame([20], width=16))
    with pytest.raises(Refusal, match="recall: expected examples that are kept, found 1 of 2 others"):
        kept.get(0, ["a", "b"])
    with pytest.raises(Refusal, match="found 0 of 0 others"):
        kept.get(0, [])
    kept.close()


def test_examples_of_a_few_bytes_cannot_fill_the_memory_with_their_places(tmp_path):
    kept, room = KeptActivations(64 * MIB, tmp_path), 64 * MIB // LEAST_ENTRY
    tensors = frame([1], width=1)
    kept.put(0, ["warm"], tensors)
    tracemalloc.start()
    taken = sum(kept.put(0, [f"{number:032x}"], tensors) for number in range(room + 200))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept.close()
    assert taken == room - 1
    assert held < 64 * MIB / 8


@pytest.mark.parametrize("has_room", [False, True])
def test_what_is_not_to_be_kept_is_not_encoded(tmp_path, monkeypatch, has_room):
    kept, tensors = KeptActivations(LEAST_ENTRY * has_room, tmp_path), frame([3])
    assert kept.put(0, ["a"], tensors) == has_room
    monkeypatch.setattr(kept_activations, "save", lambda tensors: pytest.fail("an example is encoded"))
    assert kept.put(0, ["a"], tensors) == has_room
    assert not kept.put(0, ["b"], tensors)
    kept.close()


def test_a_full_disk_ends_keeping_and_no_run(store, monkeypatch, caplog):
    assert store.put(0, ["a"], frame([3]))
    real = os.pwrite

    def full(descriptor, data, offset):
        real(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level("WARNING", logger="flwr"):
        assert not store.put(0, ["b"], frame([3]))
    monkeypatch.undo()
    assert "compression.cache-gb: no further activations are kept: [Errno 28] No space left" in caplog.text
    assert not store.put(0, ["c"], frame([3]))
    assert store.get(0, ["a"])["mask"].tolist() == [[True] * 3]


def test_the_file_has_no_name_that_anybody_could_open(store, tmp_path):
    store.put(0, ["a"], frame([3]))
    assert list(tmp_path.iterdir()) == []


def batch(rows, longest):
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor(row)
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": labels}


def test_names_are_of_the_example_alone_and_of_no_use_without_the_key():
    names = KeptExamples()
    alone, padded = names.names(batch([[5, 6]], 2)), names.names(batch([[5, 6], [7, 8, 9]], 6))
    assert alone[0] == padded[0] != padded[1]
    hidden = batch([[5, 6]], 2)
    hidden["labels"][0, 0] = -100
    assert names.names(hidden) != alone
    assert KeptExamples().names(batch([[5, 6]], 2)) != alone
    assert all(len(name) == 32 for name in padded)


def test_what_another_store_kept_is_forgotten():
    names = KeptExamples()
    names.of_store("one")
    names.add(["a", "b"])
    names.of_store("one")
    assert names.has(["a", "b"]) and not names.has(["a", "c"])
    names.of_store("two")
    assert not names.has(["a"])


def test_names_are_split_as_their_batch_is():
    assert split_names(["a", "b", "c"], [2, 1]) == [["a", "b"], ["c"]]
