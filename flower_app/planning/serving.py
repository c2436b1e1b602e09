"""``collapipe plan --for serving``: which device holds which layers of a model that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from client_pipeline.partition.plan import ClusterPlan
from flower_app.planning.plan import Planned, PlanRequest, first_instance
from strategies.dssda.serving_segments import TokenCosts, least_latency, most_tokens, token_costs


def plan_serving(request: PlanRequest, requests: int, tokens: int, echo: Callable[[str], None] | None) -> Planned:
    """Plan each cluster's devices for answers, once for one request and once for several.

    Parameters
    ----------
    request : the command's options; scenario, model and length matter
    requests : requests at once
    tokens : prompt and answer of each
    echo : prints text for people; None: nothing is printed

    Raises
    ------
    ValueError
        Without a scenario and a model, whose tokens are counted.
    """
    if not (request.scenario and request.model):
        raise ValueError(
            "--for serving: expected --scenario and --model: the times of a token are counted from both; found "
            f"{'a scenario' if request.scenario else 'no scenario'} and {'a model' if request.model else 'no model'}"
        )
    if min(requests, tokens) < 1:
        raise ValueError(f"--requests and --tokens: expected at least 1, found {requests} and {tokens}")
    scenario, instance, spec = first_instance(request)
    teb_bytes, kept_bytes = _block_bytes(spec)
    documents: list[dict[str, Any]] = []
    for number, cluster in enumerate(instance.clusters):
        costs = token_costs(
            instance,
            cluster,
            length=request.length,
            teb_bytes=teb_bytes,
            kept_bytes=kept_bytes,
            kept_tokens=requests * tokens,
        )
        name = (scenario.names[number] if scenario.names else "") or str(number)
        document: dict[str, Any] = {"cluster": name}
        for kind, delta, at_once in (
            ("one", least_latency(costs, instance.L), 1),
            ("several", most_tokens(costs, instance.L, requests), requests),
        ):
            document[kind] = None if delta is None else _figures(costs, delta, at_once)
        documents.append(document)
        if echo:
            echo(_text(document, costs, instance.L, requests))
    return Planned(all(d["one"] for d in documents), {"clusters": documents, "requests": requests, "tokens": tokens})


def _figures(costs: TokenCosts, delta: tuple[int, ...], requests: int) -> dict[str, Any]:
    order = tuple(device for device, d in enumerate(delta) if d)
    plan = ClusterPlan(delta=delta, order=order, m=1)
    return {
        "delta": list(plan.delta),
        # A prompt goes through the devices as a whole, one after the other.
        "prompt_token_s": costs.latency_s(delta),
        "token_s": max(costs.latency_s(delta), requests * costs.slowest_s(delta)),
        "tokens_per_s": costs.tokens_per_s(delta, requests),
    }


def _text(document: dict[str, Any], costs: TokenCosts, num_blocks: int, requests: int) -> str:
    if not document["one"]:
        return (
            f"cluster {document['cluster']}: its devices hold {sum(costs.capacity)} TEBs with the keys and values of "
            f"all requests, {num_blocks} are needed (C7); ask for fewer --requests or --tokens, or add devices"
        )
    lines = []
    for kind, words in (("one", "one request"), ("several", f"{requests} requests")):
        plan = document[kind]
        lines.append(
            f"cluster {document['cluster']}, {words}: delta {plan['delta']}, {plan['tokens_per_s']:.3g} tokens/s, "
            f"{plan['token_s']:.3g} s a token, a prompt {plan['prompt_token_s']:.3g} s a token"
        )
    return "\n".join(lines)


def _block_bytes(spec: Any) -> tuple[float, float]:
    """Return the bytes of the largest TEB's weights, and of a token's keys and values in it."""
    import torch

    from client_pipeline.families.families import build_block
    from client_pipeline.families.registry import family_named, library_family

    with torch.device("meta"):
        weights = max(
            sum(p.nbytes for p in build_block(spec, i).parameters())
            for i in range(family_named(spec.family).num_blocks(spec))
        )
    config = library_family(spec.family).library_config(spec)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(weights), float(2 * heads * width * 4)
