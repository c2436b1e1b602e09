"""Losses whose constants in Theorem 1 can be measured: a convex one, and a small Transformer.

Both are F(w) = mean over N clusters of F_n(w), F_n the mean loss of the cluster's own examples, and w one flat vector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.runtime.stage.whole import whole_step
from experiments.base.experiment import Curve
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task
from flower_app.tasks.generated.generated_labels import KINDS, classified

_POWER_STEPS = 8
_PROBE = 1e-2
"""Length of the step by which a Hessian is felt."""


class Problem(Protocol):
    """A loss over clusters."""

    num_clusters: int
    strong_convexity: float
    """mu; 0 where the loss is not convex."""
    global_smoothness: float | None
    """beta, if it is known for all w; None: only what is measured on the way."""
    lowest: float
    """F*, or a bound below it."""

    def start(self) -> Tensor:
        """Return w_0, (P,)."""
        ...

    def loss(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F(w) and its gradient, (P,), over all examples."""
        ...

    def sample(self, w: Tensor, cluster: int, generator: torch.Generator) -> Tensor:
        """Return the gradient of F_n over a random batch, (P,)."""
        ...

    def sampling_error(self, w: Tensor, generator: torch.Generator) -> float:
        """Return E|g_n - grad F_n|^2, the mean over the clusters."""
        ...


