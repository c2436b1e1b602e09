"""``collapipe export``: the model of a run as a folder that the transformers library loads."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.partition.families import library_families, max_length, merged
from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from flower_app.saved_model import MODEL_FOLDER, SavedModel, load_model
from flower_app.tasks.tokenizer import TextTokenizer

_SPECIAL_TOKENS = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""What the library wants to know of a tokenizer beside begin, end and padding, and the names that such tokens go by."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    model_class: str
    """Of the transformers library, such as ``BertForTokenClassification``."""
    files: list[str]


def export_run(run_dir: Path, folder: Path) -> Exported:
    """Write the model of a run, adapters merged, so that ``AutoModelFor...`` and ``AutoTokenizer`` load it.

    Parameters
    ----------
    run_dir : the run
    folder : where to; it must not exist, or be empty

    Raises
    ------
    FileNotFoundError
        If the run has no model.
    ValueError
        If the library does not know its architecture, or the folder is in use.
    """
    durable.check_new_folder(folder)
    saved_model = load_model(run_dir)
    model: Any = merged(saved_model.parts).reference
    if model is None:
        raise ValueError(
            f"{run_dir}: the model is of family {saved_model.spec.family}, an architecture that the transformers "
            "library does not know, so it cannot be exported. Use it with collapipe predict and collapipe evaluate, or "
            f"in Python with flower_app.saved_model.load_model; its weights are plain safetensors in "
            f"{run_dir / MODEL_FOLDER}. Models of the families {', '.join(library_families())} can be exported"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    if saved_model.spec.head in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        # The library makes the way back from labels to ids only for the names that it gives itself.
        model.config.label2id = {label: index for index, label in model.config.id2label.items()}
    try:
        if saved_model.tokenizer_json and saved_model.spec.head == CAUSAL_LM:
            _end_where_trained(model, TextTokenizer.from_json(saved_model.tokenizer_json))
        model.save_pretrained(temporary_folder)
        if saved_model.tokenizer_json:
            _save_tokenizer(saved_model, temporary_folder)
        temporary_folder.chmod(0o755)
        durable.adopt_folder(temporary_folder, folder)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return Exported(
        folder=folder, model_class=type(model).__name__, files=sorted(file.name for file in folder.iterdir())
    )


def _end_where_trained(model: Any, tokenizer: TextTokenizer) -> None:
    """Have ``generate`` stop at the mark that the texts ended with: a pretrained model's own may be another."""
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_id, tokenizer.eos_id
    # The configuration's own padding says which row of the embedding is not trained: it stays.
    model.generation_config.update(
        bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id
    )


def _marks(saved_model: SavedModel, task_tokenizer: TextTokenizer, tokenizer: Any) -> Any:
    """Put the marks around a text that the tasks put there themselves.

    A causal model, which goes on, has the first alone; the two sides of a translation have the last.
    """
    from tokenizers.processors import TemplateProcessing

    begin, end = (tokenizer.id_to_token(i) for i in (task_tokenizer.bos_id, task_tokenizer.eos_id))
    if begin is None or end is None:
        return None
    first = "" if saved_model.spec.head == SEQ2SEQ else f"{begin}:0 "
    last = "" if saved_model.spec.head == CAUSAL_LM else f" {end}:0"
    return TemplateProcessing(
        single=f"{first}$A:0{last}", special_tokens=[(begin, task_tokenizer.bos_id), (end, task_tokenizer.eos_id)]
    )


def _save_tokenizer(saved_model: SavedModel, folder: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer, task_tokenizer = (
        Tokenizer.from_str(saved_model.tokenizer_json),
        TextTokenizer.from_json(saved_model.tokenizer_json),
    )
    if tokenizer.post_processor is None:
        tokenizer.post_processor = _marks(saved_model, task_tokenizer, tokenizer)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = {use: name for use, names in _SPECIAL_TOKENS.items() for name in names if name in known}
    # Begin, end and padding are those that the model was trained with, whatever their names.
    used = {"bos_token": task_tokenizer.bos_id, "eos_token": task_tokenizer.eos_id, "pad_token": task_tokenizer.pad_id}
    special |= {use: name for use, i in used.items() if (name := tokenizer.id_to_token(i)) is not None}
    longest = max_length(saved_model.spec)
    limit = {} if longest is None else {"model_max_length": longest}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **limit, **special).save_pretrained(folder)
