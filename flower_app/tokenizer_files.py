"""Files beside a tokenizer's vocabulary, and the marks of beginning, end and padding that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from client_pipeline.documents import json_value
from client_pipeline.weights.weight_files import model_file

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"
KEPT_FILES = (*TOKENIZER_FILES, GENERATION)
"""Those that an exported model has as the folder had them that it was made from."""
_SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model")
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "merges.txt", *_SENTENCEPIECE)
"""Vocabularies as other programs read them; ``tokenizer.json`` says the same."""
SETTINGS_FILE = "tokenizer_settings.json"
"""Settings of a run's tokenizer that its other files lack."""
_KEY = '{"collapipe": '
_NO_ID = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A tokenizer's use beyond what its vocabulary says; it travels in front of the JSON form of ``tokenizers``."""

    begin: int | None = None
    """Mark before a text; None: found by its usual names."""
    ends: tuple[int, ...] = ()
    """Mark after a text, and others at which a model stops to write; empty: found by its usual names."""
    pad: int | None = None
    mask: str = ""
    reads_special: bool = False
    """Special tokens that a text spells out are tokens, and not text."""
    by_rule: bool = False
    """A text that is classified stands within the marks of the tokenizer's own rule alone, as in the exported model."""
    classes: tuple[str, ...] = ()
    """Names of a trained head's classes, in their order; empty: the order that the data gives."""
    date: str = ""
    """Date that a chat template writes, such as 2026-01-31."""
    turn_end: str | None = None
    """Text that a chat template writes behind an answer where none of ``ends`` stands there; None: one does."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of :data:`KEPT_FILES`."""
    source: str = ""
    """Folder or hub id that the tokenizer was read from."""

    def to_json(self, with_files: bool = True) -> str:
        """Write what is not the default; empty where all is."""
        default = TokenizerSettings()
        values = {k: v for k, v in asdict(self).items() if v != getattr(default, k) and (with_files or k != "files")}
        return json.dumps(values, ensure_ascii=False) if values else ""

    @classmethod
    def from_json(cls, text: str, files: Mapping[str, str] | None = None) -> TokenizerSettings:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If it is none.
        """
        try:
            values: dict[str, Any] = json_value(text) if text else {}
            known = {f.name for f in fields(cls)}
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
            settings = cls(**(values if files is None else {**values, "files": files}))
            ids = [i for i in (settings.begin, settings.pad, *settings.ends) if i is not None]
            names = (
                settings.mask,
                settings.source,
                settings.date,
                settings.turn_end or "",
                *settings.classes,
                *settings.files.values(),
            )
            if not (all(type(i) is int for i in ids) and all(isinstance(name, str) for name in names)):
                raise ValueError("a value of another kind")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"settings of the tokenizer: expected a JSON object, {error}, in {text[:60]!r}") from error
        return settings


def joined(settings: TokenizerSettings, vocabulary_json: str) -> str:
    """Write settings in front of the JSON form of ``tokenizers``."""
    text = settings.to_json()
    return f"{_KEY}{text}, {vocabulary_json.lstrip()[1:]}" if text else vocabulary_json


def parted(text: str) -> tuple[TokenizerSettings, str]:
    """Read what :func:`joined` wrote: the settings, and the JSON form of ``tokenizers``."""
    if not text.startswith(_KEY):
        return TokenizerSettings(), text
    values, end = json.JSONDecoder().raw_decode(text, len(_KEY))
    return TokenizerSettings.from_json(json.dumps(values)), "{" + text[end:].lstrip(", ")


def read_files(source: str, names: Sequence[str]) -> dict[str, str]:
    """Return the texts of those files that a folder or hub id has.

    Raises
    ------
    ValueError
        If one cannot be read as text.
    """
    texts = {}
    for name in names:
        if (file := model_file(source, name)) is not None:
            try:
                texts[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ValueError(f"{file}: expected a text in UTF-8, {error}; fetch it again") from error
    return texts


def sentencepiece_alone(source: str) -> str:
    """Return what helps where a folder or hub id has its vocabulary as a SentencePiece model alone; else nothing."""
    file = next((name for name in _SENTENCEPIECE if model_file(source, name)), "")
    if not file or any(model_file(source, name) for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        return ""
    return (
        f"its vocabulary is {file} alone, a SentencePiece model, which the transformers library converts with the "
        "package sentencepiece: pip install 'collapipe[sentencepiece]'; or save the tokenizer where that is installed, "
        "which writes tokenizer.json"
    )


def named_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """Return the tokens that a tokenizer's own files name, such as ``eos_token``, as the transformers library does."""
    tokens = file_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in tokens:
        # Files of the library's earlier versions.
        tokens = {**tokens, **file_object(files, "special_tokens_map.json")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in texts.items() if key.endswith("_token") and isinstance(value, str)}


