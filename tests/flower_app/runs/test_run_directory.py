"""Run directories and saved models."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from flower_app.config.run_config import RunConfig
from flower_app.launch.single_run import continued_run
from flower_app.runs.run_directory import (
    claim_run_directory,
    create_run_directory,
    find_run,
    read_rounds,
    read_run_config,
    read_summary,
    write_config,
    write_failure,
)
from flower_app.runs.run_lock import locked
from flower_app.saved_model import keep_versions, load_model, save_model
from flower_app.tasks.base import Prepared
from helpers.tiny_models import SMALL_TRANSFORMER, evaluation, tiny_batch, tiny_spec
from strategies.clusters import ClusterState


def test_runs_of_one_second_get_directories_of_their_own_and_latest_is_the_newest(tmp_path):
    made = [create_run_directory(tmp_path / "runs", "a") for _ in range(3)]
    assert len(set(made)) == 3
    assert all(run.is_absolute() and run.name.split("-")[2] == "a" for run in made)
    assert (tmp_path / "runs" / "latest").resolve() == made[-1]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted([*(r.name for r in made), "latest"])


def test_a_run_is_found_by_path_by_name_and_as_latest(tmp_path):
    run = create_run_directory(tmp_path, "a")
    with pytest.raises(FileNotFoundError, match=r"run 'latest': found no run directory \(a folder with config.toml\)"):
        find_run("latest", tmp_path)
    write_config(run, RunConfig())
    for name in (run, str(run), run.name, "latest"):
        assert find_run(name, tmp_path) == run


def test_a_directory_that_holds_a_run_is_not_used_again(tmp_path):
    run = claim_run_directory(tmp_path / "new" / "run")
    write_config(run, RunConfig())
    with pytest.raises(ValueError, match="run-dir: .*run holds a run already; name another"):
        claim_run_directory(run)


def test_the_resolved_configuration_reads_back_equal(tmp_path):
    config = RunConfig.from_flat({"optimizer.eps": 1e-12, "data.path": '/a "b"\\c'})
    write_config(tmp_path, config)
    assert read_run_config(tmp_path) == config


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("seed: expected"), "bad-input"),
        (FileNotFoundError("plan: no file"), "bad-input"),
        (RuntimeError("every client failed"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(0), "interrupted"),
    ],
)
def test_a_failure_says_whose_it_is_and_keeps_its_traceback(tmp_path, error, status):
    try:
        raise error
    except BaseException as raised:
        write_failure(tmp_path, raised)
    log = (tmp_path / "logs" / "error.log").read_text()
    assert "test_run_directory.py" in log and type(error).__name__ in log.splitlines()[-1]
    said = "interrupted" if status == "interrupted" else str(error)
    assert read_summary(tmp_path) == {"status": status, "error": said}


def test_where_no_log_can_be_written_the_failure_is_told_all_the_same(tmp_path):
    """On a full disk the summary may still fit, and the launcher waits for it."""
    (tmp_path / "logs").touch()
    write_failure(tmp_path, ValueError("seed: expected a number"))
    assert read_summary(tmp_path) == {"status": "bad-input", "error": "seed: expected a number"}


def test_an_error_that_nobody_meant_is_told_with_its_type_and_place_and_the_log(tmp_path):
    """A missing key was told as its name alone, ``error: 1``."""
    for wrong in (lambda: ClusterState.from_dict({}), lambda: torch.ones(2, 3) @ torch.ones(2, 3)):
        try:
            wrong()
        except Exception as error:
            write_failure(tmp_path, error)
            kind = type(error).__name__
        told = read_summary(tmp_path)
        assert told["status"] == "failed"
        assert told["error"].startswith(f"{kind}: ") and str(tmp_path / "logs" / "error.log") in told["error"]
        if kind == "KeyError":
            assert "strategies/clusters.py, line " in told["error"]


def test_a_saved_model_reads_back_equal_and_replaces_the_one_before(tmp_path):
    for seed in (1, 2):
        weights = build_parts(SMALL_TRANSFORMER, seed).weights()
        save_model(tmp_path, SMALL_TRANSFORMER, weights, '{"tokens": "ä"}', {"name": "translation"})
    # The one before goes when no committed round needs it.
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["round-000000", "round-000000-1"]
    keep_versions(tmp_path, [])
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["round-000000-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "models"]
    found = load_model(tmp_path)
    assert found.spec == SMALL_TRANSFORMER
    assert (found.tokenizer_json, found.task) == ('{"tokens": "ä"}', {"name": "translation"})
    assert all(torch.equal(value, weights[name]) for name, value in found.parts.weights().items())


def test_a_model_with_adapters_over_files_names_them_and_does_not_copy_them(tmp_path):
    plain = tiny_spec("llama", dropout=0.0)
    build_parts(plain, 3).reference.save_pretrained(tmp_path / "base")
    spec, start = load_pretrained_weights(str(tmp_path / "base"), "causal-lm", server_layers=2)
    prepared = Prepared(
        spec=replace(spec, lora=LoraConfig(rank=2)),
        tokenizer_json="",
        evaluator=None,
        cluster_sizes=(1,),
        weights=start,
    )
    parts = evaluation(prepared.build(seed=4))
    weights = {name: value + 0.1 for name, value in parts.weights().items()}
    parts.load(weights)
    folder = save_model(tmp_path, prepared.spec, weights, "{}", {}, 7, prepared.base)
    assert not any("base_layer" in name for name in load_file(folder / "model.safetensors"))
    read, batch = load_model(tmp_path).parts, tiny_batch(spec)
    with torch.no_grad():
        assert torch.equal(evaluation(read).logits(batch), parts.logits(batch))
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"base is no folder with safetensors files on .*SHA-256"):
        load_model(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused_by_file_and_tensor(tmp_path):
    weights = build_parts(SMALL_TRANSFORMER, 1).weights()
    wider = replace(SMALL_TRANSFORMER, config={**SMALL_TRANSFORMER.config, "feed_forward": 32})
    save_model(tmp_path, wider, weights, "{}", {})
    with pytest.raises(ValueError, match=r"model\.safetensors: weights of the model: .* has shape \[16"):
        load_model(tmp_path)
    deeper = replace(SMALL_TRANSFORMER, config={**SMALL_TRANSFORMER.config, "encoder_layers": 3})
    save_model(tmp_path, deeper, weights, "{}", {})
    with pytest.raises(ValueError, match=r"model\.safetensors: weights of the model do not fit: missing \['blocks.2"):
        load_model(tmp_path)


def test_a_damaged_model_is_refused_by_file(tmp_path):
    folder = save_model(tmp_path, SMALL_TRANSFORMER, build_parts(SMALL_TRANSFORMER, 1).weights(), "{}", {})
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        load_model(tmp_path)
    (folder / "spec.json").write_text("{}")
    with pytest.raises(ValueError, match="model: model specification: expected JSON with the keys family"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{bad", "[1]", "\x00"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, text):
    """collapipe report and --resume used to say what JSON missed, but not where, or ended in a traceback."""
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n' + text + "\n")
    with pytest.raises(ValueError, match="rounds.jsonl: expected"):
        read_rounds(tmp_path)
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match="summary.json: expected"):
        read_summary(tmp_path)


def test_a_run_that_goes_on_cannot_be_resumed(tmp_path):
    run_dir = tmp_path / "run"
    leftover = run_dir / "checkpoint" / ".round-of-the-run-that-goes-on"
    leftover.mkdir(parents=True)
    write_config(run_dir, RunConfig(run_dir=str(run_dir)))
    with locked(run_dir), pytest.raises(ValueError, match="this run is still going"):
        continued_run(str(run_dir))
    assert leftover.is_dir()
    with pytest.raises((ValueError, FileNotFoundError), match="checkpoint"):
        continued_run(str(run_dir))


class PanicException(BaseException):
    """Libraries in Rust raise one of this name: the tokenizers where no thread can be started."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PanicException("called `Result::unwrap()` on an `Err` value: Os { code: 11 }"), "PanicException: called"),
        (SystemExit(1), "SystemExit: 1"),
        (SystemExit("no more threads"), "SystemExit: no more threads"),
        (GeneratorExit("left"), "GeneratorExit: left"),
    ],
)
def test_only_a_signal_interrupts_a_run(tmp_path, error, text):
    """A process limit made a run "interrupted" whose tokenizer could not start its threads."""
    write_failure(tmp_path, error)
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed" and summary["error"].startswith(text)


def test_a_run_that_flower_has_ended_says_so(tmp_path):
    """After a restart of the SuperLink the run was "interrupted", though nobody had sent a signal."""
    write_failure(tmp_path, type("RunNotRunningException", (BaseException,), {})())
    summary = read_summary(tmp_path)
    assert summary["status"] == "interrupted" and "its SuperLink was started anew" in summary["error"]
