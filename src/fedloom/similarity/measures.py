"""Similarity measures (S0 §4-7), each as a vector per network whose products compare all pairs.

A measure turns what a network answered to n inputs into a *signature*, a flat vector. The product
of two signatures is the measure before it is scaled; scaling needs only the products of each with
itself. So all pairs of many networks are one matrix product, and two networks are its smallest
case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.errors import FedloomError, unknown
from fedloom.similarity.kernels import Kernel, Linear, kernel_named

_ROUNDING = 1e-12  # relative differences that rounding may leave of none, in double precision


class Measure(ABC):
    """How alike representations are."""

    on_weights: bool = False  # compares flat weights; no inputs are needed
    needs_inputs: bool = False  # looks at the raw inputs as well

    @property
    def least(self) -> int:
        """The smallest number of samples that it can be taken of."""
        return 2

    def confounder(self, inputs: Tensor) -> Tensor | None:
        """What the raw inputs say already, the same for all networks and layers."""
        return None

    @abstractmethod
    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        """The flat vector of one representation, n samples × p features."""

    def scale(self, products: Tensor) -> Tensor:
        """Similarities from the products of all signatures."""
        own = products.diagonal()
        return self.scaled(products, own, own)

    def scaled(self, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Similarities from products of some signatures with others; `rows` and `columns` are the
        products of those with themselves."""
        return products

    def between(self, x: Tensor, y: Tensor, inputs: Tensor | None = None) -> float:
        """The similarity of two representations of the same samples."""
        if len(x) != len(y):
            raise FedloomError(
                f"Two representations of {len(x)} and {len(y)} samples can't be compared: give "
                "both the same inputs."
            )
        if self.needs_inputs and inputs is None:
            raise FedloomError(
                f"{type(self).__name__} takes out what the raw inputs have in common: give them as "
                "inputs=..."
            )
        if inputs is not None and len(inputs) != len(x):
            raise FedloomError(
                f"{len(inputs)} inputs can't have given representations of {len(x)} samples."
            )
        known = None if inputs is None else self.confounder(inputs)
        vectors = torch.stack([self.signature(x, known), self.signature(y, known)])
        return float(self.scale(vectors @ vectors.T)[0, 1])


@dataclass(frozen=True)
class InnerProduct(Measure):
    """‖YᵀX‖²_F = tr(XXᵀYYᵀ) (eq. 4-4); not centred, not scaled."""

    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        return gram(x).flatten()


