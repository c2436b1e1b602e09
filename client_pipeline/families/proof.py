"""Proof that the general cut of a decoder-only model computes what the library's whole model computes.

Before a run a small copy of the model's own configuration is built whole and cut: every kind of layer on both sides of
a cut, windows shorter than the sequence, every factor as the model has it. Outputs and gradients are compared, with
padding on either side, without and with the model's adapters and few bits. A model that does not agree is refused by
name, with what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_pipeline.families.causal import CarriedValue
from client_pipeline.families.families import build_block, build_embedding, build_head, build_over, build_parts
from client_pipeline.families.fresh_base import FreshBase
from client_pipeline.families.registry import is_decoder_only, library_family
from client_pipeline.families.small_copies import PADDING, VOCABULARY, first_line, smallest_that_runs
from client_pipeline.partition.dropout_seed import undisturbed
from client_pipeline.partition.packed_mask import PACKED
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, SEQUENCE_CLASSIFICATION, ModelSpec
from client_pipeline.partition.token_slices import token_slices
from client_pipeline.weights.unfilled import adopt

RELATIVE = 1e-4
"""Largest difference of a tensor's elements in its largest one: float32, summed in another order."""
_LENGTH, _BATCH = 9, 3


def check_cut(spec: ModelSpec) -> None:
    """Refuse a decoder-only model whose cut is not the whole.

    Parameters
    ----------
    spec : of any model; others than the library's decoder-only ones pass

    Raises
    ------
    ValueError
        With what differs, or why it cannot be tried.
    """
    if not is_decoder_only(spec.family):
        return
    if reason := cut_reason(spec):
        raise ValueError(f"model type {spec.family!r} cannot be split: {reason}")
    if spec.lora is None:
        return
    # A small copy has fewer blocks; that some of them have no adapters needs no proof.
    spec = replace(spec, lora=replace(spec.lora, first_block=0))
    if reason := _difference(replace(spec, base_dtype="float32").to_json()):
        raise ValueError(reason if reason.startswith("lora.") else f"model type {spec.family!r}, adapters: {reason}")
    if spec.low_bits and (reason := _low_bits_failure(spec.to_json())):
        raise ValueError(
            f"model.base-dtype: {spec.base_dtype}: model type {spec.family!r} does not train with it: {reason}; set "
            "float32 or bfloat16"
        )


def cut_reason(spec: ModelSpec) -> str:
    """Return why a decoder-only model without adapters cannot be cut; empty: it can."""
    return _difference(replace(spec, lora=None, base_dtype="float32").to_json())


def slices_difference(spec: ModelSpec) -> str:
    """Return why a decoder-only model cannot be cut into token slices; empty: it can."""
    return _slices_difference(replace(spec, lora=None, base_dtype="float32").to_json())


def check_packing(spec: ModelSpec) -> None:
    """Refuse packed sequences (``data.packing``) for a model that would mix their examples.

    Raises
    ------
    ValueError
        With what differs, or why it cannot be tried.
    """
    reason = "it is no decoder-only model of the transformers library"
    if is_decoder_only(spec.family):
        reason = _packing_difference(replace(spec, lora=None, base_dtype="float32").to_json())
    if reason:
        raise ValueError(
            f"data.packing: model type {spec.family!r} does not keep the examples of a sequence apart: {reason}; set "
            "data.packing = false"
        )


@lru_cache(maxsize=16)
def _difference(spec_json: str) -> str:
    return _compared(spec_json, lambda small: cut_difference(build_parts(small, seed=0)))


@lru_cache(maxsize=16)
def _slices_difference(spec_json: str) -> str:
    return _compared(spec_json, _sliced_blocks_difference)


@lru_cache(maxsize=16)
def _packing_difference(spec_json: str) -> str:
    return _compared(spec_json, lambda small: packing_difference(build_parts(small, seed=0)))


@lru_cache(maxsize=16)
def _low_bits_failure(spec_json: str) -> str:
    return _compared(spec_json, _training_failure)


