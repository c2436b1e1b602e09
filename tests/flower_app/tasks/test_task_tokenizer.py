import json

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import sized_config, spec_from_config
from flower_app.saved_model import save_model
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.generated.generator import generate
from flower_app.tasks.start import ready_tokenizer
from flower_app.tasks.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from flower_app.tasks.word_pieces import train_wordpiece
from helpers.task_cases import options

TINY = {
    "width": 16,
    "num_heads": 2,
    "feed_forward": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_length": 40,
    "pad_id": 0,
    "bos_id": 2,
    "eos_id": 3,
}


@pytest.fixture(scope="module")
def texts():
    return [text for pair in generate(1500, "train", 0) for text in pair]


@pytest.mark.parametrize("pretokenized", [False, True])
def test_decoding_restores_the_text_exactly_even_of_unseen_characters(texts, pretokenized):
    tokenizer = train_tokenizer(texts, 500, pretokenized)
    unseen = ["Größe: 5 € – ¿qué? 你好 🙂", "x"]
    assert tokenizer.decode(tokenizer.encode(texts[:200] + unseen)) == texts[:200] + unseen


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


def test_a_folder_with_a_bert_vocabulary_alone_is_read_whole(tmp_path):
    # With transformers 5, BertTokenizer(vocab_file=...) ignores the file and knows five words.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == len(words)
    assert tokenizer.encode(["word3 word39"]) == [[8, 44]]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model"])
def test_a_vocabulary_of_sentencepiece_alone_names_the_package_that_converts_it(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / name).write_bytes(b"no vocabulary")
    with pytest.raises(ValueError, match=rf"{name} alone, .*pip install 'collapipe\[sentencepiece\]'") as refused:
        load_tokenizer(str(tmp_path), "model.pretrained", complete=False)
    assert "\n" not in str(refused.value) and "tiktoken" not in str(refused.value)


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


def bare(size=30, *marks):
    """Give a backend that knows words and some marks alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(size)} | {m: size + i for i, m in enumerate(marks)}))
    backend.pre_tokenizer = Whitespace()
    return backend


def test_without_a_token_for_padding_the_end_pads():
    # Llama 3 has neither padding nor an unknown token: one more would be beyond its rows.
    tokenizer = TextTokenizer(bare(30, "<|begin_of_text|>", "<|end_of_text|>"))
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (32, 31, 30, 31)
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert (again.vocab_size, again.pad_id) == (32, 31)
    # A word that leaves nothing adds no token either.
    assert again.encode_words([["w3", " "]]) == [([3, 31], [0, 1])] and again.vocab_size == 32


def test_words_have_the_pieces_that_they_have_in_their_text():
    # RoBERTa's: "London" at the start of a text has other pieces than " London" within one.
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    marks, alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["in Paris we met Anna Smith in London"] * 50, trainer)
    tokenizer = TextTokenizer(backend)
    words = ["we", "met", "Anna", "in", "London", ",", "Paris"]
    ((ids, owners),) = tokenizer.encode_words([words])
    assert [ids] == tokenizer.encode([" " + " ".join(words)]) and set(owners) == set(range(7))
    # Others have a space of their own, or none.
    for other in (
        train_tokenizer(["we met"], 300, False),
        train_wordpiece(["we met Anna in London"], 300, False, False),
    ):
        ((ids, _),) = other.encode_words([words])
        assert [ids] == other.encode([" ".join(words)])


def start_from(folder, backend, rows, **changes):
    """Ask for the tokenizer of a pretrained Qwen3 with so many rows."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": rows, **sizes}))
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    data = DataConfig(**changes)
    return ready_tokenizer(data, options(family="qwen3", pretrained=str(folder)))


def test_a_models_own_tokenizer_may_have_far_fewer_tokens_than_the_model_rows(tmp_path):
    # Qwen3-0.6B: 151,669 tokens, 151,936 rows.
    assert start_from(tmp_path, bare(30, "<|endoftext|>"), 31 + 267).vocab_size == 31
    # Llama 3: as many rows as tokens, and no token for padding.
    assert start_from(tmp_path, bare(30, "<|begin_of_text|>", "<|end_of_text|>"), 32).vocab_size == 32
    with pytest.raises(ValueError, match=r"model\.pretrained: its vocabulary of 31 tokens does not match the 30 of"):
        start_from(tmp_path, bare(30, "<|endoftext|>"), 30)


def test_another_tokenizer_for_a_pretrained_model_must_give_the_same_ids(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "model").mkdir()
    own, copy = bare(30, "<|endoftext|>"), str(tmp_path / "copy" / "tokenizer.json")
    own.save(copy)
    assert start_from(tmp_path / "model", own, 298, tokenizer=str(tmp_path / "copy")).vocab_size == 31
    bare(29, "<|endoftext|>", "w29").save(copy)
    message = r"data\.tokenizer: .*copy gives the token 'w29' the id 30, expected 29 as in .*leave"
    with pytest.raises(ValueError, match=message):
        start_from(tmp_path / "model", own, 298, tokenizer=str(tmp_path / "copy"))
    # Without a tokenizer of the model's own, the size must do.
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert start_from(tmp_path / "model", None, 158, tokenizer=str(tmp_path / "copy")).vocab_size == 31
    with pytest.raises(ValueError, match=r"data\.tokenizer: its vocabulary of 31 tokens does not match the 298 of"):
        start_from(tmp_path / "model", None, 298, tokenizer=str(tmp_path / "copy"))


def test_another_tokenizer_for_a_runs_model_must_give_the_same_ids(tmp_path):
    mine, other = (train_wordpiece([f"{word} {i}" for i in range(400)], 300, False, False) for word in ("alpha", "uno"))
    config = sized_config("bert", vocab_size=mine.vocab_size, **TINY)
    spec = spec_from_config(config, "masked-lm")
    (tmp_path / "run").mkdir()
    save_model(tmp_path / "run", spec, build_parts(spec, 0).weights(), mine.to_json(), {})
    (tmp_path / "tokenizer.json").write_text(other.to_json())
    data, model = DataConfig(tokenizer=str(tmp_path)), options(from_=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* gives the token '.+' the id .+, expected .+ as in "):
        ready_tokenizer(data, model)
    (tmp_path / "tokenizer.json").write_text(mine.to_json())
    assert ready_tokenizer(data, model).encode(["alpha"]) == mine.encode(["alpha"])


def test_a_run_goes_on_with_the_tokenizer_to_which_it_added_marks(tmp_path):
    bare(30).save(str(tmp_path / "tokenizer.json"))
    mine = load_tokenizer(str(tmp_path))
    assert mine.vocab_size == 33
    spec = spec_from_config(sized_config("bert", vocab_size=33, **TINY), "masked-lm")
    (tmp_path / "run").mkdir()
    save_model(tmp_path / "run", spec, build_parts(spec, 0).weights(), mine.to_json(), {})
    found = ready_tokenizer(DataConfig(tokenizer=str(tmp_path)), options(from_=str(tmp_path / "run")))
    assert found.vocabulary() == mine.vocabulary()
