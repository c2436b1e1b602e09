"""Conversations that share a training sequence."""

import json

import pytest
import torch

from client_pipeline.partition.parts import target_weight, targets
from flower_app.config.sources import load_config
from flower_app.tasks import chat_template
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.packing import PackedData, packed_rows
from helpers.chat_cases import rendered_here, save_chat_model
from helpers.task_cases import options, prepare

ROWS = [{"prompt": f"{'the dog ' * (1 + 2 * (i % 5))}{i}?", "completion": "yes" if i % 2 else "no"} for i in range(30)]


def test_each_example_goes_where_it_leaves_the_least_room():
    assert packed_rows([3, 6, 5, 2], 8) == [[1, 3], [2, 0]]
    assert packed_rows([4, 4, 4], 4) == [[0], [1], [2]] and packed_rows([], 4) == []
    lengths = torch.randint(1, 41, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = packed_rows(lengths, 40)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 40
    assert len(rows) <= 1.05 * sum(lengths) / 40


def test_a_packed_batch_is_learned_from_as_its_conversations_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    model = options(family="llama", pretrained=save_chat_model(tmp_path / "model", "chatml"))
    losses, gradients, numbers = [], [], []
    for packing in (False, True):
        files = {"train_source": "train.jsonl", "test_source": "train.jsonl"}
        own = DataConfig(source="files", path=str(tmp_path), max_length=100, packing=packing, **files)
        found = prepare("instruction", own, model)
        share = task(TaskConfig(name="instruction")).cluster_data(own, found.tokenizer_json, 0, 1, 0)
        batch = share.collate(list(range(len(share))))
        parts = found.build(0)
        loss = parts.loss_sum(batch) / target_weight(targets(batch))
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in parts.named_parameters()})
        numbers.append((isinstance(share, PackedData), len(share), batch["input_ids"].numel()))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    (_, num_alone, alone), (is_packed, num_packed, packed) = numbers
    assert is_packed and num_alone == len(ROWS) > 2 * num_packed and packed < alone


def test_other_tasks_refuse_the_key():
    with pytest.raises(ValueError, match=r"data\.packing: expected task\.name = instruction, found causal-lm"):
        load_config(None, {"data.packing": True, "task.name": "causal-lm"})
