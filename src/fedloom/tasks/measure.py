"""A measure: what a score is called, how it is written, and whether more of it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One number that a model is scored by.

    >>> accuracy, mse = Measure("accuracy"), Measure("mse", "MSE", share=False, lower=True)
    >>> accuracy.text(0.9123), mse.text(0.00213), accuracy.heading("test"), mse.heading("test")
    ('91.23 %', '0.00213', 'test accuracy (%)', 'test MSE')
    """

    name: str  # of its column, and of its entry in records
    label: str = ""  # in headings, where it is not the name
    share: bool = True  # between 0 and 1, written in %
    lower: bool = False  # less is better

    @property
    def called(self) -> str:
        return self.label or self.name

    @property
    def unit(self) -> str:
        return "%" if self.share else ""

    @property
    def factor(self) -> float:
        """What a value is multiplied by before it is written."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> int:
        """1 where more is better, else -1."""
        return -1 if self.lower else 1

    @property
    def axis(self) -> str:
        """The label of its axis."""
        return f"{self.called} (%)" if self.share else self.called

    def heading(self, who: str) -> str:
        return f"{who} {self.axis}"

    def number(self, value: float | None) -> str:
        """A value without its unit."""
        if value is None or not math.isfinite(value):
            return "–"
        return f"{100 * value:.2f}" if self.share else f"{value:.4g}"

    def text(self, value: float | None) -> str:
        found = self.number(value)
        return f"{found} %" if self.share and found != "–" else found
