"""``collapipe evaluate``, ``predict`` and ``translate``: the use of a run's model."""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from client_pipeline.counted import counted
from flower_app.cli.options import AllowedModules, Json, Run, Sets
from flower_app.console import print_json, say


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (evaluate, predict, translate):
        app.command()(command)


def evaluate(
    run: Run = "latest",
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    sets: Sets = None,
    allow_module: AllowedModules = None,
    as_json: Json = False,
) -> None:
    """Score the model of a run on its held-out data."""
    from flower_app.tasks.base import task

    if split not in ("test", "validation"):
        raise ValueError(f"--split: expected test or validation, found {split!r}")
    run_dir, config, model = saved(run, sets, allow_module)
    score = task(config.task).evaluator(config.data, model.tokenizer_json).evaluate(model.parts, split)
    for name, value in score.metrics.items():
        say(f"{name} {value:.4g}")
    say(f"{counted(score.examples, 'example')} of {split}  {score.signature}")
    for each in score.mistakes.get("classes", ()):
        values = "  ".join(f"{name} {each[name]:.4f}" for name in ("precision", "recall", "f1"))
        say(f"class {each['name']}: {values}  support {each['support']}")
    if score.truncated:
        were_cut = f"{counted(score.truncated, 'sequence')} of {split} {'was' if score.truncated == 1 else 'were'} cut"
        say(f"warning: {were_cut} at data.max-length = {config.data.max_length}")
    if as_json:
        score_values = {
            "split": split,
            "examples": score.examples,
            "metrics": score.metrics,
            "signature": score.signature,
        } | ({"mistakes": score.mistakes} if score.mistakes else {})
        print_json({"run_dir": str(run_dir), **score_values, "truncated": score.truncated})


def predict(
    run: Run,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="What to translate, classify, tag, fill, continue or answer; also messages in JSON."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A table or a text file, instead of texts.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --file: gets its rows and a column prediction.")] = None,
    column: Annotated[str, typer.Option(help="With --file: of the texts; otherwise as in training.")] = "",
    proba: Annotated[bool, typer.Option("--proba", help="Each label's probability too, as p_LABEL.")] = False,
    sets: Sets = None,
    allow_module: AllowedModules = None,
    as_json: Json = False,
) -> None:
    """Use the model of a run: a line of output for each text, or a column for each row of a file."""
    if file is None:
        if out is not None or column:
            raise ValueError("--out and --column: expected --file too, found none; name the file with the texts")
        if not texts:
            raise ValueError("predict: expected texts, or --file FILE --out FILE; found neither")
        predictions, probabilities = _predict(run, texts, sets, allow_module, proba=proba)
        if as_json:
            document = {"inputs": texts, "predictions": predictions}
            print_json(document | ({"probabilities": probabilities} if proba else {}))
        else:
            cells = [[text] for text in predictions]
            for line, by_label in zip(cells, probabilities, strict=proba):
                line += [f"p_{label}={value:.4f}" for label, value in by_label.items()]
            typer.echo("\n".join(map("\t".join, cells)))
        return
    from client_pipeline.durable import check_not_input
    from flower_app.prediction_file import check_out, read_question_rows, read_text_rows, write_predictions
    from flower_app.runs.machines import MACHINES
    from flower_app.runs.phases import PHASES
    from flower_app.runs.run_directory import ROUNDS
    from flower_app.tasks.base import task
    from flower_app.tasks.instruction import InstructionTask
    from flower_app.tasks.tagging import TaggingTask

    if texts or out is None:
        raise ValueError(
            f"--file: expected --out FILE and no texts beside it, found {'texts' if texts else 'no --out'}; write "
            f"collapipe predict {run} --file {file} --out predicted{file.suffix}"
        )
    check_out(out)
    check_not_input("--out", out, file)
    if proba and out.suffix == ".txt":
        raise ValueError(f"--out: {out}: a text file has no columns for --proba; write a .csv, .tsv or .jsonl")
    run_dir, config, model = saved(run, sets, allow_module, proba, writes=True)
    check_not_input("--out", out, *(run_dir / name for name in (ROUNDS, MACHINES, PHASES)))
    chosen = task(config.task)
    is_chat = isinstance(chosen, InstructionTask)
    is_tagger = isinstance(chosen, TaggingTask)
    named = column or config.data.source_column
    if is_chat:
        rows = read_question_rows(file, named, config.data.pair_column)
    else:
        # A table's column that a tagger is trained on has words between blanks, or lists.
        words = (config.data.source_column or "tokens") if is_tagger else ""
        rows = read_text_rows(file, named, config.data.pair_column, words)
    # Tagging gives each word of the file a label, as in training; other tasks join the words to a text.
    takes_lists = is_chat or is_tagger
    inputs: list[Any] = [" ".join(map(str, v)) if isinstance(v, list) and not takes_lists else v for v in rows.inputs]
    predictions, probabilities = _predictions(config, model, inputs, proba)
    write_predictions(out, rows, predictions, probabilities)
    say(f"{len(predictions)} rows of {file} with a column prediction: {out}")
    if as_json:
        print_json({"out": str(out), "rows": len(predictions)})


