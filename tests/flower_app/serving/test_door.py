"""OpenAI's own client at the door of a served model; what it gets is what the exported model writes."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from transformers import GenerationConfig

from client_pipeline.families.families import merged
from helpers.patience import eventually
from helpers.served import KEY, WEB, chat_run, open_model, spread_weights

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "the dog or the boy?"}]


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    """A served model, its run's parts, and its address."""
    with pytest.MonkeyPatch.context() as patch:
        run_dir = chat_run(tmp_path_factory.mktemp("served"), patch)
        model = spread_weights(run_dir)
        with open_model(run_dir) as (served, address):
            yield served, model.parts, address


@pytest.fixture
def client(door):
    return openai.OpenAI(base_url=f"{door[2]}/v1", api_key=KEY, max_retries=0)


def whole(door, ids, num_tokens):
    """Ids that the library's own model writes, without the end."""
    served, parts, _ = door
    tokenizer = served.tokenizer
    config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=list(tokenizer.end_ids), pad_token_id=tokenizer.pad_id
    )
    with torch.no_grad():
        row = merged(parts).reference.eval().generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :]
    return [i for i in row.tolist() if i not in tokenizer.end_ids]


def chat_ids(door, messages):
    return door[0]._rendered(messages)


def test_a_chat_is_what_the_whole_model_writes(door, client):
    found = client.chat.completions.create(
        model=door[0].name, messages=QUESTION, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    ids = chat_ids(door, QUESTION)
    expected = whole(door, ids, 12)
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == door[0].tokenizer.text_of(expected)
    assert choice.finish_reason == ("length" if len(expected) == 12 else "stop")
    assert found.usage.prompt_tokens == len(ids) and found.usage.completion_tokens in (len(expected), len(expected) + 1)
    told = choice.logprobs.content
    assert len(told) == len(expected)
    with torch.no_grad():
        logits = merged(door[1]).reference(torch.tensor([ids + expected])).logits[0].double().log_softmax(-1)
    for at, token in enumerate(told):
        row = logits[len(ids) + at - 1]
        assert token.logprob == pytest.approx(float(row[expected[at]]), abs=1e-4)
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_a_stream_has_the_same_text_piece_by_piece(door, client):
    asked = {"model": door[0].name, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 20}
    text = client.chat.completions.create(**asked).choices[0].message.content
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"
    deltas = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(deltas) == text and len([delta for delta in deltas if delta]) > 3
    assert events[-2].choices[0].finish_reason in ("stop", "length")
    assert events[-1].choices == [] and events[-1].usage.completion_tokens > 3


def test_completions_take_texts_ids_and_lists_of_both(door, client):
    served = door[0]
    ids = served.text_prompt("the dog sees")
    expected = served.tokenizer.text_of([*ids[-8:], *whole(door, ids, 8)])[len(served.tokenizer.text_of(ids[-8:])) :]
    for prompt in ("the dog sees", ids, ["the dog sees"], [ids]):
        found = client.completions.create(model=served.name, prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in found.choices] == [expected]
    both = client.completions.create(model=served.name, prompt=[ids, ids], temperature=0, max_tokens=8, n=2)
    assert [(choice.index, choice.text) for choice in both.choices] == [(i, expected) for i in range(4)]


def test_echo_scores_a_prompt(door, client):
    served, parts, _ = door
    ids = served.text_prompt("the dog sees the boy")
    found = client.completions.create(
        model=served.name, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0
    ).choices[0]
    with torch.no_grad():
        logits = merged(parts).reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = [float(logits[at - 1, ids[at]]) for at in range(1, len(ids))]
    assert found.logprobs.token_logprobs[0] is None and found.logprobs.top_logprobs[0] is None
    assert found.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert found.text.startswith(served.tokenizer.text_of(ids))
    best = [max(top.values()) for top in found.logprobs.top_logprobs[1:]]
    assert best[: len(ids) - 1] == pytest.approx(logits.max(-1).values[:-1].tolist(), abs=1e-4)
    none = client.completions.create(model=served.name, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    assert len(none.choices[0].logprobs.token_logprobs) == len(ids)


def test_texts_end_before_a_stop_text(door, client):
    served = door[0]
    asked = {"model": served.name, "prompt": "the dog", "temperature": 0, "max_tokens": 24}
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:8]
    expected = text[: text.index(stop)]
    found = client.completions.create(**asked, stop=["never", stop]).choices[0]
    assert (found.text, found.finish_reason) == (expected, "stop")
    pieces = [event.choices[0].text for event in client.completions.create(**asked, stop=stop, stream=True)]
    assert "".join(pieces) == expected


def test_a_seed_repeats_a_text_and_another_draws_another(door, client):
    asked = {"model": door[0].name, "prompt": "the dog", "temperature": 1.5, "max_tokens": 20}
    texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    several = client.completions.create(**asked, seed=1, n=3).choices
    assert len({choice.text for choice in several}) > 1


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"unknown": 1}, 400, "unknown"),
        ({"n": 1000}, 400, "n:"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "positions"),
        ({"model": "another"}, 404, "another"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ({"messages": "[" * 100_000}, 400, "messages"),
    ],
)
def test_what_is_not_done_is_refused_by_name(door, asked, status, words):
    body = {"model": door[0].name, "messages": QUESTION} | asked
    answer = WEB.post(f"{door[2]}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    error = answer.json()["error"]
    assert answer.status_code == status and words in error["message"], error


def test_clients_errors_are_those_of_openai(door, client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{door[2]}/v1", api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == [door[0].name]
    assert client.models.retrieve(door[0].name).owned_by == "collapipe"


def test_pages_of_elsewhere_and_other_names_are_refused(door):
    address, key = door[2], {"Authorization": f"Bearer {KEY}"}
    assert WEB.get(f"{address}/v1/models", headers=key).status_code == 200
    assert WEB.get(f"{address}/v1/models", headers={**key, "Origin": "https://evil.example"}).status_code == 403
    assert WEB.get(f"{address}/v1/models", headers={**key, "Host": "evil.example"}).status_code == 403
    assert WEB.get(f"{address}/v1/models", headers={**key, "Origin": address}).status_code == 200
    page = WEB.get(f"{address}/")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert not any(name.startswith("access-control") for name in page.headers)
    assert WEB.get(f"{address}/v1/nothing", headers=key).json()["error"]["type"] == "not_found_error"


def test_who_hangs_up_frees_its_place(door):
    """Room for one long text at a time: the next one begins when the first has left."""
    served, _, address = door
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": served.name, "prompt": "the dog", "max_tokens": 200, "temperature": 1, "stream": True, "n": 16}
    for _ in range(3):
        with WEB.stream("POST", f"{address}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
    eventually(lambda: not (served._room._inside or served._engine._requests))


def test_bodies_are_bounded(door):
    answer = WEB.post(f"{door[2]}/v1/completions", content=b" " * (2 << 20), headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 413


def test_many_at_once_all_get_their_own_text(door, client):
    served = door[0]
    prompts = [f"the {word}" for word in ("dog", "boy", "king", "cow", "letter", "house", "tree", "girl")]

    def ask(prompt):
        return client.completions.create(model=served.name, prompt=prompt, temperature=0, max_tokens=16).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, prompts)) == alone


def test_no_room_is_said_by_numbers(door, tmp_path, monkeypatch):
    run_dir = chat_run(tmp_path, monkeypatch)
    with open_model(run_dir, most_tokens=40) as (served, address):
        body = {"model": served.name, "prompt": "the dog", "max_tokens": 30, "n": 4}
        answer = WEB.post(f"{address}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and "40 tokens" in answer.json()["error"]["message"]


def test_the_page_tells_who_reads(door):
    assert WEB.get(f"{door[2]}/privacy").json() == {"model": door[0].name, "reader": "read by nobody"}
