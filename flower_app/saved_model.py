"""The global model of a run as files: safetensors, its specification, its tokenizer and its task.

Nothing here unpickles: a model folder may come from anybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from client_pipeline import durable
from client_pipeline.documents import json_value
from client_pipeline.families.families import build_over, build_parts
from client_pipeline.families.fresh_base import frozen_base
from client_pipeline.families.merged_weights import MergedWeights
from client_pipeline.partition.parts import ModelParts, part_weights
from client_pipeline.partition.spec import ModelSpec, is_outside
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.weight_files import MappedFile
from flower_app.model_files import BASE_FILES, MODEL_FOLDER
from flower_app.tokenizer_files import KEPT_FILES, SETTINGS_FILE, TokenizerSettings, joined, parted, read_files

VERSIONS = "models"
_VERSION = re.compile(r"^round-(\d{6,})(?:-(\d+))?$")
WEIGHTS = "model.safetensors"
SPEC = "spec.json"
TOKENIZER = "tokenizer.json"
TASK = "task.json"
_OF_CLUSTER = "cluster-{}.safetensors"
"""Weights of clusters 1, 2, ... where each cluster has a model of its own; :data:`WEIGHTS` are cluster 0's then."""

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class SavedModel:
    """A model folder, read and checked."""

    parts: ModelParts
    tokenizer_json: str
    """Text of a ``tokenizers`` tokenizer."""
    task: dict[str, Any]
    """State of the task: JSON values."""

    @property
    def spec(self) -> ModelSpec:
        """Architecture."""
        return self.parts.spec


@dataclass(frozen=True)
class StoredModel:
    """A model folder, read and checked, with its weights still in their files."""

    spec: ModelSpec
    weights: MappedFile
    """The run's own file, by global name."""
    base: FrozenBase | None
    """The frozen weights, where they are not in that file."""
    tokenizer_json: str
    task: dict[str, Any]

    def release(self) -> None:
        """Give the pages of tensors that were read back to the system."""
        for name in self.weights:
            self.weights.release(name)
        if self.base is not None:
            self.base.release()


def save_model(
    run_dir: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    tokenizer_json: str,
    task: Mapping[str, Any],
    round_: int = 0,
    base: FrozenBase | None = None,
    others: Sequence[Mapping[str, Tensor]] = (),
) -> Path:
    """Write the model folder of a run; one that is there is replaced as a whole, in one step.

    Parameters
    ----------
    run_dir : the run directory
    spec : architecture
    weights : every parameter under its global name, frozen ones too unless they are in ``base``
    tokenizer_json : text of the tokenizer; the files that it came with stand beside it
    task : what the task wants to remember: JSON values
    round_ : that it is of
    base : what adapters are added to, where that is in files or drawn from a seed: they are named, and not copied
    others : weights of clusters 1, 2, ... where each cluster has a model of its own

    Returns
    -------
    The model folder: a link to the version that was written, in ``models``.
    """
    from safetensors.torch import save_file

    versions = durable.make_folders(run_dir / VERSIONS)
    durable.remove_leftovers(versions)
    settings, vocabulary_json = parted(tokenizer_json)
    texts = {
        **settings.files,
        SPEC: spec.to_json(),
        TOKENIZER: vocabulary_json,
        TASK: json.dumps(dict(task), ensure_ascii=False, indent=2),
    }
    if settings_json := settings.to_json(with_files=False):
        texts[SETTINGS_FILE] = settings_json
    if base is not None:
        texts[BASE_FILES] = base.to_json()
    # Never over one that is there: the link would point to nothing for a moment.
    numbers = [number for version_round, number in _versions(run_dir) if version_round == round_]
    name = _name((round_, 1 + max(numbers, default=-1)))
    files: dict[str, durable.FileWriter] = {}
    for n, own in enumerate((weights, *others)):
        tensors = {key: value.detach().contiguous() for key, value in own.items()}
        files[_OF_CLUSTER.format(n) if n else WEIGHTS] = partial(save_file, tensors)
    for file, text in texts.items():
        files[file] = methodcaller("write_text", text, encoding="utf-8")
    durable.write_folder(versions / name, files)
    durable.point(run_dir / MODEL_FOLDER, f"{VERSIONS}/{name}")
    return run_dir / MODEL_FOLDER


