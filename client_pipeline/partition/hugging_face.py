"""Configurations of Hugging Face transformers in a model's specification, and back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from client_pipeline.partition.spec import ModelSpec

_NOT_KEPT = ("id2label", "label2id", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype")


def read_config(kind: type, spec: ModelSpec, own: Collection[str] = ()) -> Any:
    """Build the library's configuration of a specification.

    Parameters
    ----------
    kind : the library's class of it
    spec : the model
    own : keys of the specification that are not the library's
    """
    config = kind(**{key: value for key, value in spec.config.items() if key not in own})
    # Blocks are also built alone, without the model class that would choose the attention.
    config._attn_implementation = "sdpa"
    return config


def config_values(config: Any) -> dict[str, Any]:
    """What a specification keeps of a library's configuration."""
    values = {key: value for key, value in config.to_diff_dict().items() if key not in _NOT_KEPT}
    return {**values, "vocab_size": config.vocab_size}


def check_head(spec: ModelSpec, *heads: str) -> None:
    """Refuse a head that a family does not have."""
    if spec.head not in heads:
        raise ValueError(f"model.family {spec.family} has the heads {', '.join(heads)}, found {spec.head!r}")