def translate(
    run: Run,
    sentences: Annotated[list[str], typer.Argument(help="What to translate.")],
    sets: Sets = None,
    allow_module: AllowedModules = None,
    as_json: Json = False,
) -> None:
    """Translate sentences with the model of a run: predict, for translation alone."""
    translations, _ = _predict(run, sentences, sets, allow_module, only="translation")
    if as_json:
        print_json({"sources": sentences, "translations": translations})
    else:
        typer.echo("\n".join(translations))


def saved(
    run: str, sets: list[str] | None, allow_module: list[str] | None, proba: bool = False, writes: bool = False
) -> tuple[Path, Any, Any]:
    """Directory, configuration (with overrides) and model of a run.

    The model must give probabilities with ``proba``. One that ``writes`` texts token by token has its adapters merged.
    """
    run_dir, config = _found(run, sets, allow_module)

    from client_pipeline.partition.spec import CAUSAL_LM
    from flower_app.saved_model import load_model, load_plain_model
    from flower_app.tasks.base import task, task_with_probabilities

    if proba:
        task_with_probabilities(config.task)
    is_writer = writes and getattr(task(config.task), "head", "") == CAUSAL_LM
    load = load_plain_model if is_writer else load_model
    return run_dir, config, load(run_dir, config.model.family, config.task.name)


def _found(run: str, sets: list[str] | None, allow_module: list[str] | None) -> tuple[Path, Any]:
    from flower_app.config.sources import load_stored_config
    from flower_app.model_files import digest_early
    from flower_app.runs.run_directory import CONFIG, find_run

    run_dir = find_run(run)
    digest_early(run_dir)
    return run_dir, load_stored_config(run_dir / CONFIG, sets or (), allow_module or ())


def _predict(
    run: str,
    texts: list[str],
    sets: list[str] | None,
    allow_module: list[str] | None,
    only: str = "",
    proba: bool = False,
) -> tuple[list[str], list[dict[str, float]]]:
    run_dir, config = _found(run, sets, allow_module)

    from flower_app.prediction_file import typed_inputs
    from flower_app.tasks.base import task
    from flower_app.tasks.instruction import InstructionTask

    chosen = task(config.task)
    if isinstance(chosen, InstructionTask) and not only and not proba:
        from flower_app.saved_model import load_plain_model, read_model

        tokenizer_json = read_model(run_dir, config.model.family, config.task.name).tokenizer_json
        with ThreadPoolExecutor(1) as thread:
            # The template's program starts while the model is read.
            asked = thread.submit(chosen.prompts, tokenizer_json, texts)
            parts = load_plain_model(run_dir, config.model.family, config.task.name).parts
            return chosen.answers(parts, *asked.result()), []
    run_dir, config, model = saved(run, sets, allow_module, proba, writes=True)
    if only and config.task.name != only:
        raise ValueError(f"{run_dir.name} was trained on {config.task.name}, not {only}; use collapipe predict")
    inputs = texts if config.task.name == "instruction" else typed_inputs(config.data, texts)
    return _predictions(config, model, inputs, proba)


def _predictions(config: Any, model: Any, inputs: Any, proba: bool) -> tuple[list[str], list[dict[str, float]]]:
    """Predict each text, and with ``proba`` the probability of each label."""
    from flower_app.tasks.base import task, task_with_probabilities

    if not proba:
        return task(config.task).predict(model.parts, model.tokenizer_json, inputs), []
    probabilities = task_with_probabilities(config.task).probabilities(model.parts, model.tokenizer_json, inputs)
    return [max(by_label, key=by_label.__getitem__) for by_label in probabilities], probabilities