def keep_versions(run_dir: Path, rounds: Collection[int]) -> None:
    """Drop the versions of the model but the newest, and those of runs that go on from one of ``rounds``."""
    versions = _versions(run_dir)
    needed = {max((v for v in versions if v[0] <= round_), default=None) for round_ in rounds}
    for version in versions[:-1]:
        if version not in needed:
            durable.remove(run_dir / VERSIONS / _name(version))


def restore_version(run_dir: Path, round_: int) -> None:
    """Make the model folder that of a run which goes on from a round: what was saved later is dropped."""
    if not (run_dir / VERSIONS).is_dir():
        return
    durable.remove_leftovers(run_dir)
    durable.remove_leftovers(run_dir / VERSIONS)
    versions = _versions(run_dir)
    valid = [version for version in versions if version[0] <= round_]
    if valid:
        durable.point(run_dir / MODEL_FOLDER, f"{VERSIONS}/{_name(valid[-1])}")
    else:
        durable.remove(run_dir / MODEL_FOLDER)
    for version in versions[len(valid) :]:
        durable.remove(run_dir / VERSIONS / _name(version))


def _versions(run_dir: Path) -> list[tuple[int, int]]:
    """Round and number of each version, in the order of their writing."""
    matches = (_VERSION.match(path.name) for path in (run_dir / VERSIONS).glob("round-*"))
    return sorted((int(match[1]), int(match[2] or 0)) for match in matches if match)


def _name(version: tuple[int, int]) -> str:
    round_, number = version
    return f"round-{round_:06d}" + (f"-{number}" if number else "")


def saved_weights(run_dir: Path) -> list[dict[str, Tensor]]:
    """Read the weights alone of the model that this run has saved, by global name; of all clusters' own models."""
    from safetensors.torch import load_file

    folder = run_dir / MODEL_FOLDER
    others = range(1, 1 + len(list(folder.glob(_OF_CLUSTER.format("*")))))
    return [load_file(folder / name) for name in (WEIGHTS, *map(_OF_CLUSTER.format, others))]


def read_model(
    run_dir: Path, family: str = "", task_name: str = "", source: str = "", cluster: int | None = None
) -> StoredModel:
    """Read all of a run's model but its weights, which stay in their files.

    Parameters
    ----------
    run_dir : the run directory
    family, task_name : as of :func:`load_model`, which raises the same errors
    source : folder or hub id of the frozen weights; empty: as the run has noted
    cluster : whose model, where each cluster has its own; ``ValueError`` where it has none
    """
    read = partial(_read_version, family=family, task_name=task_name, source=source, cluster=cluster)
    return _newest(run_dir / MODEL_FOLDER, read)


def load_model(run_dir: Path, family: str = "", task_name: str = "") -> SavedModel:
    """Read the model of a run.

    Parameters
    ----------
    run_dir : the run directory
    family : ``model.family``: a class from outside is imported if the reader's configuration names it, and never
        because a folder does
    task_name : ``task.name`` of the reader's configuration; empty: the model is not used for its task

    Raises
    ------
    FileNotFoundError
        If the run has no model; the message says what that means.
    ValueError
        If a file is damaged, the weights have another shape, the family is a class that was not asked for, or the
        model learned another task; the message names the file.
    """

    def load(link: Path, folder: Path) -> SavedModel:
        stored = _read_version(link, folder, family, task_name)
        return SavedModel(_built(stored, link), stored.tokenizer_json, stored.task)

    return _newest(run_dir / MODEL_FOLDER, load)


