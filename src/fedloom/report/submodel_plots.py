"""Pictures of sub-models: what clients activate, and what their sub-models leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedloom.report.plots import look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_activations(layers: Sequence[np.ndarray], clients: Sequence[str]) -> Figure:
    """A panel for each layer: clients downwards, neurons to the right, ordered by how differently
    clients use them."""
    figure = new_figure(5 * len(layers), 0.5 * len(clients) + 1.8)
    axes = figure.subplots(1, len(layers), squeeze=False)[0]
    for i, (axis, layer) in enumerate(zip(axes, layers, strict=True)):
        order = np.argsort(-layer.std(0))
        image = axis.imshow(layer[:, order], aspect="auto", cmap="magma")
        axis.set_title(f"hidden layer {i + 1}", fontsize=10)
        axis.set(xlabel="neuron, most differing first")
        axis.set_yticks(range(len(clients)), clients if i == 0 else [""] * len(clients))
        figure.colorbar(image, ax=axis, label="mean activation")
    axes[0].set_ylabel("a client's classes")
    return figure


def plot_gaps(panels: Mapping[str, Mapping[str, Sequence[pd.Series]]]) -> Figure:
    """A panel for each kind of gap, added up over rounds: the mean over seeds, with its range
    shaded."""
    figure = new_figure(6 * len(panels), 4)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (what, curves) in zip(axes, panels.items(), strict=True):
        for i, (label, series) in enumerate(curves.items()):
            together = pd.concat(list(series), axis=1)
            mean = together.mean(axis=1)
            axis.plot(mean.index, mean, **look(i), label=label)
            low, high = together.min(axis=1), together.max(axis=1)
            axis.fill_between(mean.index, low, high, color=look(i)["color"], alpha=0.15, lw=0)
        axis.set(xlabel="round", ylabel=f"{what}, added up")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure
