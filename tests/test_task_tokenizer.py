import json

import pytest

from flower_app.tasks.generator import generate
from flower_app.tasks.tokenizer import SPECIAL_TOKENS, TextTokenizer, load_tokenizer, train_tokenizer

TOKENISED = [
    "a man &apos;s dog , running ( fast ) .",
    "ein saftig-grünes gras &amp; ein &quot; zaun &quot; .",
    "zwei  blanks\tand a tab",
]


@pytest.fixture(scope="module")
def texts():
    return [text for pair in generate(1500, "train", 0) for text in pair]


def test_special_tokens_come_first(texts):
    tokenizer = train_tokenizer(texts, 600, pretokenized=False)
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == 600


@pytest.mark.parametrize("pretokenized", [False, True])
def test_decoding_restores_the_text_exactly_even_of_unseen_characters(texts, pretokenized):
    tokenizer = train_tokenizer(texts, 500, pretokenized)
    unseen = ["Größe: 5 € – ¿qué? 你好 🙂", "x"]
    assert tokenizer.decode(tokenizer.encode(texts[:200] + unseen)) == texts[:200] + unseen


def test_tokenised_text_comes_back_with_its_tokens():
    tokenizer = train_tokenizer(TOKENISED * 5, 400, pretokenized=True)
    decoded = tokenizer.decode(tokenizer.encode(TOKENISED))
    assert [text.split() for text in decoded] == [text.split() for text in TOKENISED]
    assert decoded[:2] == TOKENISED[:2]


def test_a_tokenised_word_with_punctuation_inside_can_be_one_token():
    tokenizer = train_tokenizer(["man &apos;s"] * 50, 400, pretokenized=True)
    assert len(tokenizer.encode(["&apos;s"])[0]) == 1


def test_a_special_token_in_the_text_is_text(texts):
    tokenizer = train_tokenizer(texts, 500, pretokenized=False)
    (ids,) = tokenizer.encode(["end </s> <pad> of"])
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.decode([ids]) == ["end </s> <pad> of"]


def test_a_tokenizer_survives_its_json(texts):
    tokenizer = train_tokenizer(texts, 500, pretokenized=False)
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert again.encode(texts[:50]) == tokenizer.encode(texts[:50])
    assert again.to_json() == tokenizer.to_json()
    (ids,) = again.encode(["</s>"])
    assert 2 not in ids


def test_training_is_deterministic(texts):
    first, second = (train_tokenizer(texts, 500, pretokenized=True).to_json() for _ in range(2))
    assert first == second


def test_text_that_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"expected the JSON form of tokenizers, found '\{\}'"):
        TextTokenizer.from_json("{}")


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path, texts):
    tokenizer = train_tokenizer(texts, 500, pretokenized=False)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).encode(texts[:9]) == tokenizer.encode(texts[:9])


def test_a_folder_with_a_bert_vocabulary_alone_is_read_whole(tmp_path):
    # With transformers 5, BertTokenizer(vocab_file=...) ignores the file and knows five words.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == len(words)
    assert tokenizer.encode(["word3 word39"]) == [[8, 44]]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)


def test_missing_special_tokens_are_added(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(20)} | {"[UNK]": 20}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (21, 22, 23)
    assert tokenizer.vocab_size == 24
    assert tokenizer.encode(["w3 w4"]) == [[3, 4]]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer: expected a folder with a tokenizer or a hub id, found '"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_knows_next_to_nothing_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), encoding="utf-8")
    with pytest.raises(ValueError, match="gives a vocabulary of 5 tokens"):
        load_tokenizer(str(tmp_path))


def test_the_real_bert_vocabularies_are_read_whole(real_data):
    folders = [vocabulary.parent for vocabulary in real_data("bert_vocab").rglob("vocab.txt")]
    assert folders
    for folder in folders:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        assert load_tokenizer(str(folder)).vocab_size == len(lines)


def test_multi30k_tok_comes_back_exactly(real_data):
    lines = real_data("multi30k/tok/val.lc.norm.tok.de").read_text(encoding="utf-8").splitlines()
    tokenizer = train_tokenizer(lines[:500], 1000, pretokenized=True)
    assert tokenizer.decode(tokenizer.encode(lines)) == [" ".join(line.split()) for line in lines]