def _compared(spec_json: str, difference: Callable[[ModelSpec], str]) -> str:
    """Return what differs in a small copy of a model, or why there is none; empty: nothing differs."""
    with undisturbed():
        try:
            small, reason = small_copy(ModelSpec.from_json(spec_json))
            return reason if small is None else difference(small)
        except Exception as error:  # noqa: BLE001 (whatever a model says of a cut that it does not take)
            return first_line(error)


def small_copy(spec: ModelSpec) -> tuple[ModelSpec | None, str]:
    """Return a small model of the same configuration, or none and why."""
    return smallest_that_runs(spec, _run)


def _run(small: ModelSpec) -> None:
    """Compute a small model once."""
    parts = build_parts(small, seed=0)
    with torch.no_grad():
        _whole(parts, _batch(parts, _rows_full()))


def _rows_full() -> Tensor:
    return torch.ones(_BATCH, _LENGTH, dtype=torch.bool)


def _packed_rows() -> Tensor:
    """Return rows of one, two and three examples, with padding."""
    numbers_BT = torch.ones(_BATCH, _LENGTH, dtype=PACKED)
    numbers_BT[1, 4:] = numbers_BT[2, 1:] = 2
    numbers_BT[2, 5:], numbers_BT[2, -2:] = 3, 0
    return numbers_BT


def _batch(parts: ModelParts, mask_BT: Tensor) -> Batch:
    spec, generator = parts.spec, torch.Generator().manual_seed(1)
    family = library_family(spec.family)
    vocabulary = min(VOCABULARY, int(family.library_config(spec).vocab_size))
    ids = torch.randint(3, vocabulary, mask_BT.shape, generator=generator)
    labels = ids.masked_fill(~mask_BT, IGNORED_LABEL)
    labels[:, 0] = IGNORED_LABEL
    if spec.head != CAUSAL_LM:
        ids = ids.masked_fill(~mask_BT, PADDING)
        classes = torch.randint(family.num_classes(spec), mask_BT.shape, generator=generator)
        labels = classes[:, 0] if spec.head == SEQUENCE_CLASSIFICATION else classes.masked_fill(~mask_BT, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": mask_BT, "labels": labels}


def _whole(parts: ModelParts, batch: Batch) -> Tensor:
    model: Any = parts.reference
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), use_cache=False).logits


def cut_difference(parts: ModelParts) -> str:
    """Compare a small model with its parts, each built alone, without padding and with it on either side.

    Parameters
    ----------
    parts : their weights are changed: fresh norms are all ones and biases zeros, so that one left out would not show

    Returns
    -------
    What differs; empty: nothing.
    """
    in_parts = dict(parts.all_parameters())
    in_files = cast(nn.Module, parts.reference).state_dict(keep_vars=True)
    ids = {id(parameter) for parameter in in_parts.values()}
    if lost := [name for name, value in in_files.items() if value.is_floating_point() and id(value) not in ids]:
        return f"it has weights beside embedding, layers, closing norm and output layer ({lost[0]})"
    _move_weights(parts)
    built_alone = _built_alone(parts)
    if shared := sorted(dict(built_alone.all_parameters()).keys() - in_parts.keys()):
        return f"its layers share weights ({shared[0]})"
    built_alone.load(parts.weights())
    built_alone.load_frozen(parts.frozen_weights())
    for padding in ("none", "right and left"):
        mask_BT = _rows_full()
        if padding != "none":
            mask_BT[1, -3:] = mask_BT[2, :2] = False
        batch = _batch(parts, mask_BT)
        if difference := parts_difference(parts, batch, built_alone):
            with torch.no_grad():
                is_random = not torch.equal(_whole(parts, batch), _whole(parts, batch))
            return "it draws random numbers while it trains" if is_random else f"with padding {padding}: {difference}"
    return _wrong_training(parts)


def _move_weights(parts: ModelParts) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in parts.all_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def _built_alone(parts: ModelParts) -> ModelParts:
    """Build each part as the machine that runs it does, and tie the output layer; weights are loaded later."""
    spec = parts.spec
    embedding, head = build_embedding(spec), build_head(spec)
    # Beside adapters the head has a frozen matrix of its own: the embedding's, which the control unit sends.
    tied = library_family(spec.family).tied(replace(spec, lora=None))
    shared = {name: embedding.get_parameter(of) for name, of in tied.items()}
    adopt(head, {**dict(head.named_parameters()), **shared}, "head")
    blocks = nn.ModuleList(build_block(spec, index) for index in range(len(parts.blocks)))
    return ModelParts(spec, embedding, blocks, head, parts.mask_form)


