"""Arguments that a library model gives each of its layers: masks, rotary tables, positions.

The library's own loop makes them. It runs once a stage and micro-batch over recorders in the places of the layers, and
whatever has weights is a stand-in. So no rule of a model is written again here, and a layer needs no other one.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.packed_mask import is_plain, library_mask
from client_pipeline.partition.parts import MaskForm
from client_pipeline.partition.token_slices import TokenSlice

_OF_QUERIES = {"position_ids": 1, "cache_position": 0, "position_embeddings": 1}
"""Arguments with a row for each token of the sequence, and the dimension of the tokens."""
_CACHES = ("past_key_values", "cache", "layer_past", "past_key_value")
"""Names under which layers take the keys of earlier tokens."""
_ON_HOST = (torch.device("cpu"), False)
_KEPT = 4
"""Micro-batches whose arguments a process keeps: its stages take turns."""


@dataclass(frozen=True)
class BodyNames:
    """Names of a library model's children by their place."""

    layers: str
    norm: str
    """Closing norm; empty: the model has none."""
    before: tuple[str, ...]
    """Children with weights, or dropout, before the first layer."""


def body_names(body: nn.Module, num_layers: int) -> BodyNames:
    """Return which child of a base model is where: by the library's own plan, or by the order of the children.

    Raises
    ------
    ValueError
        If the model is not an embedding, one list of layers and a closing norm.
    """
    children = dict(body.named_children())
    if "encoder" in children and "decoder" not in children:
        raise ValueError("it is an encoder, whose tokens see later ones")
    lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(lists) != 1:
        raise ValueError(f"its layers are not one list of {num_layers}: it has {', '.join(children)}")
    layers = lists[0]
    place = list(children).index(layers)
    others = [name for name in children if name != layers]
    plan = getattr(body.config, "base_model_pp_plan", None) or {}
    planned = [name for name in plan if name in children]
    after = planned[planned.index(layers) + 1 :] if layers in planned else []
    if not after:
        after = [name for name in list(children)[place + 1 :] if next(children[name].parameters(), None) is not None]
        # Some closing norms have no weights, and some are made before the layers.
        after = after or [name for name in list(children)[place + 1 :] if "norm" in name.lower()]
        after = after or [name for name in others if name.startswith("final") and "norm" in name]
    if len(after) > 1:
        raise ValueError(f"it has more than a closing norm behind its layers: {', '.join(after)}")
    before = tuple(
        name
        for name in others
        if name not in after
        and (next(children[name].parameters(), None) is not None or isinstance(children[name], nn.Dropout))
    )
    return BodyNames(layers=layers, norm=after[0] if after else "", before=before)


class _Recorder(nn.Module):
    """A layer's place: it keeps what the model's loop gives the layer, and hands the states on."""

    def __init__(self, layer: nn.Module, form: int) -> None:
        super().__init__()
        # The loop reads some of them: which kind of attention a layer has.
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, nn.Module):
                setattr(self, name, value)
        self.form = form
        self.records = True
        self.calls: list[dict[str, Any]] = []
        names = list(inspect.signature(type(layer).forward).parameters)[2:]
        self.argument_names = [name for name in names if name not in ("args", "kwargs")]

    def forward(self, x_BTD: Tensor, *values: Any, **named: Any) -> Any:
        """Keep the arguments beside the states."""
        if self.records:
            self.calls.append(dict(zip(self.argument_names, values, strict=False)) | named)
        return x_BTD if self.form == 0 else (x_BTD, *[None] * (self.form - 1))


class _NoWeights(nn.Module):
    """Stand-in for a child with weights: states pass through, and ids and masks become nothing."""

    def __init__(self) -> None:
        super().__init__()
        # Some loops look at the type of the first that they find.
        self.weight = nn.Parameter(torch.zeros(0))

    def forward(self, *values: Any, **named: Any) -> Tensor:
        """Return the states, or a zero."""
        first = next(value for value in (*values, *named.values()) if isinstance(value, Tensor))
        return first if first.is_floating_point() and first.dim() > 2 else torch.zeros((), device=first.device)


