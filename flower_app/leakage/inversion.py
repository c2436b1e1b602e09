"""Attacks that read tokens back from activations: what a curious server, or device, can do with what it is sent.

The attacker has the model, which every round sends anew, and some text of its own. Shapes: N tokens, D width, T places,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP = 5
_CHUNK = 512
_HIDDEN = 256
_BATCH = 256
_STEPS = 800
_RIDGE = 1e-4


@dataclass(frozen=True)
class Tokens:
    """Activations of single tokens at one depth, and what they are of."""

    hidden_ND: Tensor
    ids_N: Tensor
    places_N: Tensor
    """Place of each token in its sequence."""

    def __len__(self) -> int:
        return len(self.ids_N)


@dataclass(frozen=True)
class Recovered:
    """Share of the tokens that an attack names."""

    top1: float
    """With its first guess."""
    top5: float
    """Among its first five."""

    @classmethod
    def of(cls, guesses_NK: Tensor, ids_N: Tensor) -> Recovered:
        """Count right guesses."""
        right_NK = guesses_NK == ids_N[:, None]
        return cls(float(right_NK[:, 0].double().mean()), float(right_NK.any(dim=1).double().mean()))


Embed = Callable[[Tensor], Tensor]
"""The embedding: ids [B, T] to vectors [B, T, D]."""


def blind(auxiliary: Tokens, victims: Tokens) -> Recovered:
    """Guess the most frequent tokens without looking: what an attack has to beat."""
    frequent = auxiliary.ids_N.bincount().argsort(descending=True)[:TOP]
    return Recovered.of(frequent.expand(len(victims), -1), victims.ids_N)


def nearest(embed: Embed, vocabulary: int, auxiliary: Tokens, embedded_ND: Tensor, victims: Tokens) -> Recovered:
    """Name the tokens whose embedding is nearest, by cosine, once the way from embedding to activation is taken off.

    Parameters
    ----------
    embed : the model's embedding
    vocabulary : V
    auxiliary : activations of the attacker's own text; they tell how far activations are from embeddings on average
    embedded_ND : embeddings of the same tokens
    victims : activations to read
    """
    shift_D = (auxiliary.hidden_ND - embedded_ND).mean(dim=0)
    return _name(embed, vocabulary, embedded_ND.mean(dim=0), victims.hidden_ND - shift_D, victims)


def linear(embed: Embed, vocabulary: int, auxiliary: Tokens, embedded_ND: Tensor, victims: Tokens) -> Recovered:
    """Invert like :func:`nearest`, after the best linear map from activations of auxiliary text to its embeddings."""
    mean_D, target_D = auxiliary.hidden_ND.mean(dim=0), embedded_ND.mean(dim=0)
    x, y = (auxiliary.hidden_ND - mean_D).double(), (embedded_ND - target_D).double()
    gram = x.T @ x
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    map_DD = torch.linalg.solve(gram, x.T @ y).to(victims.hidden_ND.dtype)
    return _name(embed, vocabulary, target_D, (victims.hidden_ND - mean_D) @ map_DD + target_D, victims)


def _name(embed: Embed, vocabulary: int, centre_D: Tensor, vectors_ND: Tensor, victims: Tokens) -> Recovered:
    """Name each token by the embeddings at its place that are nearest to a vector."""
    wanted_ND = F.normalize(vectors_ND - centre_D, dim=-1)
    scores_NK = wanted_ND.new_empty((len(victims), 0))
    ids_NK = victims.ids_N.new_empty((len(victims), 0))
    # Most decoder-only models give a token the same embedding at each place.
    first_TD, places = embed(victims.ids_N[:1].expand(1, int(victims.places_N.max()) + 1))[0], victims.places_N
    if first_TD.equal(first_TD[:1].expand_as(first_TD)):
        places = torch.zeros_like(places)
    rows_of = {int(place): places == place for place in places.unique()}
    for ids_V in torch.arange(vocabulary).split(_CHUNK):
        candidates_VTD = F.normalize(embed(ids_V[:, None].expand(-1, max(rows_of) + 1)) - centre_D, dim=-1)
        scores_NV = wanted_ND.new_empty((len(victims), len(ids_V)))
        for place, rows in rows_of.items():
            scores_NV[rows] = wanted_ND[rows] @ candidates_VTD[:, place].T
        scores_NK = torch.cat([scores_NK, scores_NV], dim=1)
        ids_NK = torch.cat([ids_NK, ids_V.expand(len(victims), -1)], dim=1)
        best = scores_NK.topk(min(TOP, scores_NK.shape[1]), dim=1).indices
        scores_NK, ids_NK = scores_NK.gather(1, best), ids_NK.gather(1, best)
    return Recovered.of(ids_NK, victims.ids_N)


def learned(draw: Callable[[], Tokens], victims: Tokens, seed: int = 0) -> Recovered:
    """Train a classifier with one hidden layer on auxiliary text; it names tokens that are in that text.

    Parameters
    ----------
    draw : gives the activations of auxiliary text, each time with new noise if there is any
    victims : activations to read
    seed : of its weights and the order of its batches
    """
    first = draw()
    mean_D, scale_D = first.hidden_ND.mean(dim=0), first.hidden_ND.std(dim=0).clamp_min(1e-6)
    # Of a vocabulary of 50,000 a text has a few thousand.
    known_V = first.ids_N.unique()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = first.hidden_ND.shape[1]
        model = nn.Sequential(nn.Linear(width, _HIDDEN), nn.GELU(), nn.Dropout(0.2), nn.Linear(_HIDDEN, len(known_V)))
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=_STEPS)
        with torch.enable_grad():
            for hidden_BD, ids_B in _batches(draw):
                loss = F.cross_entropy(model((hidden_BD - mean_D) / scale_D), torch.searchsorted(known_V, ids_B))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    model.eval()
    with torch.no_grad():
        guesses = [
            known_V[model((piece - mean_D) / scale_D).topk(min(TOP, len(known_V)), dim=1).indices]
            for piece in victims.hidden_ND.split(4096)
        ]
    return Recovered.of(torch.cat(guesses), victims.ids_N)


def _batches(draw: Callable[[], Tokens]) -> Iterator[tuple[Tensor, Tensor]]:
    steps = 0
    while True:
        tokens = draw()
        for rows in torch.randperm(len(tokens)).split(_BATCH):
            if steps == _STEPS:
                return
            steps += 1
            yield tokens.hidden_ND[rows], tokens.ids_N[rows]