@dataclass(frozen=True)
class CCA(Measure):
    """R²_CCA = ‖Q_YᵀQ_X‖²_F / p₁ (eq. 4-7), the mean squared canonical correlation.

    Q are orthonormal bases of the centred columns and p₁ is the smaller of their ranks: columns
    that say the same count once. A layer with as many features as samples explains anything, so
    its CCA is 1: take more samples than features.
    """

    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        given = _flat(x)
        values = given - given.mean(0)
        n, p = values.shape
        if not values.isfinite().all():
            return values.new_full((n * n,), torch.nan)
        if values.abs().max() <= _ROUNDING * given.abs().max():  # the same for all samples
            return values.new_zeros(n * n)
        if p <= n:
            basis, sizes, _ = torch.linalg.svd(values, full_matrices=False)
        else:
            squares, basis = torch.linalg.eigh(values @ values.T)
            sizes = squares.clamp(min=0).sqrt()
        fine = torch.finfo(x.dtype if x.dtype.is_floating_point else torch.float32).eps
        if p > n:  # squared before the roots were taken
            fine = max(fine, torch.finfo(torch.float64).eps ** 0.5)
        kept = basis[:, sizes > sizes.max() * max(n, p) * fine]
        return (kept @ kept.T).flatten()

    def scaled(self, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        # ‖QQᵀ‖²_F is the rank
        return _divided(products, torch.minimum(rows[:, None], columns[None, :]))


@dataclass(frozen=True)
class HSIC(Measure):
    """tr(KHLH) / (n − 1)² (eq. 4-9); `debiased` is the estimator of Song et al. (2012), whose mean
    does not depend on the number of samples."""

    kernel: Kernel = field(default_factory=Linear)
    debiased: bool = False

    @property
    def least(self) -> int:
        return 4 if self.debiased else 2

    def __post_init__(self) -> None:
        if isinstance(self.kernel, str):
            object.__setattr__(self, "kernel", kernel_named(self.kernel))

    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        n, inner = len(x), gram(x)
        if n < self.least:
            raise FedloomError(
                f"{n} samples are too few for {type(self).__name__}: give {self.least} or more."
            )
        if inner.max() - inner.min() <= _ROUNDING * inner.abs().max():
            # The same for all samples. Centred, it would be what rounding left, of any direction.
            return inner.new_zeros(n * n)
        return self._centred(self._kernel(inner, confounder))

    def _kernel(self, inner: Tensor, confounder: Tensor | None) -> Tensor:
        return self.kernel(inner)

    def _centred(self, k: Tensor) -> Tensor:
        n = len(k)
        if not self.debiased:
            k = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
            return k.flatten() / (n - 1)
        k = k.clone().fill_diagonal_(0)
        sums = k.sum(0) / (n - 2)
        k = k - sums[:, None] - sums[None, :] + k.sum() / ((n - 1) * (n - 2))
        return k.fill_diagonal_(0).flatten() / (n * (n - 3)) ** 0.5


@dataclass(frozen=True)
class CKA(HSIC):
    """HSIC(K, L) / √(HSIC(K, K) · HSIC(L, L)) (eq. 4-10). A representation that is constant over
    the samples has similarity 0 to everything."""

    def scaled(self, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return _cosine(products, rows, columns)


@dataclass(frozen=True)
class DCKA(CKA):
    """CKA of dK = K − α̂K⁰ (eq. 4-13 to 4-17), K⁰ being the same kernel of the raw inputs: what
    networks share only because their inputs are alike is taken out. It can be negative."""

    needs_inputs = True

    def confounder(self, inputs: Tensor) -> Tensor | None:
        return self.kernel(gram(inputs))

    def _kernel(self, inner: Tensor, confounder: Tensor | None) -> Tensor:
        assert confounder is not None
        return deconfounded(self.kernel(inner), confounder)


class _OnWeights(Measure):
    """A cosine of flat weights."""

    on_weights = True

    def scaled(self, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return _cosine(products, rows, columns)


@dataclass(frozen=True)
class Cosine(_OnWeights):
    """wᵀv / ‖w‖‖v‖ of flat weights."""

    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        return x.double().flatten()


@dataclass(frozen=True)
class Pearson(_OnWeights):
    """The correlation of flat weights: the cosine of their deviations from their means."""

    def signature(self, x: Tensor, confounder: Tensor | None = None) -> Tensor:
        flat = x.double().flatten()
        return flat - flat.mean()


MEASURES: dict[str, type[Measure]] = {
    "cka": CKA,
    "dcka": DCKA,
    "cca": CCA,
    "hsic": HSIC,
    "inner": InnerProduct,
    "cosine": Cosine,
    "pearson": Pearson,
}


def measure_named(name: str, kernel: Kernel | str | None = None, debiased: bool = False) -> Measure:
    """A measure by name, with a kernel and an estimator where it has them.

    >>> measure_named("cka", debiased=True)
    CKA(kernel=Linear(), debiased=True)
    """
    if name not in MEASURES:
        raise unknown("similarity", name, MEASURES)
    cls = MEASURES[name]
    if isinstance(kernel, str):
        kernel = kernel_named(kernel)
    if issubclass(cls, HSIC):
        return cls(kernel or Linear(), debiased)
    if kernel not in (None, Linear()) or debiased:
        what = "a kernel" if kernel not in (None, Linear()) else "a debiased form"
        raise FedloomError(
            f"'{name}' does not take {what}: that is for {', '.join(sorted(_with_kernel()))}."
        )
    return cls()


def _with_kernel() -> list[str]:
    return [name for name, cls in MEASURES.items() if issubclass(cls, HSIC)]


def gram(x: Tensor) -> Tensor:
    """XXᵀ of n samples, whose features are flattened, in double precision."""
    flat = _flat(x)
    return flat @ flat.T


def deconfounded(k: Tensor, k0: Tensor) -> Tensor:
    """dK = K − α̂K⁰, where α̂ = ⟨K⁰, K⟩ / ⟨K⁰, K⁰⟩ makes dK as small as it can be."""
    norm = (k0 * k0).sum()
    return k - ((k0 * k).sum() / norm if norm > 0 else 0.0) * k0


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1).double()


def _cosine(products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    rows, columns = (own.clamp(min=0).sqrt() for own in (rows, columns))
    return _divided(products, rows[:, None] * columns[None, :])


def _divided(products: Tensor, by: Tensor) -> Tensor:
    """The quotient; 0 where there is nothing to divide by, NaN where a network gave NaN."""
    return torch.where(by <= 0, torch.zeros_like(products), products / by)