class _ClosingNorm(nn.Module):
    """The closing norm's place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Count the call, and hand the states on."""
        self.calls += 1
        return x_BTD


class LayerArguments:
    """The arguments of all layers of a model.

    Copies of a part share it: it has no weights.

    Parameters
    ----------
    body : the library's base model
    names : its children

    Raises
    ------
    ValueError
        If the model's loop does not call each layer once with the states as its first argument.
    """

    def __init__(self, body: nn.Module, names: BodyNames) -> None:
        self._lock = threading.Lock()
        self._layers = names.layers
        self._loops: dict[tuple[torch.device, bool], nn.Module] = {}
        self._kept: list[tuple[tuple[Any, ...], weakref.ref[Tensor] | None, list[dict[str, Any]]]] = []
        children, width = dict(body.named_children()), int(cast(Any, body.config).hidden_size)
        failure: Exception | None = None
        # Older models' layers return tuples.
        norm = _ClosingNorm()
        for form in range(4):
            recorders = nn.ModuleList(_Recorder(layer, form) for layer in children[names.layers])  # type: ignore[attr-defined]
            stand_ins: dict[int, nn.Module] = {id(children[name]): _NoWeights() for name in names.before}
            if names.norm:
                stand_ins[id(children[names.norm])] = norm
            loop = copy.deepcopy(body, {id(children[names.layers]): recorders, **stand_ins}).eval()
            self._loops = {_ON_HOST: loop}
            try:
                norm.calls = 0
                states, _ = self._run(torch.zeros(1, 3, width), None)
            except Exception as error:  # noqa: BLE001 (whatever a model's loop says of a form that it does not take)
                failure = failure or error
                continue
            if norm.calls > 1:
                raise ValueError("its closing norm stands before the first layer, too")
            if isinstance(states, Tensor) and states.shape == (1, 3, width):
                return
        raise ValueError("its layers cannot be called one by one, states in and states out") from failure

    def __deepcopy__(self, memo: Any) -> LayerArguments:
        return self

    def embedding(self, modules: Mapping[str, nn.Module]) -> nn.Module:
        """Return the model's loop with these modules before the first layer: ids in, the first layer's states out."""
        loop = copy.deepcopy(self._loops[_ON_HOST])
        for recorder in cast(Any, loop.get_submodule(self._layers)):
            # Nobody would read or clear its list.
            recorder.records, recorder.calls = False, []
        for name, module in modules.items():
            loop.set_submodule(name, module)
        return loop

    def of_layer(self, index: int, x_BTD: Tensor, mask: MaskForm) -> dict[str, Any]:
        """Return what layer ``index`` takes beside its states.

        Parameters
        ----------
        index : of the whole model
        x_BTD : its states, [B, T, D] or of a slice [B, t, D]; shape, type and device alone matter
        mask : padding mask or packed mask [B, T], None where each row is one example, or a slice
        """
        part = mask if isinstance(mask, TokenSlice) else None
        padding = mask if part is None else None if is_plain(part.mask_BT) else part.mask_BT
        length = x_BTD.shape[1] if part is None else part.length
        arguments = self._arguments(x_BTD, length, padding)
        if part is None:
            return arguments[index]
        return _of_slice(arguments[index], part, padding, x_BTD.device)

    def of_step(self, index: int, x_RTD: Tensor, mask_RK: Tensor, keys: Any) -> dict[str, Any]:
        """Return what layer ``index`` takes beside the states of new tokens.

        Parameters
        ----------
        index : of the whole model
        x_RTD : states of the new tokens
        mask_RK : True at real tokens, of earlier ones and new ones
        keys : keys and values of the earlier ones, to which the layer adds those of the new ones
        """
        arguments = self._arguments(x_RTD, x_RTD.shape[1], mask_RK, is_step=True)[index]
        return {name: keys if name in _CACHES and value is not None else value for name, value in arguments.items()}

    def _arguments(
        self, x_BTD: Tensor, length: int, padding: Tensor | None, is_step: bool = False
    ) -> list[dict[str, Any]]:
        key = (x_BTD.shape[0], length, x_BTD.shape[2], x_BTD.dtype, x_BTD.device, is_step)
        with self._lock:
            return self._arguments_of(key, padding)

    def embed_step(self, loop: nn.Module, ids_RT: Tensor, mask_RK: Tensor) -> Tensor:
        """Embed new tokens by a loop of :meth:`embedding`, [R, T, D]; ``mask_RK`` as in :meth:`of_step`."""
        return cast(Tensor, loop(input_ids=ids_RT, **_step_arguments(loop, mask_RK, ids_RT.shape[1]))[0])

    def _arguments_of(self, key: tuple[Any, ...], padding: Tensor | None) -> list[dict[str, Any]]:
        for other, of_padding, arguments in self._kept:
            if padding is None or of_padding is None:
                is_same = padding is None and of_padding is None
            else:
                is_same = of_padding() is padding
            if other == key and is_same:
                return arguments
        batch, length, width, dtype, device, is_step = key
        # Tensors without data have none that a model's loop could look at.
        host = torch.device("cpu") if device.type == "meta" else device
        recorders = self._run(torch.zeros(batch, length, width, dtype=dtype, device=host), padding, is_step)[1]
        arguments = [recorder.calls[0] for recorder in recorders]
        if host != device:
            arguments = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)
        self._kept = [(key, None if padding is None else weakref.ref(padding), arguments), *self._kept][:_KEPT]
        return arguments

    def _run(self, x_BTD: Tensor, padding: Tensor | None, is_step: bool = False) -> tuple[Tensor, list[_Recorder]]:
        # A model in float64 has tables in float64; in less than float32 it has them in float32.
        place = (x_BTD.device, x_BTD.dtype == torch.float64)
        if place not in self._loops:
            dtype = torch.float64 if place[1] else None
            self._loops[place] = copy.deepcopy(self._loops[_ON_HOST]).to(x_BTD.device, dtype)
        loop = self._loops[place]
        recorders = list(getattr(loop, self._layers))
        for recorder in recorders:
            recorder.calls = []
        given = {"use_cache": False, **library_mask(padding)}
        if is_step:
            assert padding is not None
            given = _step_arguments(loop, padding, x_BTD.shape[1])
        with torch.no_grad():
            states = loop(inputs_embeds=x_BTD, **given)[0]
        if any(len(recorder.calls) != 1 for recorder in recorders):
            raise ValueError("expected one call of each layer")
        return states, recorders


