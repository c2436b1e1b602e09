"""``collapipe evaluate``, ``predict`` and ``translate``: the use of a run's model."""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flower_app.cli.options import Json, Run, Sets
from flower_app.console import print_json, say


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (evaluate, predict, translate):
        app.command()(command)


def evaluate(
    run: Run = "latest",
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Score the model of a run on its held-out data."""
    from flower_app.tasks.base import task

    if split not in ("test", "validation"):
        raise ValueError(f"--split: expected test or validation, found {split!r}")
    run_dir, config, model = _saved(run, sets)
    score = task(config.task).evaluator(config.data, model.tokenizer_json).evaluate(model.parts, split)
    for name, value in score.metrics.items():
        say(f"{name} {value:.4g}")
    say(f"{score.examples} examples of {split}  {score.signature}")
    if score.truncated:
        say(f"warning: {score.truncated} sequences of {split} were cut at data.max-length = {config.data.max_length}")
    if as_json:
        score_values = {
            "split": split,
            "examples": score.examples,
            "metrics": score.metrics,
            "signature": score.signature,
        }
        print_json({"run_dir": str(run_dir), **score_values, "truncated": score.truncated})


def predict(
    run: Run,
    texts: Annotated[
        list[str] | None, typer.Argument(help="What to translate, classify, tag, fill or continue.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A table or a text file, instead of texts.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --file: gets its rows and a column prediction.")] = None,
    column: Annotated[str, typer.Option(help="With --file: of the texts; otherwise as in training.")] = "",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Use the model of a run: a line of output for each text, or a column for each row of a file."""
    if file is not None:
        _predict_file(run, texts, file, out, column, sets, as_json)
        return
    if out is not None or column:
        raise ValueError("--out and --column: expected --file too, found none; name the file with the texts")
    if not texts:
        raise ValueError("predict: expected texts, or --file FILE --out FILE; found neither")
    predictions = _predict(run, texts, sets)
    if as_json:
        print_json({"inputs": texts, "predictions": predictions})
    else:
        typer.echo("\n".join(predictions))


def translate(
    run: Run,
    sentences: Annotated[list[str], typer.Argument(help="What to translate.")],
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Translate sentences with the model of a run: predict, for translation alone."""
    translations = _predict(run, sentences, sets, only="translation")
    if as_json:
        print_json({"sources": sentences, "translations": translations})
    else:
        typer.echo("\n".join(translations))


def _predict_file(
    run: str,
    texts: list[str] | None,
    file: Path,
    out: Path | None,
    column: str,
    sets: list[str] | None,
    as_json: bool,
) -> None:
    from flower_app.prediction_file import check_out, read_text_rows, write_predictions
    from flower_app.tasks.base import task
    from flower_app.tasks.tagging import TaggingTask

    if texts or out is None:
        raise ValueError(
            f"--file: expected --out FILE and no texts beside it, found {'texts' if texts else 'no --out'}; write "
            f"collapipe predict {run} --file {file} --out predicted{file.suffix}"
        )
    check_out(out)
    _, config, model = _saved(run, sets)
    rows = read_text_rows(file, column or config.data.source_column)
    used = task(config.task)
    # A label for each word of the file, as in training; of everything else the words make a text.
    takes_words = isinstance(used, TaggingTask)
    inputs: list[Any] = [v if isinstance(v, str) or takes_words else " ".join(v) for v in rows.inputs]
    predictions = used.predict(model.parts, model.tokenizer_json, inputs)
    write_predictions(out, rows, predictions)
    say(f"{len(predictions)} rows of {file} with a column prediction: {out}")
    if as_json:
        print_json({"out": str(out), "rows": len(predictions)})


def _saved(run: str, sets: list[str] | None) -> tuple[Path, Any, Any]:
    """Directory, configuration (with overrides) and model of a run."""
    from flower_app.config.sources import load_config
    from flower_app.runs.run_directory import CONFIG, find_run
    from flower_app.saved_model import load_model

    run_dir = find_run(run)
    config = load_config(str(run_dir / CONFIG), sets or ())
    return run_dir, config, load_model(run_dir, config.model.family)


def _predict(run: str, texts: list[str], sets: list[str] | None, only: str = "") -> list[str]:
    from flower_app.tasks.base import task

    run_dir, config, model = _saved(run, sets)
    if only and config.task.name != only:
        raise ValueError(f"{run_dir.name} was trained on {config.task.name}, not {only}; use collapipe predict")
    return task(config.task).predict(model.parts, model.tokenizer_json, texts)
