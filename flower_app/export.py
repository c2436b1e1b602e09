"""``collapipe export``: the model of a run as a folder for the transformers library, or its adapters for peft."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from client_pipeline import durable
from client_pipeline.families.families import max_length
from client_pipeline.families.registry import is_decoder_only, is_library, library_families
from client_pipeline.partition.spec import CAUSAL_LM, CLASSIFIERS, MASKED_LM, SEQ2SEQ
from client_pipeline.weights.base_weights import BaseWeights
from client_pipeline.weights.hub_ids import hub_answers, hub_host, is_offline
from client_pipeline.weights.weight_files import model_file
from flower_app.config.run_config import RunConfig
from flower_app.exported.adapter_folder import write_adapters
from flower_app.exported.library_folder import LibraryTensors, library_config, write_weights
from flower_app.exported.model_card import CARD, CardFacts, is_on_this_machine, model_card
from flower_app.gguf_import import made_aside
from flower_app.model_files import MODEL_FOLDER
from flower_app.runs.run_directory import read_run_config, read_summary
from flower_app.saved_model import StoredModel, read_model
from flower_app.tasks.tokenizer import TextTokenizer, load_tokenizer
from flower_app.tokenizer_files import GENERATION, VOCABULARY_FILES, file_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SPECIAL_TOKENS = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""Settings of the library's tokenizer beside begin, end and padding, and the usual names of such tokens."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    folder: Path
    model_class: str
    """Class of the transformers library, such as ``BertForTokenClassification``."""
    files: list[str]
    rounding: str
    """Sentence about adapters over rounded matrices; empty: the base model's own numbers are theirs."""


def export_run(
    run_dir: Path, folder: Path, *, adapter: bool = False, base: str = "", cluster: int | None = None
) -> Exported:
    """Write the model of a run as a folder, shard by shard.

    Parameters
    ----------
    run_dir : the run directory
    folder : a new one; until it is complete it is not there
    adapter : write the adapters alone, for ``PeftModel.from_pretrained``; else the whole model with adapters merged,
        for ``AutoModelFor...``
    base : folder or hub id of the base model on this machine; empty: as the run has noted
    cluster : whose model, where each cluster has its own; None: cluster 0's

    Raises
    ------
    FileNotFoundError
        If the run has no model.
    ValueError
        If there is no model of that cluster's own, the library does not know the architecture, the folder is in use,
        the base model is gone or another one, or there are no adapters that could be written alone.
    """
    durable.check_new_folder(folder)
    base = str(Path(base).resolve()) if base and Path(base).is_dir() else base
    stored, config = read_model(run_dir, source=base, cluster=cluster), read_run_config(run_dir)
    if base and not _first_base(config):
        raise ValueError(f"--base: {run_dir}: training began with no pretrained model, found {base!r}; leave it out")
    if not is_library(stored.spec.family):
        raise ValueError(
            f"{run_dir}: the model is of family {stored.spec.family}, an architecture that the transformers "
            "library does not know, so it cannot be exported. Use it with collapipe predict and collapipe evaluate, or "
            f"in Python with flower_app.saved_model.load_model; its weights are plain safetensors in "
            f"{run_dir / MODEL_FOLDER}. Models of the families {', '.join(library_families())} can be exported"
        )
    if stored.base is not None:
        try:
            stored.base.check()
        except ValueError as error:
            raise ValueError(f"{run_dir}: {error}; for an export name its folder: --base FOLDER") from error
    name = run_dir.name if cluster is None else f"{run_dir.name}, cluster {cluster}"
    facts = _facts(name, run_dir, stored, config, adapter, base)
    tensors = LibraryTensors(stored)
    tokenizer = TextTokenizer.from_json(stored.tokenizer_json) if stored.tokenizer_json else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with made_aside(folder) as aside:
            if adapter:
                write_adapters(stored, tensors, facts.base_model, aside)
            else:
                write_weights(tensors, aside)
            model_config = _configure(stored, tensors, tokenizer, aside)
            if tokenizer is not None:
                _save_tokenizer(stored, tensors, tokenizer, aside)
            (aside / CARD).write_text(model_card(facts), encoding="utf-8")
            for weights in aside.glob("*.safetensors"):
                # The library keeps them from all but the owner.
                shutil.copymode(aside / CARD, weights)
            if not adapter or stored.spec.head in CLASSIFIERS:
                # The last file: what it stands beside is complete. Beside adapters it names the classes.
                model_config.save_pretrained(aside)
    except (OSError, SafetensorError) as error:
        # The library's own error hides a full disk.
        raise ValueError(f"{folder}: cannot be written: {error}; make room and try again") from error
    return Exported(
        folder=folder,
        model_class=type(tensors.reference).__name__,
        files=sorted(file.name for file in folder.iterdir()),
        rounding=facts.rounding if adapter else "",
    )