def _step_arguments(loop: nn.Module, mask_RK: Tensor, num_new: int) -> dict[str, Any]:
    # The library's cache is imported where answers are written alone.
    from client_pipeline.families.kept_keys import step_arguments

    return step_arguments(loop, mask_RK, num_new)


def _of_slice(
    arguments: Mapping[str, Any], part: TokenSlice, padding: Tensor | None, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of a slice: its rows of the masks and tables, and the keys of earlier slices."""
    taken: dict[str, Any] = {}
    for name, value in arguments.items():
        dim = _OF_QUERIES.get(name)
        if name == "attention_mask":
            whole = (
                torch.ones(1, 1, part.length, part.length, dtype=torch.bool, device=device).tril()
                if value is None
                else value
            )
            if value is None and padding is not None:
                whole = whole & padding[:, None, None, :].to(device)
            taken[name] = whole[:, :, part.first : part.end, : part.end]
        elif dim is not None and value is not None:
            # Copies: a part of a table would hold the whole.
            cut = [table.narrow(dim, part.first, part.end - part.first).clone() for table in _tensors(value)]
            taken[name] = tuple(cut) if isinstance(value, tuple) else cut[0]
        elif isinstance(value, Tensor | tuple):
            raise ValueError(f"{name}: no rule to cut it into token slices; leave token slices at 1")
        else:
            taken[name] = value
    return taken | {next((name for name in _CACHES if name in arguments), _CACHES[0]): part}


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