def add_declared(backend: Any, files: Mapping[str, str]) -> None:
    """Add the tokens that a tokenizer's own files name and ``tokenizer.json`` lacks, as the transformers library does.

    Parameters
    ----------
    backend : the ``tokenizers`` tokenizer
    files : :data:`TOKENIZER_FILES` of its folder

    Raises
    ------
    ValueError
        If they are no tokens by their numbers.
    """
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = file_object(files, "tokenizer_config.json").get("added_tokens_decoder") or {}
    try:
        values = [values for _, values in sorted(tokens.items(), key=lambda token: int(token[0]))]
        backend.add_tokens([AddedToken(**token) for token in values if token["content"] not in known])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"tokenizer_config.json: added_tokens_decoder: expected tokens by their numbers, {error!r}; fetch it again"
        ) from error


def declared_marks(backend: Any, tokens: Mapping[str, str], model_files: Mapping[str, str]) -> TokenizerSettings:
    """Return the marks that a tokenizer's files and its model's declare.

    Parameters
    ----------
    backend : the ``tokenizers`` tokenizer
    tokens : what :func:`named_tokens` gave
    model_files : ``config.json`` and ``generation_config.json`` of the model, where there are such

    Returns
    -------
    Marks alone. What the tokenizer's files name wins, then what its own rule puts around a text, then the model's
    files. A causal model's text ends with the tokenizer's end; its writing stops at those of the model's files, too.
    """

    def ids_of(*names: str) -> list[int]:
        found = (backend.token_to_id(tokens[name]) for name in names if name in tokens)
        return [int(i) for i in found if i is not None]

    def model_ids(key: str) -> list[int]:
        # Where a model has both files, the library generates by the second.
        generation, config = (file_object(model_files, name) for name in (GENERATION, "config.json"))
        # A multi-modal model may have its text model's marks there alone.
        text_config = config.get("text_config")
        for values in (generation, config, text_config if isinstance(text_config, dict) else {}):
            value = values.get(key)
            numbers = value if isinstance(value, list) else [value]
            size = backend.get_vocab_size(with_added_tokens=True)
            valid = [i for i in numbers if type(i) is int and 0 <= i < size]
            if valid:
                return valid
        return []

    tokens = {**({"pad_token": backend.padding["pad_token"]} if backend.padding else {}), **tokens}
    before, after = marks_by_rule(backend)
    begin = _first(ids_of("bos_token", "cls_token"), before[-1:], model_ids("bos_token_id"))
    end = _first(ids_of("eos_token", "sep_token"), after[:1], model_ids("eos_token_id"))
    ends = [] if end is None else list(dict.fromkeys([end, *model_ids("eos_token_id")]))
    pad = _first(ids_of("pad_token"), [], model_ids("pad_token_id"))
    return TokenizerSettings(begin=begin, ends=tuple(ends), pad=pad, mask=tokens.get("mask_token", ""))


def marks_by_rule(backend: Any) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer puts before and after a text by itself."""
    if backend.post_processor is None:
        return [], []
    from tokenizers import Tokenizer, models

    # A vocabulary of one token, which no other one has: a tokenizer may know no letter.
    probe = Tokenizer(models.WordLevel({"a": _NO_ID}, unk_token="a"))
    probe.post_processor = backend.post_processor
    marked = probe.encode("a").ids
    at = marked.index(_NO_ID)
    return marked[:at], marked[at + 1 :]


def _first(named: list[int], by_rule: list[int], by_model: list[int]) -> int | None:
    """Return the named token that the tokenizer's own rule uses, else the first that anything gives."""
    return next((i for i in [*(i for i in named if i in by_rule), *named, *by_rule, *by_model]), None)


def file_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object of a file; empty where there is none.

    Raises
    ------
    ValueError
        If it is no object.
    """
    try:
        value = json_value(files.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"{name}: expected a JSON object, {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a JSON object, found {files[name][:60]!r}; fetch it again")
    return value