class SoftmaxRegression:
    """Softmax regression with a ridge: it predicts the kind of the first noun of a generated sentence from its words.

    The Hessian is at most half the largest eigenvalue of the features' second moments, plus the ridge.
    """

    lowest: float

    def __init__(self, curve: Curve, seed: int) -> None:
        config, figure = curve.config, curve.figure
        self.batch_size = config.batch_size
        self.num_clusters = int(figure["clusters"])
        self.strong_convexity = float(figure["ridge"])
        # An equal share for each cluster, so that the mean over clusters is that over examples.
        per_cluster = config.data.num_examples // self.num_clusters
        examples = classified(per_cluster * self.num_clusters, "train", seed)
        words = sorted({word for text, _ in examples for word in text.lower().split()})
        place = {word: i for i, word in enumerate(words)}
        self.x_NED = torch.zeros(len(examples), len(words) + 1, dtype=torch.float64)
        for row, (text, _) in enumerate(examples):
            for word in text.lower().split():
                self.x_NED[row, place[word]] = 1.0
        self.x_NED[:, -1] = 1.0
        # Rows of length one: no sentence weighs more because it is long.
        self.x_NED = (self.x_NED / self.x_NED.norm(dim=1, keepdim=True)).view(self.num_clusters, per_cluster, -1)
        labels = torch.tensor([KINDS.index(label) for _, label in examples])
        self.y_NEC = torch.nn.functional.one_hot(labels, len(KINDS)).double().view(self.num_clusters, per_cluster, -1)
        x_ED = self.x_NED.flatten(0, 1)
        largest = float(torch.linalg.eigvalsh(x_ED.T @ x_ED / len(x_ED))[-1])
        self.global_smoothness: float | None = 0.5 * largest + self.strong_convexity
        self.lowest = self._optimum()

    def start(self) -> Tensor:
        """Begin at 0."""
        return torch.zeros(self.x_NED.shape[-1] * self.y_NEC.shape[-1], dtype=torch.float64)

    def _residual(self, w: Tensor, x_ED: Tensor, y_EC: Tensor) -> tuple[Tensor, Tensor]:
        """Logits' log-softmax, and softmax minus label."""
        log_p_EC = torch.log_softmax(x_ED @ w.view(x_ED.shape[-1], -1), dim=-1)
        return log_p_EC, log_p_EC.exp() - y_EC

    def loss(self, w: Tensor) -> tuple[float, Tensor]:
        """See Problem."""
        x_ED, y_EC = self.x_NED.flatten(0, 1), self.y_NEC.flatten(0, 1)
        log_p_EC, residual_EC = self._residual(w, x_ED, y_EC)
        value = -(log_p_EC * y_EC).sum(dim=-1).mean() + self.strong_convexity / 2 * w @ w
        gradient = (x_ED.T @ residual_EC / len(x_ED)).flatten() + self.strong_convexity * w
        return float(value), gradient

    def sample(self, w: Tensor, cluster: int, generator: torch.Generator) -> Tensor:
        """See Problem; a batch holds no example twice."""
        chosen = torch.randperm(self.x_NED.shape[1], generator=generator)[: self.batch_size]
        x_ED, y_EC = self.x_NED[cluster, chosen], self.y_NEC[cluster, chosen]
        _, residual_EC = self._residual(w, x_ED, y_EC)
        return (x_ED.T @ residual_EC / len(x_ED)).flatten() + self.strong_convexity * w

    def sampling_error(self, w: Tensor, generator: torch.Generator) -> float:
        """See Problem; exact, by the variance of a mean drawn without replacement."""
        num = self.x_NED.shape[1]
        total = 0.0
        for x_ED, y_EC in zip(self.x_NED, self.y_NEC, strict=True):
            _, residual_EC = self._residual(w, x_ED, y_EC)
            # |x r^T|^2 = |x|^2 |r|^2 of each example, and the mean's own.
            squares = (x_ED.square().sum(dim=1) * residual_EC.square().sum(dim=1)).mean()
            total += float(squares - (x_ED.T @ residual_EC / num).square().sum())
        rest = (num - self.batch_size) / (num - 1) / self.batch_size
        return rest * total / self.num_clusters

    def _optimum(self) -> float:
        """F*, to rounding: L-BFGS until the gradient is gone."""
        w = self.start().requires_grad_()
        solver = torch.optim.LBFGS(
            [w], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            value, gradient = self.loss(w.detach())
            w.grad = gradient
            return torch.tensor(value, dtype=torch.float64)

        solver.step(closure)
        value, gradient = self.loss(w.detach())
        if float(gradient.norm()) > 1e-8:
            raise RuntimeError(f"softmax regression: the optimum was not found, gradient {float(gradient.norm()):.1e}")
        return value


class SmallTransformer:
    """The run's own model and generated text, each gradient that of ``whole_step``.

    No constant holds for all w. Its loss is a cross-entropy, so 0 bounds it below.
    """

    strong_convexity = 0.0
    global_smoothness: float | None = None
    lowest = 0.0
    _DRAWS = 12
    """Batches of each cluster from which the sampling error is estimated."""

    def __init__(self, curve: Curve, seed: int) -> None:
        config: RunConfig = replace(curve.config, seed=curve.config.seed + seed)
        self.num_clusters = int(curve.figure["clusters"])
        self.batch_size = config.batch_size
        self.micro_batches = int(curve.figure["micro-batches"])
        chosen = task(config.task)
        prepared = chosen.prepare(config.data, config.model, config.seed, self.num_clusters)
        self.parts: ModelParts = prepared.build(config.seed)
        self.data = [
            chosen.cluster_data(config.data, prepared.tokenizer_json, n, self.num_clusters, config.seed)
            for n in range(self.num_clusters)
        ]
        self.whole = [data.collate(list(range(len(data)))) for data in self.data]
        self.parameters = [parameter for _, parameter in self.parts.named_parameters()]
        self._initial = torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def start(self) -> Tensor:
        """Begin at the model's own initial weights, whatever was asked of it meanwhile."""
        return self._initial.clone()

    def _gradient(self, w: Tensor, batch: Batch, micro_batches: int) -> tuple[float, Tensor]:
        torch.nn.utils.vector_to_parameters(w, self.parameters)
        step = whole_step(self.parts, StepId(seed=0, round=1, step=1, cluster=0), batch, micro_batches)
        return step.loss_sum / step.weight, torch.cat(
            [step.gradients[n].flatten() for n, _ in self.parts.named_parameters()]
        )

    def loss(self, w: Tensor) -> tuple[float, Tensor]:
        """See Problem."""
        gradients = [self._gradient(w, batch, 1) for batch in self.whole]
        return sum(value for value, _ in gradients) / len(gradients), torch.stack([g for _, g in gradients]).mean(dim=0)

    def sample(self, w: Tensor, cluster: int, generator: torch.Generator) -> Tensor:
        """See Problem."""
        data = self.data[cluster]
        chosen = torch.randperm(len(data), generator=generator)[: self.batch_size].tolist()
        return self._gradient(w, data.collate(chosen), self.micro_batches)[1]

    def sampling_error(self, w: Tensor, generator: torch.Generator) -> float:
        """See Problem; estimated. Losses count by tokens, so a batch's gradient has a small bias: that is in it."""
        errors = []
        for cluster, batch in enumerate(self.whole):
            _, exact = self._gradient(w, batch, 1)
            drawn = [self.sample(w, cluster, generator) for _ in range(self._DRAWS)]
            errors.append(float(torch.stack([(g - exact).square().sum() for g in drawn]).mean()))
        return sum(errors) / len(errors)


def curvature(problem: Problem, w: Tensor, generator: torch.Generator) -> float:
    """Largest absolute eigenvalue of the Hessian at w, by power iteration on differences of gradients."""
    direction = torch.randn(w.shape, generator=generator, dtype=w.dtype)
    curvature_estimate = 0.0
    for _ in range(_POWER_STEPS):
        direction = direction / direction.norm()
        ahead, behind = (problem.loss(w + sign * _PROBE * direction)[1] for sign in (1, -1))
        direction = (ahead - behind) / (2 * _PROBE)
        curvature_estimate = float(direction.norm())
    return curvature_estimate


PROBLEMS: dict[str, Any] = {"convex": SoftmaxRegression, "transformer": SmallTransformer}
"""By ``figure.problem``."""
