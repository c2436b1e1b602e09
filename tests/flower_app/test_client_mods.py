"""Flower's mods around a training round: they run however the client's function is reached."""

import json
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.mod import centraldp_mods
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from client_pipeline.link.privacy_config import PrivacyConfig
from flower_app import client_app
from flower_app.config.run_config import RunConfig
from flower_app.launch import session_app
from flower_app.runs.run_directory import write_config
from strategies.records import ARRAYS, CONFIG, reply_content, to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")

START = {"w": torch.zeros(100), "v": torch.ones(3)}
CLIP = 0.5


def trained(message, context):
    """Return the reply of a control unit whose round moved every weight by one."""
    weights = {name: value + 1.0 for name, value in to_tensors(message.content.array_records[ARRAYS]).items()}
    return Message(reply_content(weights, weight=5, loss=1.0, steps=1, wall_s=0.0, report={}), reply_to=message)


def order(**more):
    content = RecordDict({ARRAYS: to_arrays(START), CONFIG: ConfigRecord(more)})
    return Message(content, dst_node_id=7, message_type=MessageType.TRAIN)


def context_of(flat):
    return Context(40, 7, {"partition-id": 0}, RecordDict(), flat)


@pytest.fixture
def session(tmp_path):
    """A session of a run without [privacy] and, after it, one that clips on the clusters: the second is under way."""
    runs = [tmp_path / "plain", tmp_path / "clipped"]
    clipped = PrivacyConfig(update_mechanism="client-fixed", update_clip=CLIP)
    for run_dir, privacy in zip(runs, (PrivacyConfig(), clipped), strict=True):
        run_dir.mkdir()
        write_config(run_dir, replace(RunConfig(), run_dir=str(run_dir), privacy=privacy))
    (tmp_path / session_app.RUNS).write_text(
        json.dumps([{"run-dir": str(run_dir), "resume": False} for run_dir in runs])
    )

    def begin(number):
        told = {"number": number, "run-dir": str(runs[number])}
        (tmp_path / session_app._CURRENT).write_text(json.dumps(told))
        return context_of(RunConfig().to_flat() | {"run-dir": str(tmp_path)})

    return begin


def test_every_update_of_a_shared_simulation_is_clipped(session, monkeypatch):
    """Its client used to call the training function past the mods of Flower's app."""
    monkeypatch.setattr(client_app, "_train", trained)
    clips, clip = [], centraldp_mods.compute_clip_model_update

    def counted(*args, **kwargs):
        clips.append(kwargs["clipping_norm"])
        return clip(*args, **kwargs)

    monkeypatch.setattr(centraldp_mods, "compute_clip_model_update", counted)

    def moved(number):
        reply = session_app.client(order(**{KEY_CLIPPING_NORM: CLIP}), session(number))
        found = to_tensors(reply.content.array_records[ARRAYS])
        return float(torch.cat([found[name] - START[name] for name in START]).norm())

    assert [moved(1) for _ in range(3)] == pytest.approx([CLIP] * 3) and clips == [CLIP] * 3
    # The mods are those of the run under way, not of the session's first.
    assert moved(0) == pytest.approx(103**0.5) and len(clips) == 3
