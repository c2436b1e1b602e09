"""Theorem 1: the bound over rounds beside what is measured, where its constants can be measured.

Rounds are those of federated averaging with one local SGD step: w <- mean over n of (w - eta (g_n + e_n)), g_n the
gradient of a random batch of cluster n, and e_n the distortion of its upload, Gaussian with mean square epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from experiments.theorem1_problems import PROBLEMS, Problem, curvature
from strategies.dssda.convergence import BoundParameters, bound_scale, convergence_bound, gamma

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEASUREMENTS = 5
"""Approximate number of rounds in a training at which constants are measured."""
_COLUMNS = 4
"""Curves of the picture beside each other."""
_ROWS = 60
"""Rounds of which rows are written: more of the early ones."""


@dataclass(frozen=True)
class _Path:
    """One training, measured."""

    losses: list[float]
    squares: list[float]
    """|grad F|^2 before each round."""
    smoothness: float
    """Largest seen: beta, or a bound below it."""
    sampling: float
    """Largest mean square error of a batch's gradient seen: phi^2."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each of some rounds of each seed, the first and the last among them.

    ``[figure]``: ``problem`` (``convex`` or ``transformer``), ``clusters``, ``step`` (eta times the beta that is known
    before), ``distortion`` (epsilon), ``segments`` and ``blocks`` (S and L of the printed bound); of the convex problem
    ``ridge``, of the Transformer ``micro-batches``.
    """
    del folder
    for curve in curves:
        figure, rounds = curve.figure, curve.config.num_rounds
        if figure["problem"] not in PROBLEMS:
            raise ValueError(
                f"{curve.name}: figure.problem: expected one of {', '.join(PROBLEMS)}, found {figure['problem']!r}"
            )
        say(f"{curve.name}: {curve.seeds} seeds, {rounds} rounds")
        torch.set_num_threads(curve.config.runtime.threads)
        # One problem and one start for all seeds: these draw the batches, over which the theorem's mean is.
        problem: Problem = PROBLEMS[figure["problem"]](curve, 0)
        known = problem.global_smoothness or curvature(problem, problem.start(), torch.Generator().manual_seed(0))
        eta = float(figure["step"]) / known
        paths = [_train(problem, eta, float(figure["distortion"]), rounds, seed) for seed in range(curve.seeds)]
        # Theorem 1 wants constants for all rounds: the largest seen by any seed.
        beta = problem.global_smoothness or max(path.smoothness for path in paths)
        phi = float(np.sqrt(max(path.sampling for path in paths)))
        parameters = BoundParameters(g0=bound_scale(beta, eta, problem.num_clusters), phi=phi)
        exact, printed = (
            float(gamma(size, int(figure["blocks"]), float(figure["distortion"]), parameters))
            for size in (0, int(figure["segments"]))
        )
        start = paths[0].losses[0] - problem.lowest
        means = np.array([np.cumsum(path.squares) / np.arange(1, rounds + 1) for path in paths])
        bounds, printed_bounds = (
            [
                # Where eta beta > 1 the theorem does not apply; its formula is drawn, and the findings say so.
                convergence_bound(start, eta, min(beta, 1 / eta), np.full((t, problem.num_clusters), size))
                for t in range(1, rounds + 1)
            ]
            for size in (exact, printed)
        )
        gaps = np.array([path.losses[1:] for path in paths]) - problem.lowest
        gap_bounds = [_gap_bound(start, eta, problem.strong_convexity, exact, t) for t in range(1, rounds + 1)]
        printed_gaps = [
            printed_gap_bound(
                t, first_loss=paths[0].losses[0], lowest=problem.lowest, eta=eta, beta=beta,
                xi=problem.strong_convexity, phi_sq=phi**2, epsilon=float(figure["distortion"]),
                num_clusters=problem.num_clusters, size=int(figure["segments"]), num_blocks=int(figure["blocks"]),
            )
            for t in range(1, rounds + 1)
        ]  # fmt: skip
        # The theorem's mean is over the batches drawn, so over the seeds.
        broken = int(np.sum(means.mean(axis=0) > bounds))
        gap_broken = sum(
            bound is not None and gap > bound for gap, bound in zip(gaps.mean(axis=0), gap_bounds, strict=True)
        )
        for seed, path in enumerate(paths):
            for t in sorted({*np.geomspace(1, rounds, _ROWS).astype(int).tolist(), rounds}):
                yield {
                    "curve": curve.name,
                    "label": curve.label,
                    "problem": figure["problem"],
                    "seed": seed,
                    "round": t,
                    "gap": float(gaps[seed, t - 1]),
                    "gap_bound": gap_bounds[t - 1],
                    "gap_printed": printed_gaps[t - 1],
                    "gradient_sq": path.squares[t - 1],
                    "mean_gradient_sq": float(means[seed, t - 1]),
                    "bound": bounds[t - 1],
                    "bound_printed": printed_bounds[t - 1],
                    "eta": eta,
                    "beta": beta,
                    "phi_sq": phi**2,
                    "epsilon": float(figure["distortion"]),
                    "mu": problem.strong_convexity,
                    "eta_beta": eta * beta,
                    "broken_rounds": broken,
                    "gap_broken_rounds": int(gap_broken),
                }


def _gap_bound(start: float, eta: float, mu: float, noise: float, t: int) -> float | None:
    """Bound of F(w_t) - F* that the theorem's step gives with 2 mu (F - F*) <= |grad F|^2; None where mu = 0."""
    if not mu:
        return None
    left = (1 - eta * mu) ** t
    return left * start + noise * (1 - left) / (eta * mu)


