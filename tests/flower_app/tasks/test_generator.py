import hashlib

import pytest

from flower_app.tasks.generated import generator
from flower_app.tasks.generated.generator import generate, split_of

DIGESTS = {
    "train": "f98f60c49e7dc073d25e954714dc7c6347b2bb91b82d3d39bd107d3665086c31",
    "test": "1b92497e1d0c5bedc27c333c22a2df53ea1c4421fb7b49baa3e798365adada8c",
}


@pytest.mark.parametrize("split", DIGESTS)
def test_the_corpus_of_past_runs_is_that_of_this_release(split):
    """Hold English and German of 3,000 sentences."""
    text = "\n".join("\t".join(pair) for pair in generate(3000, split, 1))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[split]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_no_held_out_sentence_occurs_in_training(seed):
    sources = {source for source, _ in generate(5_000 if seed else 20_000, "train", seed)}
    for split in ("validation", "test"):
        held_out = [source for source, _ in generate(500, split, 0)]
        assert len(set(held_out)) == 500
        assert not sources & set(held_out)
        assert {split_of(source) for source in held_out} == {split}


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another():
    pairs = generate(50, "train", 3)
    generator._generated.cache_clear()
    assert pairs == generate(50, "train", 3)
    assert generate(50, "train", 3)[:10] == generate(10, "train", 3)
    assert generate(50, "train", 3) != generate(50, "train", 4)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split: expected one of train, validation, test, found 'dev'"):
        generate(1, "dev", 0)
