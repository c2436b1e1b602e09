"""The mean of the clusters' products B A, as factors of the global rank: ``lora.average = "products"``.

The mean of A and the mean of B do not multiply to the mean of B A. The exact mean of N products has a rank of up to
N r; two rules make of it what a round can begin with:

* fold what the factors' means lack into the frozen matrices (FedEx-LoRA, arXiv:2410.09432);
* take the best factors of rank r, by the truncated singular value decomposition (FlexLoRA, arXiv:2402.11505).

Here it is the second: the frozen matrices stay those of the model's files, mapped by every process, of the digests that
were compared, and in few bits; no round sends more than factors; and clusters may have different ranks. What it leaves
out, beyond rank r, is measured in every round (:attr:`ProductMean.truncated`).

The products are never built: with the factors side by side, [out, q] and [q, in] for q = sum of the ranks, two QR
decompositions leave a matrix of q x q. The singular values fix the product alone, not its factors, and each optimizer's
state belongs to factors. So A is the clusters' mean of A within the product's row space, and B follows. Where the
clusters agree, the factors are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_NEGLIGIBLE = 1e-9
"""A singular value below this share of the largest is zero: float32 factors say no more."""
_LEAST_ALIGNED = 1e-2
"""A's smallest singular value, of the usual length of its rows, below which B would become too large."""


class Factors(NamedTuple):
    """B A of one layer, without its scale alpha / r."""

    b: Matrix
    """[out, r]."""
    a: Matrix
    """[r, in]."""

    @classmethod
    def of(cls, b: NDArray[Any], a: NDArray[Any]) -> Factors:
        """Take factors of any floating type."""
        return cls(b.astype(np.float64), a.astype(np.float64))

    @property
    def rank(self) -> int:
        """The columns of B."""
        return self.a.shape[0]


class ProductSum(NamedTuple):
    """A weighted sum of products, by its singular values; matrices of which none is [out, in]."""

    left: Matrix
    """[out, q]: left singular vectors."""
    values: Matrix
    """[q]: singular values, largest first."""
    right: Matrix
    """[in, q]: right singular vectors."""

    def truncated(self, rank: int) -> float:
        """Share of the sum's Frobenius norm that its best matrix of this rank lacks."""
        norm = float(np.linalg.norm(self.values))
        return float(np.linalg.norm(self.values[rank:])) / norm if norm else 0.0


def sum_of_products(terms: Sequence[tuple[float, Factors]]) -> ProductSum:
    """Sum coefficient x B A over the terms, exactly but for float64's rounding."""
    b = np.concatenate([coefficient * factors.b for coefficient, factors in terms], axis=1)
    a = np.concatenate([factors.a for _, factors in terms])
    basis_out, upper_b = np.linalg.qr(b)
    basis_in, upper_a = np.linalg.qr(a.T)
    left, values, right = np.linalg.svd(upper_b @ upper_a.T, full_matrices=False)
    return ProductSum(basis_out @ left, values, basis_in @ right.T)


def near_factors(total: ProductSum, reference_a: Matrix, row_length: float) -> Factors:
    """Best factors of a sum, of the reference's rank: A as near to the reference as the product allows.

    Parameters
    ----------
    total : the sum of products
    reference_a : [r, in]: the A that the factors are to resemble
    row_length : of A's rows where the reference has next to nothing of the product's row space
    """
    rank = reference_a.shape[0]
    counted = int((total.values[:rank] > _NEGLIGIBLE * total.values[0]).sum()) if total.values[0] > 0 else 0
    rows = total.right[:, :counted]
    if counted < rank:
        # Directions that the product does not use go on as they were: B begins there at 0.
        rest = reference_a - reference_a @ rows @ rows.T
        free = np.linalg.svd(rest, full_matrices=False)[2][: rank - counted].T
        rows = np.concatenate([rows, free], axis=1)
    aligned = reference_a @ rows
    sizes = np.linalg.svd(aligned, compute_uv=False)
    if sizes[-1] < _LEAST_ALIGNED * row_length:
        aligned = np.eye(rank) * row_length
    product = (total.left[:, :counted] * total.values[:counted]) @ total.right[:, :counted].T
    return Factors(product @ rows @ np.linalg.inv(aligned), aligned @ rows.T)


def leading_factors(factors: Factors, rank: int) -> Factors:
    """Best factors of a lower rank, the rows of A of one length; those of the same rank stay as they are."""
    if rank == factors.rank:
        return factors
    basis_in, upper = np.linalg.qr(factors.a.T)
    # Its right singular vectors are complete, also where B is still 0.
    left, values, turn = np.linalg.svd(factors.b @ upper.T, full_matrices=False)
    length = _row_length(factors.a)
    return Factors(left[:, :rank] * values[:rank] / length, length * turn[:rank] @ basis_in.T)


def mean_product(
    start: Factors, trained: Sequence[tuple[float, Factors]], begun: Sequence[Factors]
) -> tuple[Factors, float]:
    """Join the clusters' factors of a layer.

    The mean is of what they changed: start + sum of w (B A - B0 A0), with the B0 A0 that a cluster began with. Where
    that is the start, this is the mean of products. A cluster of a lower rank has not seen the rest of the start, and
    does not change it.

    Parameters
    ----------
    start : the round's factors, of the global rank r
    trained : of each cluster its weight, which add up to 1, and its factors
    begun : factors that each began with, by :func:`leading_factors` of the start

    Returns
    -------
    Factors of rank r, and the share of the mean's norm that they lack.
    """
    whole = [(weight, factors) for weight, factors in trained if factors.rank == start.rank]
    terms = list(trained)
    if len(whole) < len(trained):
        terms += [(1.0, start), *((-weight, old) for (weight, _), old in zip(trained, begun, strict=True))]
    total = sum_of_products(terms)
    shares = sum(weight for weight, _ in whole)
    mean_a = sum((weight * factors.a for weight, factors in whole), np.zeros_like(start.a))
    reference = mean_a / shares if shares else start.a
    return near_factors(total, reference, _row_length(start.a)), total.truncated(start.rank)


def _row_length(a: Matrix) -> float:
    """Root mean square of the rows' lengths."""
    return float(np.linalg.norm(a)) / np.sqrt(a.shape[0])
