"""A tiny model behind a door in this process."""

import contextlib
import threading
import time

import httpx
import torch
import uvicorn

from flower_app.saved_model import load_model, read_model, save_model
from flower_app.serving.door import door_app
from flower_app.serving.door_key import key_digest
from flower_app.serving.door_server import PunctualProtocol, open_door
from flower_app.serving.run_model import served_run
from helpers.chat_cases import save_chat_model
from helpers.patience import patient
from helpers.saved_runs import saved_run

KEY = "a key for tests"
READER = "read by nobody"
WEB = httpx.Client(timeout=patient(120), limits=httpx.Limits(max_keepalive_connections=0))
"""HTTP without the library's own five seconds, which a busy machine may take."""


def chat_run(folder, monkeypatch, positions=256):
    """Make a run of a chat model whose weights are far from each other: no two scores are close."""
    monkeypatch.chdir(folder)
    save_chat_model(folder / "model", "chatml", positions=positions)
    rows = '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the dog"}]}\n'
    (folder / "rows.jsonl").write_text(rows * 4)
    run_dir = saved_run(
        {
            "task.name": "instruction",
            "data.source": "files",
            "data.path": str(folder),
            "data.train-source": "rows.jsonl",
            "data.validation-source": "rows.jsonl",
            "data.test-source": "rows.jsonl",
            "data.max-length": 64,
            "model.family": "llama",
            "model.pretrained": str(folder / "model"),
            "model.decoder-layers": 1,
        }
    )
    return run_dir


def spread_weights(run_dir):
    """Draw the weights of a run's model anew, far from each other; returns the model."""
    model = load_model(run_dir, "llama", "instruction")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in model.parts.all_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_model(run_dir, model.spec, model.parts.weights(), model.tokenizer_json, model.task)
    return model


@contextlib.contextmanager
def open_model(run_dir, num_devices=0, most_tokens=0, task=None):
    """Serve a run; yields its served model and the address."""
    stored = read_model(run_dir)
    with (
        served_run(run_dir, stored, num_devices, 1, print, most_tokens, task) as served,
        open_door("127.0.0.1", 0, False) as at,
    ):
        config = uvicorn.Config(
            door_app(served, key_digest(KEY), ["127.0.0.1", "localhost"], READER),
            http=PunctualProtocol,
            lifespan="off",
            log_level="warning",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield served, f"http://127.0.0.1:{at.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)