def check_push(run_dir: Path, hub_id: str, base: str = "") -> None:
    """Raise ``ValueError`` if a run's export cannot be pushed to an id, before it is written.

    Parameters
    ----------
    run_dir : the run directory
    hub_id : to push to
    base : as for :func:`export_run`
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        raise ValueError(
            f"--push-to: expected a hub id such as organisation/name, found {hub_id!r}: {error}"
        ) from error
    base = base or _first_base(read_run_config(run_dir))
    if is_on_this_machine(base):
        raise ValueError(
            f"--push-to: the base model is {base}, a folder that nobody else has; name it by its hub id: --base "
            "ORGANISATION/NAME"
        )
    if is_offline() or not hub_answers(hub_host()):
        raise ValueError(
            f"--push-to: {hub_host()} does not answer from here or HF_HUB_OFFLINE is set; leave out --push-to, and "
            f"push the folder later: hf upload {hub_id} FOLDER"
        )


def push_folder(folder: Path, hub_id: str, hub: HfApi | None = None) -> str:
    """Upload an exported folder to the hub, to a private model where there is none; returns its address.

    Raises
    ------
    ValueError
        If the hub refuses; the folder stays.
    """
    import httpx
    from huggingface_hub import HfApi

    hub = hub or HfApi()
    try:
        address = str(hub.create_repo(hub_id, private=True, exist_ok=True))
        hub.upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Export of a CollaPipe run")
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--push-to: {folder} is written, but {hub_id} did not take it: {reason}; log in (hf auth login) or "
            f"correct the id, then: hf upload {hub_id} {folder}"
        ) from error
    return address


def _first_base(config: RunConfig) -> str:
    """Return the base model of the first of the runs that this one goes on from; empty: there is none here."""
    earlier_runs: list[str] = []
    while (start := config.model.from_) and start not in earlier_runs:
        earlier_runs.append(start)
        try:
            config = read_run_config(Path(start))
        except (OSError, ValueError):
            return ""
    return config.model.pretrained


def _facts(name: str, run_dir: Path, stored: StoredModel, config: RunConfig, adapter: bool, base: str) -> CardFacts:
    """Gather what the card says; raises ``ValueError`` for adapters that cannot be written alone."""
    files: list[tuple[str, str]] = []
    if isinstance(stored.base, BaseWeights):
        base_model = stored.base.source
        files = [(file.name, file.sha256) for file in stored.base.files]
    else:
        base_model = base or _first_base(config)
    if adapter and stored.spec.lora is None:
        raise ValueError(f"--adapter: {run_dir}: all weights were trained, there are no adapters; leave it out")
    if adapter and (config.model.from_ or not base_model):
        start = f"the run {config.model.from_}" if config.model.from_ else "random weights"
        raise ValueError(
            f"--adapter: {run_dir}: the adapters are over {start}, and peft loads adapters over a model's folder; "
            "leave it out: the whole model is written"
        )
    return CardFacts(
        name=name,
        config=config,
        spec=stored.spec,
        base_model=base_model,
        base_files=files,
        rounding=_rounding(stored, base_model, adapter),
        summary=read_summary(run_dir) or {},
        is_adapter=adapter,
    )


def _rounding(stored: StoredModel, base_model: str, adapter: bool) -> str:
    dtype = stored.spec.base_dtype
    if not stored.spec.low_bits or not isinstance(stored.base, BaseWeights):
        return ""
    if dtype == "bfloat16" and all(stored.base.stored(name).dtype == torch.bfloat16 for name in stored.base):
        return ""
    if not adapter:
        return f"Its matrices are rounded to {dtype} here, as they were in the training."
    return (
        f"The adapters were trained over its matrices rounded to {dtype}. Over the matrices as the base model's files "
        "have them, as peft loads them, the logits differ from those of the run. An export without --adapter has the "
        "rounded matrices."
    )


def _configure(stored: StoredModel, tensors: LibraryTensors, tokenizer: TextTokenizer | None, folder: Path) -> Any:
    """Write the generation configuration; returns the model's own."""
    config, reference = library_config(tensors.reference), tensors.reference
    generation = copy.deepcopy(reference.generation_config) if reference.can_generate() else None
    if tokenizer is not None and generation is not None and stored.spec.head == CAUSAL_LM:
        # Let ``generate`` stop at the mark that the texts ended with: a pretrained model's own may be another.
        ends = _ends(tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_id, ends
        # The configuration's own padding says which row of the embedding is not trained: it stays.
        generation.update(bos_token_id=tokenizer.bos_id, eos_token_id=ends, pad_token_id=tokenizer.pad_id)
    if generation is not None:
        generation.save_pretrained(folder)
    return config


def _ends(tokenizer: TextTokenizer) -> int | list[int]:
    return list(tokenizer.end_ids) if len(tokenizer.end_ids) > 1 else tokenizer.eos_id


def _marks(stored: StoredModel, task_tokenizer: TextTokenizer, tokenizer: Any) -> Any:
    """Put the marks around a text that the tasks put there themselves.

    A causal model, which goes on, has the first alone; the two sides of a translation have the last. An encoder reads
    pairs, too, by BERT's rule.
    """
    from tokenizers.processors import TemplateProcessing

    begin, end = (tokenizer.id_to_token(i) for i in (task_tokenizer.bos_id, task_tokenizer.eos_id))
    if begin is None or end is None:
        return None
    first = "" if stored.spec.head == SEQ2SEQ else f"{begin}:0 "
    last = "" if stored.spec.head == CAUSAL_LM else f" {end}:0"
    single = f"{first}$A:0{last}"
    reads_pairs = stored.spec.head not in (CAUSAL_LM, SEQ2SEQ)
    special_tokens = [(begin, task_tokenizer.bos_id), (end, task_tokenizer.eos_id)]
    pair = {"pair": f"{single} $B:1 {end}:1"} if reads_pairs else {}
    return TemplateProcessing(single=single, **pair, special_tokens=special_tokens)


def _save_tokenizer(stored: StoredModel, tensors: LibraryTensors, task_tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the tokenizer, in the files that it came with; without such in some that say the same."""
    files = dict(task_tokenizer.settings.files)
    if GENERATION in files:
        # The base model may not know all marks at which the run's texts ended.
        generation = {**file_object(files, GENERATION), "eos_token_id": _ends(task_tokenizer)}
        files[GENERATION] = json.dumps(generation, indent=2)
    if "tokenizer_config.json" in files:
        (folder / "tokenizer.json").write_text(task_tokenizer.vocabulary_json(), encoding="utf-8")
        _copy_vocabulary(task_tokenizer, folder)
    else:
        _rebuild_tokenizer(stored, tensors, task_tokenizer, folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _copy_vocabulary(task_tokenizer: TextTokenizer, folder: Path) -> None:
    """Copy the vocabulary in the forms that other programs read, if its folder is still there and says the same."""
    source = task_tokenizer.settings.source
    files = [file for name in VOCABULARY_FILES if source and (file := model_file(source, name)) is not None]
    try:
        same = (
            bool(files) and load_tokenizer(source, complete=False).vocabulary_json() == task_tokenizer.vocabulary_json()
        )
    except ValueError:
        same = False
    for file in files if same else ():
        shutil.copyfile(file, folder / file.name)


def _rebuild_tokenizer(
    stored: StoredModel, tensors: LibraryTensors, task_tokenizer: TextTokenizer, folder: Path
) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(task_tokenizer.vocabulary_json())
    if tokenizer.post_processor is None:
        tokenizer.post_processor = _marks(stored, task_tokenizer, tokenizer)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = {use: name for use, names in _SPECIAL_TOKENS.items() for name in names if name in known}
    # Begin, end and padding are those that the model was trained with, whatever their names.
    used = {"bos_token": task_tokenizer.bos_id, "eos_token": task_tokenizer.eos_id, "pad_token": task_tokenizer.pad_id}
    if stored.spec.head in (*CLASSIFIERS, MASKED_LM):
        used |= {"cls_token": task_tokenizer.bos_id, "sep_token": task_tokenizer.eos_id}
    special |= {use: name for use, i in used.items() if (name := tokenizer.id_to_token(i)) is not None}
    if (mask := task_tokenizer.settings.mask) in known:
        special["mask_token"] = mask
    settings: dict[str, Any] = {} if (longest := max_length(stored.spec)) is None else {"model_max_length": longest}
    takes_types = "token_type_ids" in inspect.signature(type(tensors.reference).forward).parameters
    if takes_types and not is_decoder_only(stored.spec.family):
        # The second text of a pair is of type 1, as in the training.
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings, **special).save_pretrained(folder)
