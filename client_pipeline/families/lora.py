"""Low-rank adapters in the TEBs, by the peft library: what is trained and sent when everything else is frozen.

In a model with adapters

* the **embedding** and the TEBs' own weights are frozen: they are the base, sent to each control unit once a run;
* the **adapters** in the TEBs are trained on the devices, and averaged factor by factor: FedAvg of A and of B. The
  product of the averages is not the average of the products; they are close as long as the clusters' factors have not
  drifted apart, and one local step of SGD equals the central one. ``lora.average = "products"`` averages the products
  (:mod:`strategies.aggregation.adapter_products`);
* the **head** is trained whole, on the server, where it costs no upload; or, with ``lora.head = "adapters"``, has
  adapters in its blocks and is frozen beside them. A matrix that it would share with the embedding is frozen with the
  embedding.

peft keeps the frozen matrix of a layer ``query`` as ``query.base_layer.weight`` and the factors as
``query.lora_A.default.weight`` and ``query.lora_B.default.weight``. B begins as zeros: the model begins as its base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from client_pipeline.families.causal import CausalClassifier, CausalHead
from client_pipeline.families.encoder import ClassifierHead
from client_pipeline.partition.dropout_seed import drawn_aside
from client_pipeline.partition.parts import ModelParts, tied_names
from client_pipeline.partition.spec import ALL_LINEAR, LoraConfig

_QUERY_AND_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("query_proj", "value_proj"),
    ("q_lin", "v_lin"),
    ("q", "v"),
    ("query", "key_value"),
    ("Wqkv",),
    ("c_attn",),
    ("qkv_proj",),
    ("query_key_value",),
)
"""Names of these projections in the families; the last five are fused with those of the keys."""


def adapt(parts: ModelParts, config: LoraConfig, seed: int) -> ModelParts:
    """Freeze a model but its head, and put fresh adapters into its TEBs, in place; ``seed`` draws the factors A.

    Raises
    ------
    ValueError
        If a TEB has no layer of a name in ``lora.targets``, or the head no blocks for adapters.
    """
    parts.embedding.requires_grad_(False)
    with drawn_aside(seed):
        for index, block in enumerate(parts.blocks):
            adapt_block(block, config, index)
        adapt_head(parts.head, config, len(parts.blocks))
    return replace(parts, spec=replace(parts.spec, lora=config))


def adapt_block(block: nn.Module, config: LoraConfig, index: int) -> nn.Module:
    """Freeze a block and put fresh adapters into it, in place; ``index`` counts TEBs and then the server's blocks.

    Raises
    ------
    ValueError
        If it has no layer of a name in ``lora.targets``; the message lists those that it has.
    """
    if index < config.first_block:
        return block.requires_grad_(False)
    from peft import LoraConfig as PeftConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    targets = _targets(config, linear)
    adapters = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        # GPT-2's layers have their matrices the other way round.
        fan_in_fan_out=isinstance(block.get_submodule(targets[0]), Conv1D),
    )
    return inject_adapter_in_model(adapters, block)


def _targets(config: LoraConfig, linear: Sequence[str]) -> list[str]:
    """Full names of the layers, of those in a TEB, that get adapters."""
    if config.targets == ALL_LINEAR:
        return list(linear)

    def layers_of(name: str) -> list[str]:
        return [path for path in linear if path == name or path.endswith(f".{name}")]

    names: Sequence[str] = config.target_names
    if not names:
        names = next((pair for pair in _QUERY_AND_VALUE if all(map(layers_of, pair))), ())
    missing = [name for name in names if not layers_of(name)]
    if missing or not names:
        what = f"no layer {missing[0]!r}" if missing else "no query and value projections by a known name"
        raise ValueError(
            f"lora.targets: {what} in a TEB; expected {ALL_LINEAR} or some of {', '.join(linear)} (the last part of a "
            "name is enough)"
        )
    return [path for name in names for path in layers_of(name)]


def adapt_head(head: nn.Module, config: LoraConfig, num_blocks: int) -> nn.Module:
    """Freeze what a head reads from a frozen embedding; put fresh adapters into its blocks, if it is to have some.

    Raises
    ------
    ValueError
        If it has no blocks or is a classifier, or no block has adapters and nothing of the head is trained.
    """
    of_head = head_blocks(head) if config.freezes_head else []
    if config.first_block > (most := num_blocks + max(len(of_head) - 1, 0)):
        raise ValueError(
            f"lora.first-block: expected at most {most}, of {num_blocks} TEBs"
            + (f" and {len(of_head)} blocks with adapters on the server" if of_head else "")
            + f", found {config.first_block}"
        )
    if config.freezes_head:
        if isinstance(head, ClassifierHead):
            raise ValueError('lora.head: "adapters" would freeze the classifier, which is new; set lora.head = "whole"')
        if not of_head:
            raise ValueError(
                'lora.head: "adapters" go into the blocks that the server keeps of a decoder-only model, found none; '
                'set model.decoder-layers to 1 or more, or lora.head = "whole"'
            )
        head.requires_grad_(False)
        for index, block in enumerate(of_head, num_blocks):
            adapt_block(block, config, index)
    return untie(head)


def head_blocks(head: nn.Module) -> list[nn.Module]:
    """Return the blocks that the server keeps of a decoder-only model; none of others."""
    return list(head.blocks) if isinstance(head, CausalHead | CausalClassifier) else []


def untie(head: nn.Module) -> nn.Module:
    """Freeze what a head reads from a frozen embedding: nobody has to send it, or its gradient, any more."""
    names = tied_names(head)
    for name in names:
        head.get_parameter(name).requires_grad_(False)
    if names:
        setattr(head, "tied", {})  # noqa: B010 (a plain attribute, which torch's typing does not know)
    return head