def printed_gap_bound(
    t: int,
    *,
    first_loss: float,
    lowest: float,
    eta: float,
    beta: float,
    xi: float,
    phi_sq: float,
    epsilon: float,
    num_clusters: int,
    size: int,
    num_blocks: int,
) -> float | None:
    """Return (23) as printed, for constant S and epsilon; None outside its condition on eta.

        prod (1 - 2 sigma) F(0) - F* + sum_t prod_j>t (1 - sigma) (beta eta^2 phi^2 / N (S^2 / L + 1) + eta epsilon / N)

    with sigma of (24). F(0), not F(0) - F*, shrinks: so the bound tends to -F* where nothing is added.

    Parameters
    ----------
    t : rounds
    first_loss, lowest : F(0) and F* [nat]
    eta, beta, xi : step, smoothness, and the constant of Polyak and Lojasiewicz
    phi_sq, epsilon : mean squares of the sampling error and of the distortion
    num_clusters, size, num_blocks : N, S and L
    """
    if not eta * beta * (size**2 + num_blocks) < 4 * xi * num_clusters * num_blocks:
        return None
    sigma = eta * xi - beta * eta**2 / 2 * (1 + size**2 / (num_clusters * num_blocks))
    added = beta * eta**2 * phi_sq / num_clusters * (size**2 / num_blocks + 1) + eta / num_clusters * epsilon
    repeated = t if sigma == 0 else (1 - (1 - sigma) ** t) / sigma
    return (1 - 2 * sigma) ** t * first_loss - lowest + repeated * added


