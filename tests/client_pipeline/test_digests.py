"""Digests of files that are read once in a process, also ahead of their use."""

import hashlib
import json

import pytest

from client_pipeline import durable
from flower_app.model_files import digest_early


def test_a_file_is_read_once_as_long_as_it_stays_and_a_failure_is_not_kept(tmp_path, monkeypatch):
    read, file = [], tmp_path / "file"
    file.write_bytes(b"one")
    own = durable.file_digest
    monkeypatch.setattr(durable, "file_digest", lambda path: read.append(path) or own(path))
    assert durable.checked_digest(file) == durable.checked_digest(file) == hashlib.sha256(b"one").hexdigest()
    assert len(read) == 1
    file.write_bytes(b"another")
    assert durable.checked_digest(file) == hashlib.sha256(b"another").hexdigest()
    (folder := tmp_path / "folder").mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            durable.checked_digest(folder)
    assert len(read) == 4


def test_a_runs_frozen_weights_are_read_ahead_and_mistakes_are_left_to_their_reader(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("flower_app.model_files.begin_digest", begun.append)
    (tmp_path / "model").mkdir()
    base = tmp_path / "model" / "base.json"
    for text in ("", "[]", '{"source": 1, "files": [{"name": "x"}]}', '{"files": []}', '{"source": ".", "files": [1]}'):
        base.write_text(text)
        digest_early(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"x")
    # A name leads to no other folder.
    names = [{"name": name} for name in ("x.safetensors", "../x.safetensors", "absent", "/dev/zero")]
    base.write_text(json.dumps({"source": str(tmp_path), "files": names}))
    digest_early(tmp_path)
    assert begun == [tmp_path / "x.safetensors"] * 2