def load_plain_model(run_dir: Path, family: str = "", task_name: str = "") -> SavedModel:
    """Read the model of a run with its adapters merged, for use; tensors without adapters stay in their files.

    Parameters and errors are those of :func:`load_model`.
    """

    def load(link: Path, folder: Path) -> SavedModel:
        stored = _read_version(link, folder, family, task_name)
        try:
            with ThreadPoolExecutor(1) as thread:
                # The files are compared with their digests while the model is built of them.
                checked = thread.submit(stored.base.check) if stored.base is not None else None
                parts = MergedWeights(stored.spec, stored.weights, stored.base).build()
                if checked is not None:
                    checked.result()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{link / WEIGHTS}: {error}") from error
        return SavedModel(parts, stored.tokenizer_json, stored.task)

    return _newest(run_dir / MODEL_FOLDER, load)


def _newest(link: Path, read: Callable[[Path, Path], _Read]) -> _Read:
    """Read the version that a link points to: a run may save another one meanwhile, and remove this one."""
    folder = _version_of(link)
    while True:
        try:
            return read(link, folder)
        except FileNotFoundError:
            newer = _version_of(link)
            if newer == folder:
                raise
            folder = newer


def _version_of(link: Path) -> Path:
    """The folder with all files of one version: a run may save another one meanwhile."""
    return link.parent / link.readlink() if link.is_symlink() else link


def _read_version(
    link: Path, folder: Path, family: str, task_name: str, source: str = "", cluster: int | None = None
) -> StoredModel:
    for name in (WEIGHTS, SPEC, TOKENIZER, TASK):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{link / name}: no such file; the run has not saved a model (did it finish?)")
    if cluster is not None:
        num_own = 1 + len(list(folder.glob(_OF_CLUSTER.format("*"))))
        if num_own == 1 or not 0 <= cluster < num_own:
            found = f"models of clusters 0 to {num_own - 1}" if num_own > 1 else "one model alone"
            raise ValueError(
                f"{link}: the run has saved {found}, found --cluster {cluster}; correct it, or leave it out"
            )
    try:
        spec = ModelSpec.from_json((folder / SPEC).read_text(encoding="utf-8"))
        if is_outside(spec.family) and spec.family != family:
            raise ValueError(
                f"the model is of the family {spec.family!r}, a class that is imported where model.family names it "
                f"alone, found {family!r}; if you trust that module, set model.family"
            )
        text = (folder / BASE_FILES).read_text(encoding="utf-8") if (folder / BASE_FILES).is_file() else ""
        base = frozen_base(text, spec, source) if text else None
        task = json_value((folder / TASK).read_text(encoding="utf-8"))
        if not isinstance(task, dict):
            raise ValueError(f"{TASK}: expected an object, found {str(task)[:60]}; copy the run's own file")
        files = read_files(str(folder), [*KEPT_FILES, SETTINGS_FILE])
        settings = TokenizerSettings.from_json(files.pop(SETTINGS_FILE, ""), files)
        weights = MappedFile(folder / WEIGHTS if not cluster else folder / _OF_CLUSTER.format(cluster))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{link}: {error}") from error
    learned = task.get("name", task_name)
    if task_name and learned != task_name:
        raise ValueError(f"{link}: expected a model of task.name = {task_name!r}, found {learned!r}; correct it")
    vocabulary_json = (folder / TOKENIZER).read_text(encoding="utf-8")
    return StoredModel(spec, weights, base, joined(settings, vocabulary_json), task)


def _built(stored: StoredModel, link: Path) -> ModelParts:
    """Build a model from its files."""
    spec, base, weights = stored.spec, stored.base, stored.weights
    try:
        parts = build_parts(spec, seed=0) if base is None else None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{link}: {error}") from error
    try:
        frozen: Collection[str] = ()
        if parts is None:
            assert base is not None
            parts = build_over(spec, base, part_weights(weights, "head"), seed=0)
        else:
            frozen = parts.frozen_weights().keys()
            parts.load_frozen({name: value for name, value in weights.items() if name in frozen})
        parts.load({name: value for name, value in weights.items() if name not in frozen})
    except ValueError as error:
        raise ValueError(f"{link / WEIGHTS}: {error}") from error
    return parts