def _wrong_training(parts: ModelParts) -> str:
    """Return which TEB's weights have no gradient, so that nothing was proved, or which value has one; empty: none."""
    batch = _batch(parts, _rows_full())
    _, gradients = _scores_and_gradients(parts, batch, parts.logits(batch))
    if parts.spec.lora is not None:
        return _idle_adapters(gradients)
    for name, parameter in parts.named_parameters():
        if type(parameter) is CarriedValue and gradients[name].any():
            return f"{name} would be trained, which the library leaves as it is"
    for index in range(len(parts.blocks)):
        of_block = [gradient for name, gradient in gradients.items() if name.startswith(f"blocks.{index}.")]
        if 2 * sum(bool(gradient.any()) for gradient in of_block) < len(of_block):
            return f"no gradient reaches most weights of TEB {index}"
    return ""


def _idle_adapters(gradients: Mapping[str, Tensor]) -> str:
    """Return which matrices have adapters without gradients in all TEBs, so that they would be sent and not trained."""
    moved: dict[str, bool] = {}
    for name, gradient in gradients.items():
        matrix, found, _ = name.partition(".lora_")
        # Of an expert that no token of a small batch visits another one's counts.
        kind = ".".join(part for part in matrix.split(".") if not part.isdecimal())
        if found:
            moved[kind] = moved.get(kind, False) or bool(gradient.any())
    idle = sorted(kind.rpartition(".")[2] for kind, has_gradient in moved.items() if not has_gradient)
    if not idle:
        return ""
    return (
        f"lora.targets: no gradient reaches adapters of {', '.join(idle)}: the library does not call that layer; name "
        "other layers"
    )


def _training_failure(small: ModelSpec) -> str:
    """Have a small model with adapters over a rounded base compute once, both ways; what fails is raised."""
    base = FreshBase(small, seed=0)
    parts = build_over(small, base, base.part("head."), seed=0)
    parts.loss_sum(_batch(parts, _rows_full())).backward()
    return ""


def parts_difference(parts: ModelParts, batch: Batch, cut: ModelParts | None = None) -> str:
    """Compare the library's own model with its parts on a batch: scores, loss and gradients.

    Parameters
    ----------
    parts : the whole model
    batch : its labels stand where their tokens do
    cut : parts of the same weights; None: ``parts``

    Returns
    -------
    What differs; empty: nothing.
    """
    cut = cut or parts
    expected, of_whole = _scores_and_gradients(parts, batch, _whole(parts, batch))
    scores, of_cut = _scores_and_gradients(cut, batch, cut.logits(batch))
    real = _real(batch, scores)
    if (share := _share(scores * real, expected * real)) > RELATIVE:
        return f"scores differ by {share:.1e} of the largest"
    for name, gradient in of_whole.items():
        if (share := _share(of_cut[name], gradient)) > 10 * RELATIVE:
            return f"the gradient of {name} differs by {share:.1e} of its largest"
    labels = batch["labels"]
    if parts.spec.head == CAUSAL_LM:
        expected, labels = expected[:, :-1], labels[:, 1:]
    counted = labels != IGNORED_LABEL
    with torch.no_grad():
        whole_loss = float(F.cross_entropy(expected[counted].float(), labels[counted], reduction="sum"))
        loss = float(cut.loss_sum(batch))
    if abs(loss - whole_loss) > RELATIVE * abs(whole_loss):
        return f"the loss is {loss:.6g}, of the whole model {whole_loss:.6g}"
    return ""