def _train(problem: Problem, eta: float, distortion: float, rounds: int, seed: int) -> _Path:
    """Train by federated averaging, and measure."""
    generator = torch.Generator().manual_seed(seed)
    probe = torch.Generator().manual_seed(10_000 + seed)
    w = problem.start()
    value, gradient = problem.loss(w)
    losses, squares, smoothness, sampling = [value], [], 0.0, 0.0
    for t in range(rounds):
        squares.append(float(gradient.square().sum()))
        if t % max(1, rounds // _MEASUREMENTS) == 0:
            sampling = max(sampling, problem.sampling_error(w, probe))
            if problem.global_smoothness is None:
                smoothness = max(smoothness, curvature(problem, w, probe))
        trained = []
        for n in range(problem.num_clusters):
            noise = torch.randn(w.shape, generator=generator, dtype=w.dtype) * (distortion / len(w)) ** 0.5
            trained.append(w - eta * (problem.sample(w, n, generator) + noise))
        moved = torch.stack(trained).mean(dim=0)
        value, ahead = problem.loss(moved)
        # What smoothness says of this step, too: |grad F(w') - grad F(w)| <= beta |w' - w|.
        smoothness = max(smoothness, float((ahead - gradient).norm() / (moved - w).norm()))
        losses.append(value)
        w, gradient = moved, ahead
    return _Path(losses=losses, squares=squares, smoothness=smoothness, sampling=sampling)


def draw(rows: Sequence[Row]) -> Figure:
    """Mean of |grad F|^2 with its bounds above; below the gap of the loss, with its bound where there is one."""
    names = distinct(rows, "curve")
    figure, pairs = style.pairs_of_axes(len(names), height=7, abreast=_COLUMNS)
    for name, (above, below) in zip(names, pairs, strict=True):
        curve_rows = select(rows, curve=name)
        rounds = distinct(curve_rows, "round")
        for shade, (key, text) in enumerate(_SQUARES):
            style.curve(above, shade, rounds, _over_seeds(curve_rows, key)[0], text)
        for shade, (key, text) in enumerate(_GAPS):
            if curve_rows[0].get(key) is not None:
                style.curve(below, shade, rounds, _over_seeds(curve_rows, key)[0], text)
        above.set_yscale("log")
        if curve_rows[0]["gap_bound"] is not None and curve_rows[0].get("gap_printed") is None:
            below.set_yscale("log")
        for axis in (above, below):
            axis.set_xscale("log")
            axis.legend(fontsize=7)
        style.label(above, "round T", "mean of ‖∇F‖² over T rounds [nat²]", curve_rows[0]["label"])
        lowest = "F(w) - F* [nat]" if curve_rows[0]["mu"] else "F(w), over F* ≥ 0 [nat]"
        style.label(below, "round", lowest)
    return figure


_SQUARES = (
    ("mean_gradient_sq", "measured"),
    ("bound", "Theorem 1 without the S² term"),
    ("bound_printed", "Theorem 1 as printed"),
)
_GAPS = (("gap", "measured"), ("gap_bound", "bound with strong convexity"), ("gap_printed", "(23) as printed"))


def _over_seeds(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    """Mean and spread over the seeds, round by round."""
    table = np.array([[row[column] for row in select(rows, seed=seed)] for seed in distinct(rows, "seed")], dtype=float)
    spread = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])
    return table.mean(axis=0).tolist(), spread.tolist()


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Return, for each curve, the measured gradient and gap beside their bounds, and the rounds that break a bound."""
    paper_findings = []
    names = distinct(rows, "curve")
    first = select(rows, curve=names[0])[0]
    for name in names:
        curve_rows = select(rows, curve=name)
        first_row, num_rounds = curve_rows[0], max(row["round"] for row in curve_rows)
        bound, printed = _over_seeds(curve_rows, "bound")[0], _over_seeds(curve_rows, "bound_printed")[0]
        broken = first_row["broken_rounds"]
        mean, spread = mean_spread([row["mean_gradient_sq"] for row in curve_rows if row["round"] == num_rounds])
        constants = (
            f"η = {first_row['eta']:.3g}, β = {first_row['beta']:.3g}, φ² = {first_row['phi_sq']:.3g}, "
            f"ε = {first_row['epsilon']:.3g}"
        )
        paper_findings.append(
            PaperFinding(
                what=f"{first_row['label']}: mean of ‖∇F‖² over {num_rounds} rounds",
                paper="bounded by Theorem 1; no constants are printed",
                ours=f"{mean:.3g} ± {spread:.2g} measured, bound {bound[-1]:.3g}, as printed with S {printed[-1]:.3g}; "
                + ("the bound holds in every round" if not broken else f"the bound is broken in {broken} rounds"),
                why=f"{constants}; " + _constants(first_row),
            )
        )
        if first_row["gap_bound"] is not None:
            gap, spread = mean_spread([row["gap"] for row in curve_rows if row["round"] == num_rounds])
            bounds, broken = _over_seeds(curve_rows, "gap_bound")[0], first_row["gap_broken_rounds"]
            paper_findings.append(
                PaperFinding(
                    what=f"{first_row['label']}: gap of the loss after {num_rounds} rounds",
                    paper="-",
                    ours=f"{gap:.3g} ± {spread:.2g} nat measured, bound {bounds[-1]:.3g}; "
                    + ("it holds in every round" if not broken else f"it is broken in {broken} rounds"),
                    why=f"the theorem's step with 2 μ (F - F*) ≤ ‖∇F‖², μ = {first_row['mu']:g}",
                )
            )
        if first_row.get("gap_printed") is not None:
            paper_findings.append(_printed_finding(curve_rows))
        if name != names[0] and first_row["mu"] and first_row["eta_beta"] == first["eta_beta"]:
            paper_findings.append(_scaling_finding(curve_rows, select(rows, curve=names[0])))
    return paper_findings


def _printed_finding(curve_rows: Sequence[Row]) -> PaperFinding:
    """(23) as printed beside the gap that is measured."""
    rounds = distinct(curve_rows, "round")
    gaps, printed = (_over_seeds(curve_rows, key)[0] for key in ("gap", "gap_printed"))
    below = [t for t, gap, bound in zip(rounds, gaps, printed, strict=True) if bound < gap]
    where_printed = f"below the measured gap from round {below[0]} on" if below else "above the measured gap"
    return PaperFinding(
        what=f"{curve_rows[0]['label']}: gap of the loss after {rounds[-1]} rounds by (23) as printed",
        paper="bounds the gap for η < 4 ξ N L / (β (S² + L))",
        ours=f"{printed[-1]:.3g} nat, {gaps[-1]:.3g} measured: {where_printed}",
        why="F(0) shrinks, where F(0) - F* should: without noise the printed bound tends to -F*; and its condition "
        "lets σ of (24) be negative, so that it grows instead",
    )


def _scaling_finding(curve_rows: Sequence[Row], reference_rows: Sequence[Row]) -> PaperFinding:
    """Return the gap of the second half, measured and bounded, as a multiple of the first curve's."""
    rounds = distinct(curve_rows, "round")
    ratios = []
    for key in ("gap", "gap_bound"):
        late, reference = (
            float(np.mean([row[key] for row in part if row["round"] > rounds[-1] // 2]))
            for part in (curve_rows, reference_rows)
        )
        ratios.append(late / reference)
    return PaperFinding(
        what=f"{curve_rows[0]['label']}: gap of the second half as a multiple of that of {reference_rows[0]['label']}",
        paper="(φ² + ε) / N, and S² φ² / (L N)",
        ours=f"{ratios[0]:.2f} measured, {ratios[1]:.2f} by the bound without S",
        why="the bound's noise goes by (φ² + ε) / N, and no gradient depends on S",
    )


def _constants(row: Row) -> str:
    condition = f"η β = {row['eta_beta']:.2f}" + (
        "" if row["eta_beta"] <= 1 + 1e-9 else ": over 1, so the theorem does not apply"
    )
    if row["mu"]:
        return f"β is known, φ² exact and the largest on the way, F* solved for; {condition}"
    return (
        f"no β holds for all weights of a Transformer: the largest on the way stands for it; φ², too, is "
        f"the largest on the way, and estimated, and F* ≥ 0: a check, no proof; {condition}"
    )


EXPERIMENT = Experiment(
    name="theorem1", shows="the convergence bound over rounds beside what is measured", run=run, draw=draw,
    findings=findings, trains=True,
)  # fmt: skip
