"""Parts that are built without memory for their weights, and get tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class NoStorage(TorchFunctionMode):
    """Build modules, in this thread, whose weights have shapes alone; :func:`adopt` gives them tensors.

    Layers make room for their weights by ``torch.empty``, which gives tensors on the meta device. Buffers are computed.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def adopt(module: nn.Module, weights: Mapping[str, Tensor], owner: str) -> None:
    """Make tensors the parameters of a module, without a copy; a parameter among them stays the object that it is.

    Parameters
    ----------
    module : whatever its parameters were
    weights : of all of them, by the module's own names; one that has several names needs one of them
    owner : names the module in messages

    Raises
    ------
    ValueError
        If one is missing or of another shape; the message names it.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for parameter, names in names_of.items():
        given = [name for name in names if name in weights]
        if not given:
            raise ValueError(f"weights of the {owner}: {names[0]} is missing; load weights of the same architecture")
        value = weights[given[0]]
        if value.shape != parameter.shape:
            raise ValueError(
                f"weights of the {owner}: {given[0]} has shape {list(value.shape)}, expected {list(parameter.shape)}; "
                "load weights of the same architecture"
            )
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for name in names:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, value)