def _sliced_blocks_difference(spec: ModelSpec) -> str:
    """Compare each TEB on a sequence with the same on three slices of it, outputs and gradients."""
    parts = build_parts(spec, seed=0)
    generator = torch.Generator().manual_seed(3)
    width = library_family(spec.family).width(spec)
    x_BTD, gradient_BTD = (torch.randn(_BATCH, _LENGTH, width, generator=generator) for _ in range(2))
    padded_BT = _rows_full()
    padded_BT[1, -3:] = padded_BT[2, :2] = False
    masks = [_rows_full(), padded_BT]
    if not _packing_difference(spec.to_json()):
        masks.append(_packed_rows())
    for (index, block), mask_BT in product(enumerate(parts.blocks), masks):
        weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
        block.zero_grad()
        whole_BTD = block(x_BTD.requires_grad_(), parts.mask_form(mask_BT, x_BTD.dtype))
        # Nobody reads what becomes of padding.
        real_BT1 = mask_BT[..., None] != 0
        expected = torch.autograd.grad(whole_BTD, [x_BTD, *weights], gradient_BTD * real_BT1, allow_unused=True)
        slices = token_slices(mask_BT, 3)
        inputs = [x_BTD.detach()[:, part.first : part.end].requires_grad_() for part in slices]
        outputs = [block(piece, part) for piece, part in zip(inputs, slices, strict=True)]
        if (share := _share(torch.cat(outputs, 1).detach() * real_BT1, whole_BTD.detach() * real_BT1)) > RELATIVE:
            return f"the output of TEB {index} differs by {share:.1e} of its largest"
        for part, output in reversed(list(zip(slices, outputs, strict=True))):
            output.backward((gradient_BTD * real_BT1)[:, part.first : part.end])
            part.forget()
        found = [torch.cat([cast(Tensor, piece.grad) for piece in inputs], 1), *(weight.grad for weight in weights)]
        for gradient, one in zip(found, expected, strict=True):
            if gradient is None or one is None:
                is_same = gradient is None and one is None
            else:
                is_same = _share(gradient, one) <= 10 * RELATIVE
            if not is_same:
                return f"a gradient of TEB {index} differs"
    return ""


def packing_difference(parts: ModelParts) -> str:
    """Compare packed sequences of a small model with the same examples one by one: scores and gradients.

    Parameters
    ----------
    parts : their weights are changed: little would show of what fresh ones attend to

    Returns
    -------
    What differs; empty: nothing.
    """
    _move_weights(parts)
    numbers_BT = _packed_rows()
    batch = _batch(parts, numbers_BT != 0) | {"attention_mask": numbers_BT}
    packed_BTV, ids_BT = parts.logits(batch), batch["input_ids"]
    of_packed, of_each = list[Tensor](), list[Tensor]()
    for row, number in product(range(_BATCH), range(1, 4)):
        places = (numbers_BT[row] == number).nonzero()[:, 0]
        if len(places):
            ids_1T = ids_BT[row : row + 1, places]
            of_packed.append(packed_BTV[row, places])
            alone = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T, dtype=torch.bool)}
            of_each.append(parts.logits(alone)[0])
    whole = {"attention_mask": torch.ones(1, sum(map(len, of_each)), dtype=torch.bool)}
    scores, gradients = _scores_and_gradients(parts, whole, torch.cat(of_packed)[None])
    expected, expected_gradients = _scores_and_gradients(parts, whole, torch.cat(of_each)[None])
    if (share := _share(scores, expected)) > RELATIVE:
        return f"scores differ by {share:.1e} of the largest"
    for name, gradient in expected_gradients.items():
        if (share := _share(gradients[name], gradient)) > 10 * RELATIVE:
            return f"the gradient of {name} differs by {share:.1e} of its largest"
    return ""


def _scores_and_gradients(parts: ModelParts, batch: Batch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)) * _real(batch, scores)
    named = dict(parts.named_parameters())
    gradients = torch.autograd.grad((scores * weights).sum(), list(named.values()), allow_unused=True)
    return scores.detach(), {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
    }


def _real(batch: Batch, scores: Tensor) -> Tensor:
    """Return which scores count, to multiply them by: all of sequences, and of positions those with a token."""
    return batch["attention_mask"][..., None] if scores.dim() == 3 else torch.ones(())


def _share(tensor: Tensor, expected: Tensor) -> float:
    """Largest difference in the largest element; not a number counts as all of it."""
    difference = float((tensor - expected).abs().max())
    return difference / max(float(expected.abs().max()), 1e-6) if difference == difference else 1.0
