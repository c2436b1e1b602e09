"""Warnings, each with its remedy, about settings that run but hardly as meant; and refusals of misleading ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flower_app.config.run_config import RunConfig
from flower_app.tasks.data.corpus import DataConfig

_PLANS_ITSELF = "fixed"


def cautions(config: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Return a line for each caution about a configuration; ``given`` are the keys that the user has set."""
    lines = []
    warm_up, total = config.optimizer.warmup_steps, config.optimizer.total_steps
    if warm_up > total:
        lines.append(
            f"optimizer.warmup-steps: {warm_up} steps of warm-up, but the run has {total} (num-rounds = "
            f"{config.num_rounds} x local-steps = {config.local_steps}), so the learning rate ends at "
            f"{config.optimizer.learning_rate(total):.3g}, not {config.optimizer.lr:g}; "
            f"set optimizer.warmup-steps = {total // 10}"
        )
    if config.plan and "policy" in given and config.policy != _PLANS_ITSELF:
        lines.append(
            f"plan: the plan file {config.plan} takes the place of policy = {config.policy!r}, which plans nothing; "
            "leave one of them out"
        )
    return [*lines, *_held_out(config.data)]


def check_honest_scores(config: RunConfig) -> None:
    """Refuse a choice of the model, or of the run's end, by the score on the test file."""
    data, selection = config.data, config.selection
    if data.source != "files" or not _tests_validate(data):
        return
    for key, value, chosen in (
        ("selection.load-best-at-end", selection.load_best_at_end, "the model"),
        ("selection.patience", selection.patience, "the last round"),
    ):
        if value:
            found = str(value).lower()
            raise ValueError(
                f"{key}: {found} would choose {chosen} by the test file {data.test_source}, for "
                f"data.validation-source {'is empty' if not data.validation_source else 'is the same file'}, and the "
                "test score would be too good; set data.validation-source to a file of its own"
            )


def _held_out(data: DataConfig) -> Iterator[str]:
    """Files that stand for others, or for two things at once."""
    if data.source != "files":
        return
    train, validation, test = data.train_source, data.validation_source, data.test_source
    if _tests_validate(data):
        because = "is the same file" if validation else "is empty"
        yield (
            f"data.validation-source: {because}, so the test file {test} is scored after the rounds too; choose "
            "nothing by these scores, or set data.validation-source to a file of its own"
        )
    elif not test:
        yield (
            f"data.test-source: is empty, so the final score is that of the validation file {validation}; set "
            "data.test-source to a file of its own to report it"
        )
    for key, file in (("data.validation-source", validation), ("data.test-source", test)):
        if file and file == train:
            yield f"{key}: {file} is the training file too, so its score tells nothing; name a file of its own"


def _tests_validate(data: DataConfig) -> bool:
    return bool(data.test_source) and data.validation_source in ("", data.test_source)
