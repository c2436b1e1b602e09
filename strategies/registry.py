"""Strategies by name: CollaPipe, its baselines, Flower's own, and anybody's by ``module:Class``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from client_pipeline.near_names import did_you_mean
from client_pipeline.plugins import class_named
from strategies.traits import Keeps, Traits

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

COLLAPIPE = "collapipe"
STRATEGIES = {
    COLLAPIPE: "strategies.collapipe:CollaPipe",
    "vanilla-fl": "strategies.baselines.vanilla_fl:VanillaFL",
    "pipeline": "strategies.baselines.pipeline:PipeLine",
    "titanic": "strategies.baselines.titanic:Titanic",
    "splitlora": "strategies.baselines.adapters:SplitLoRA",
    "splitfrozen": "strategies.baselines.adapters:SplitFrozen",
    "fedlora": "strategies.baselines.adapters:FedLoRA",
    "flexlora": "strategies.baselines.adapters:FlexLoRA",
    "local": "strategies.baselines.adapters:Local",
}
"""Short names of the strategies of this package. Imported when asked for: a control unit needs none of them."""
_PLANNED = Traits(keeps="state")
_SERVED = replace(_PLANNED, decoder_on_server=True, channel_for_each=True, takes_aggregator=True)
_WAIVED = ("C7", "C9")
_TRAITS = {
    COLLAPIPE: _SERVED,
    "vanilla-fl": replace(_PLANNED, waives=_WAIVED),
    "pipeline": replace(_PLANNED, uploads=False, averages=False),
    "titanic": _PLANNED,
    **dict.fromkeys(("splitlora", "splitfrozen"), replace(_SERVED, waives=_WAIVED)),
    **dict.fromkeys(("fedlora", "flexlora"), replace(_SERVED, decoder_on_server=False, waives=_WAIVED)),
    "local": replace(_PLANNED, uploads=False, averages=False, waives=_WAIVED),
}
"""Traits of their classes, for a caller that must not import torch with them."""
STOCK_KEEPS: dict[str, Keeps] = {
    **dict.fromkeys(("FedAvg", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "FedProx"), "nothing"),
    **dict.fromkeys(("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"), "memory"),
}
"""State that Flower's own classes keep from round to round; they cannot declare it. The others' state is unknown."""


def _flower_strategies() -> Any:
    """Flower's module of strategies; a command that follows a run of our own ones imports no Flower."""
    from flwr.serverapp import strategy

    return strategy


def stock_strategies() -> list[str]:
    """Names of ``flwr.serverapp.strategy`` that ``strategy`` accepts.

    Left out are those that average no arrays (XGBoost) and the wrappers that take another strategy as an argument.
    """
    flower = _flower_strategies()
    return sorted(
        name
        for name, value in vars(flower).items()
        if inspect.isclass(value)
        and issubclass(value, flower.Strategy)
        and not inspect.isabstract(value)
        and not name.startswith("FedXgb")
        and "strategy" not in inspect.signature(value).parameters
    )


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Parameters
    ----------
    name : one of :data:`STRATEGIES`, a class of ``flwr.serverapp.strategy``, or ``module:Class``

    Raises
    ------
    ValueError
        For an unknown name, or a class that is no strategy.
    """
    if name in STRATEGIES or ":" in name:
        cls = class_named("strategy", STRATEGIES.get(name, name), _flower_strategies().Strategy)
        _refuse_trees(name, cls)
        return cls
    if name in stock_strategies():
        named: type[Strategy] = getattr(_flower_strategies(), name)
        return named
    _refuse_trees(name, getattr(_flower_strategies(), name, None))
    raise ValueError(
        f"strategy: expected {', '.join(STRATEGIES)}, one of {', '.join(stock_strategies())}, or module:Class, "
        f"found {name!r}{did_you_mean(name, [*STRATEGIES, *stock_strategies()])}"
    )


def _refuse_trees(name: str, cls: type | None) -> None:
    if any(base.__name__.startswith("FedXgb") for base in getattr(cls, "__mro__", ())):
        raise ValueError(
            f"strategy: {name} joins trees of XGBoost, and a run trains a Transformer; expected one of "
            f"{', '.join([*STRATEGIES, *stock_strategies()])}"
        )


def traits_by_name(name: str) -> Traits:
    """Return what a strategy declares; see :func:`strategy_class`."""
    return _TRAITS[name] if name in _TRAITS else traits_of(strategy_class(name))


def traits_of(cls: type[Strategy]) -> Traits:
    """Return what a strategy's class declares; of Flower's own classes, what is known of them.

    Raises
    ------
    ValueError
        If ``traits`` is something else.
    """
    if getattr(_flower_strategies(), cls.__name__, None) is cls:
        return Traits(keeps=STOCK_KEEPS.get(cls.__name__, "unknown"))
    traits = getattr(cls, "traits", Traits())
    if not isinstance(traits, Traits):
        raise ValueError(f"strategy: {cls.__name__}.traits: expected strategies.traits.Traits, found {traits!r}")
    return traits
