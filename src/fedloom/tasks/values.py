"""Regression: values to predict, in units of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.errors import FedloomError
from fedloom.tasks.base import Kept, Sums, Task, by_owner, ratio, to_numpy
from fedloom.tasks.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Regression(Task):
    """Squared errors of values on a scale of their own: a model returns (y − mean) / std, so that
    rates that suit one table suit another. Scores are in the values' units; R² compares with the
    mean of the data that is scored, and is not defined where all its values are the same."""

    mean_of: tuple[float, ...] = ()
    std_of: tuple[float, ...] = ()

    name = "regression"
    what = "values to predict: MSE, MAE, R²"
    measures = (
        Measure("mse", "MSE", share=False, lower=True),
        Measure("mae", "MAE", share=False, lower=True),
        Measure("r2", "R²", share=False),
    )
    dims = 1

    def in_words(self) -> str:
        return f"one number per value, (batch, {self.outputs})"

    def scaled(self, y: Tensor) -> Tensor:
        """Values on the scale of a model's outputs."""
        if not self.mean_of:
            return y
        return (y - y.new_tensor(self.mean_of)) / y.new_tensor(self.std_of)

    def values(self, outputs: Tensor) -> Tensor:
        """A model's outputs, in the values' units."""
        if not self.mean_of:
            return outputs
        return outputs * outputs.new_tensor(self.std_of) + outputs.new_tensor(self.mean_of)

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.own_loss is not None:
            return super().loss(outputs, self.scaled(y))
        return super().loss(outputs, y, weight)

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs - self.scaled(y)) ** 2).mean(-1)

    def nothing(self, clients: int) -> dict[str, np.ndarray]:
        names = ("squared", "absolute", "sum", "squares")
        each = {name: np.zeros((clients, self.outputs)) for name in names}
        return super().nothing(clients) | each

    def count(self, outputs: Tensor, y: Tensor, who: np.ndarray, clients: int) -> Sums:
        true, found = to_numpy(self.scaled(y.double())), to_numpy(outputs)
        off = found - true
        each = {"squared": off**2, "absolute": np.abs(off), "sum": true, "squares": true**2,
                "loss": (off**2).mean(-1)}  # fmt: skip
        sums = {name: by_owner(values, who, clients) for name, values in each.items()}
        return sums | {"samples": np.bincount(who, minlength=clients)}

    def scores(self, sums: Sums, kept: Kept | None = None) -> dict[str, np.ndarray]:
        samples = sums["samples"]
        n = samples[:, None]
        std = np.asarray(self.std_of) if self.std_of else np.ones(self.outputs)
        around = sums["squares"] - ratio(sums["sum"] ** 2, n)
        around[around < 1e-9 * np.maximum(sums["squares"], 1e-9)] = 0.0  # all the same, rounded
        return {
            "samples": samples,
            "mse": ratio(sums["squared"] * std**2, n).mean(1),
            "mae": ratio(sums["absolute"] * std, n).mean(1),
            "r2": (1 - ratio(sums["squared"], around)).mean(1),
            "loss": ratio(sums["loss"], samples),
        }

    def checked(self, what: str, y: np.ndarray, shape: Sequence[int]) -> None:
        if y.ndim != 2 or y.shape[1] != self.outputs or y.dtype != np.float32:
            raise FedloomError(
                f"{what} must be float32 values, (N, {self.outputs}), not {y.shape} {y.dtype}."
            )
        if not np.isfinite(y).all():
            raise FedloomError(f"{what} contain NaN or infinity. Remove these rows.")

    def plain(self) -> dict[str, Any]:
        return super().plain() | {"mean_of": list(self.mean_of), "std_of": list(self.std_of)}
