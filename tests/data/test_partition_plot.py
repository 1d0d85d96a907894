"""The picture of a partition, for few and for many clients."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from fedloom.data.partition import partition
from fedloom.report.partition_plot import plot_partition


def names(count: int) -> list[str]:
    return [f"class {label}" for label in range(count)]


def test_a_few_clients_are_bars_as_long_as_their_data() -> None:
    y = np.arange(300) % 10
    p = partition("dirichlet:0.5", y, 12, seed=0)
    figure = plot_partition(p, y, names(10), "who holds what")
    (axis,) = figure.axes
    lengths = sum(np.array([bar.get_width() for bar in bars]) for bars in axis.containers)
    assert np.array_equal(np.asarray(lengths), p.sizes)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == names(10)
    assert figure.get_suptitle() == "who holds what"
    assert axis.get_xlabel() == "samples"


@pytest.mark.parametrize(("clients", "classes"), [(61, 10), (1500, 3), (30, 100), (61, 1)])
def test_many_clients_or_classes_are_a_heat_map_and_a_histogram(clients: int, classes: int) -> None:
    y = np.arange(6000) % classes
    p = partition("quantity:zipf", y, clients, seed=0)
    figure = plot_partition(p, y, names(classes), "many")
    heat, histogram = figure.axes[:2]
    np.testing.assert_allclose(heat.images[0].get_array().sum(axis=1), 1)
    assert sum(bar.get_height() for bar in histogram.patches) == clients
    figure.savefig(io.BytesIO(), format="png", dpi=40)


def test_plotting_leaves_pyplot_alone() -> None:
    y = np.arange(100) % 4
    plot_partition(partition("iid", y, 5, seed=0), y, names(4), "")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
