"""S2's comparisons of sub-models: which channels a weak client should train.

All of them share one federation (S2 tables 3.3 and 4.1): 100 clients, a tenth a round, as many of
each capacity, two passes over the local data, SGD with momentum, cropped images, static batch norm,
the masked loss and the scaler. High and low heterogeneity are two and four classes a client. S2's
EMNIST has ten digits; MNIST stands in for it and is called so.

`quick` is conv4 of a quarter of the channels or ResNet18 of an eighth, 20 local batches a round and
200 rounds; the ablations have half as many and are scored once, at the end. `medium` is as short,
with the source's networks and images. `full` is the source's. `source` has the source's constants,
`tuned` a learning rate at which the networks move (the methods' presets of these names; ten times
theirs on CIFAR-10). All images are trained on: what is scored is the common test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from fedloom.data.catalog import load
from fedloom.errors import FedloomError
from fedloom.experiment.result import Result
from fedloom.experiment.study import (
    Ask,
    Cell,
    Drawn,
    Figures,
    Picture,
    Results,
    Study,
    Table,
    spread,
)
from fedloom.methods.submodels import DEPTHS

LABELS = {
    "heterofl": "HeteroFL",
    "fjord": "FjORD",
    "federated-dropout": "Federated Dropout",
    "fedrolex": "FedRolex",
    "depthfl": "DepthFL",
    "feddse": "FedDSE",
    "fedgse-csl": "FedGSE-CSL",
    "fedgse-spl": "FedGSE-SPL",
}
#: how many samples a client or the public set of FedGSE has, the larger of the two
ALL = {"mnist": 600, "cifar10": 500, "digits": 144}
SKEWS = {"high": "classes:2", "low": "classes:4"}
ROUNDS = {"mnist": 800, "cifar10": 2500, "digits": 30}
QUICK = {"mnist": 200, "cifar10": 200, "digits": 6}
#: the source's EMNIST and CIFAR-10, high / low heterogeneity (tables 3.4, 3.5, 4.3, 4.4)
SOURCE = {
    ("low-quality", "mnist"): {
        "heterofl": (93.21, 97.61), "federated-dropout": (87.96, 97.63),
        "fedrolex": (91.41, 98.61), "depthfl": (92.34, 97.75), "feddse": (95.34, 98.65),
    },
    ("low-quality", "cifar10"): {
        "heterofl": (38.13, 47.01), "federated-dropout": (50.16, 58.16),
        "fedrolex": (55.61, 68.04), "depthfl": (49.42, 55.93), "feddse": (58.19, 70.82),
    },
    ("high-quality", "mnist"): {
        "heterofl": (96.11, 98.65), "federated-dropout": (88.76, 97.53),
        "fedrolex": (93.94, 98.56), "depthfl": (97.69, 99.14), "fedgse-csl": (98.06, 98.74),
        "fedgse-spl": (97.44, 98.77),
    },
    ("high-quality", "cifar10"): {
        "heterofl": (56.08, 73.42), "federated-dropout": (52.57, 65.28),
        "fedrolex": (57.28, 71.68), "depthfl": (63.90, 76.13), "fedgse-csl": (65.89, 73.51),
        "fedgse-spl": (65.82, 74.66),
    },
}  # fmt: skip
#: temperature (table 3.6, EMNIST): high, low, IID
SOURCE_TEMPERATURE = {
    ("0.25", "fedrolex"): (93.35, 97.29, 97.04), ("0.25", "feddse-t0"): (81.25, 89.74, 88.05),
    ("0.25", "feddse-t1"): (96.59, 98.21, 97.83), ("0.5", "fedrolex"): (97.76, 98.52, 98.74),
    ("0.5", "feddse-t0"): (91.51, 96.53, 95.24), ("0.5", "feddse-t1"): (98.45, 99.16, 99.09),
    ("low-quality", "fedrolex"): (91.41, 98.61, 98.67),
    ("low-quality", "feddse-t0"): (95.34, 98.65, 98.69),
    ("low-quality", "feddse-t1"): (94.60, 97.86, 98.15),
}  # fmt: skip


#: FedDSE where nobody can train the whole, FedGSE where a fifth can, each beside the same three
BOTH = tuple(
    f"{method}@{population}"
    for population, best in (("low-quality", "feddse"), ("high-quality", "fedgse-csl"))
    for method in ("heterofl", "federated-dropout", "fedrolex", best)
)


class _S2(Study):
    data = ("mnist", "cifar10", "digits")
    presets: ClassVar[tuple[str, ...]] = ("tuned", "source")
    scales: ClassVar[tuple[str, ...]] = ("quick", "medium", "full")
    ablation: ClassVar[bool] = False

    def check(self, ask: Ask) -> None:
        super().check(ask)
        if ask.data == "digits" and ask.scale == "medium":
            raise FedloomError("The digits have the scales quick and full only.")

    def _settings(self, ask: Ask, method: str, **more: Any) -> dict[str, Any]:
        quick, short = ask.scale == "quick", ask.scale != "full"
        rounds = (QUICK if short else ROUNDS)[ask.data]
        if short and self.ablation:
            rounds //= 2
        options: dict[str, Any] = {"norm": "static"}
        settings: dict[str, Any] = {
            "preset": ask.preset,
            "data": ask.data,
            "model": "resnet18" if ask.data == "cifar10" else "conv4",
            "rounds": rounds,
            "eval_every": rounds if self.ablation else max(rounds // 10, 2),
            "eval_clients": 0,
            "test_share": 0.0,
            "partition": SKEWS["high"],
        }
        if ask.data == "cifar10":
            settings["augment"] = "flip+crop:4"
            if ask.preset == "tuned":
                settings["lr"] = 0.1
        if ask.data == "mnist":
            settings["data_options"] = {"size": 28 if quick else 32}
        if short:
            settings |= {"steps": 20, "static_samples": 5000}
        if quick:
            options |= {"width": 8} if ask.data == "cifar10" else {"channels": [16, 32, 64, 128]}
        if ask.data == "digits":
            settings |= {"clients": 20, "steps": 4, "augment": "crop:1", "participation": 0.5,
                         "data_options": {"size": 8}}  # fmt: skip
            options["channels"] = [8, 8, 16, 16]
        if method.startswith("fedgse"):
            settings["public"] = "share:0.1" if ask.data == "digits" else "share:0.01"
        return {**settings, "model_options": options, **more}

    def _cell(self, ask: Ask, name: str, method: str, **more: Any) -> Cell:
        return Cell(name, method, self._settings(ask, method, **more))

    def _title(self, ask: Ask) -> str:
        settings = self._settings(ask, "heterofl")
        options = settings["model_options"]
        sizes = options.get("channels") or ([options["width"]] if "width" in options else [])
        size = f" of {'-'.join(map(str, sizes))} channels" if sizes else ""
        return (
            f"{ask.data}, {settings['model']}{size}, {settings['rounds']} rounds, "
            f"{ask.preset} constants, {ask.over}"
        )


class _Methods(_S2):
    """All methods in one population, with high and low heterogeneity.

    S2's DepthFL has a quarter of the clients at each depth, whatever the population; its second row
    is for the deepest prefix that a client of the population can pay for with r² of the parameters,
    as width r costs.
    """

    capacities: str
    labels: ClassVar[Mapping[str, str]] = {
        **LABELS,
        "depthfl": "DepthFL, a quarter at each depth",
        "depthfl-budget": "DepthFL, depth by capacity",
    }

    def cells(self, ask: Ask) -> list[Cell]:
        out = []
        for skew, partition in SKEWS.items():
            settings: dict[str, Any] = {"partition": partition, "capacities": self.capacities}
            for method in LABELS:
                mine = {**settings, "capacities": DEPTHS} if method == "depthfl" else settings
                out.append(self._cell(ask, f"{method}-{skew}", method, **mine))
            settings["budget"] = "parameters"
            out.append(self._cell(ask, f"depthfl-budget-{skew}", "depthfl", **settings))
        return out

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        source = SOURCE.get((self.capacities, ask.data), {})
        theirs = "EMNIST" if ask.data == "mnist" else ask.data
        rows = []
        for method, label in self.labels.items():
            numbers = [f"{n:.2f}" for n in source.get(method, ())] or ["–", "–"]
            ours = [_accuracy(results.get(f"{method}-{skew}", ())) for skew in SKEWS]
            rows.append([label, *ours, *numbers])
        heads = ["method", "high heterogeneity", "low heterogeneity",
                 f"source's {theirs}: high", "low"]  # fmt: skip
        scores = Table(f"Common test set (%), {self.capacities}: {self._title(ask)}", heads, rows)
        return [scores, self._margins(results), self._costs(results), self._by_capacity(results)]

    def _margins(self, results: Results) -> Table:
        """How far the method that S2 puts first is ahead of each other one, seed by seed."""
        best = "feddse" if self.capacities == "low-quality" else "fedgse-csl"
        rows = []
        for method, label in self.labels.items():
            if method == best:
                continue
            ahead = [_ahead(results.get(f"{best}-{skew}", ()), results.get(f"{method}-{skew}", ()))
                     for skew in SKEWS]  # fmt: skip
            rows.append([label, *ahead])
        heads = [f"{LABELS[best]} is ahead of", "high heterogeneity", "low heterogeneity"]
        return Table("Points ahead, and in how many of the seeds", heads, rows)

    def _costs(self, results: Results) -> Table:
        rows = []
        for method, label in self.labels.items():
            runs = results.get(f"{method}-high", ())
            if runs:
                mean = runs[0].devices.mean()
                rows.append([label, f"{mean['parameters'] / 1e3:.1f} k",
                             f"{mean['macs'] / 1e9:.2f} G", f"{mean['memory'] / 1e6:.1f} MB",
                             f"{mean['bytes_up'] / 1e3:.0f} kB",
                             f"{mean['bytes_down'] / 1e3:.0f} kB"])  # fmt: skip
        heads = ["method", "values trained", "MACs a round", "memory", "up", "down"]
        return Table("What a device pays a round, mean of the capacities", heads, rows)

    def _by_capacity(self, results: Results) -> Table:
        """What a device of each capacity pays, for width (HeteroFL's), width chosen on the device
        (FedDSE's) and depth."""
        rows = []
        for method in ("heterofl", "feddse", "depthfl"):
            for run in results.get(f"{method}-high", ())[:1]:
                for capacity, paid in run.devices.iterrows():
                    rows.append([self.labels[method], f"{capacity:g}",
                                 f"{paid['parameters'] / 1e3:.1f} k", f"{paid['macs'] / 1e9:.3f} G",
                                 f"{paid['memory'] / 1e6:.2f} MB"])  # fmt: skip
        heads = ["method", "capacity", "values trained", "MACs a round", "memory"]
        return Table("What a device pays a round, by its capacity", heads, rows)

    def pictures(self, ask: Ask, results: Results) -> Figures:
        out = []
        for skew in SKEWS:
            ran = {m: results[f"{m}-{skew}"] for m in self.labels if f"{m}-{skew}" in results}
            curves = {self.labels[m]: [r.evaluations for r in runs] for m, runs in ran.items()}
            title = f"{ask.data}, {self.capacities}, {skew} heterogeneity"
            panels = {"test_accuracy": title}
            out.append(Picture(f"rounds-{skew}", f"Accuracy over rounds: {title}", panels, curves))
        return out


class S2Low(_Methods):
    name = "s2-low"
    title = "Sub-models where nobody can train the whole (S2 tables 3.4, 3.5)"
    capacities = "low-quality"


class S2High(_Methods):
    name = "s2-high"
    title = "Sub-models where a fifth can train the whole (S2 tables 4.3, 4.4)"
    capacities = "high-quality"


class S2Temperature(_S2):
    """FedDSE's temperature against FedRolex, where all are alike and where they are not."""

    name = "s2-temperature"
    title = "FedDSE's temperature (S2 table 3.6)"
    ablation = True
    POPULATIONS = ("0.25", "0.5", "low-quality")
    METHODS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
        "fedrolex": ("FedRolex", "fedrolex", {}),
        "feddse-t0": ("FedDSE, T = 0", "feddse", {"temperature": 0.0}),
        "feddse-t1": ("FedDSE, T = 1", "feddse", {"temperature": 1.0}),
    }

    def cells(self, ask: Ask) -> list[Cell]:
        return [
            self._cell(ask, f"{name}-{population}-{skew}", method, partition=partition,
                       capacities=population, **options)
            for population in self.POPULATIONS
            for skew, partition in {**SKEWS, "iid": "iid"}.items()
            for name, (_, method, options) in self.METHODS.items()
        ]  # fmt: skip

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        rows = []
        for population in self.POPULATIONS:
            for name, (label, _, _) in self.METHODS.items():
                ours = [_accuracy(results.get(f"{name}-{population}-{skew}", ()))
                        for skew in (*SKEWS, "iid")]  # fmt: skip
                source = SOURCE_TEMPERATURE[population, name] if ask.data == "mnist" else ()
                rows.append([population, label, *ours, " / ".join(f"{n:.2f}" for n in source)])
        heads = ["capacities", "method", "high heterogeneity", "low", "IID", "source's EMNIST"]
        return [Table(f"Common test set (%): {self._title(ask)}", heads, rows)]


class _Sweep(_S2):
    """Accuracy of some methods against one number."""

    x: str
    METHODS: Sequence[str]
    VALUES: Sequence[float]
    ablation = True
    skews: ClassVar[Mapping[str, str]] = SKEWS
    #: by method and skew: accuracies that the source gives for its EMNIST, of values in order
    THEIRS: ClassVar[Mapping[tuple[str, str], Sequence[float | None]]] = {}

    def settings_at(self, method: str, value: float) -> dict[str, Any]:
        raise NotImplementedError

    def label(self, method: str) -> str:
        name, _, population = method.partition("@")
        return f"{LABELS[name]}, {population}"

    def cells(self, ask: Ask) -> list[Cell]:
        return [
            self._cell(ask, f"{method}-{skew}-{value:g}", method.partition("@")[0],
                       **{"partition": partition, **self.settings_at(method, value)})
            for skew, partition in self.skews.items()
            for value in self.VALUES
            for method in self.METHODS
        ]  # fmt: skip

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        heads = [f"method; {self.x}", *(self.value(v) for v in self.VALUES)]
        out = []
        for skew in self.skews:
            rows = []
            for m in self.METHODS:
                ours = [_accuracy(results.get(f"{m}-{skew}-{v:g}", ())) for v in self.VALUES]
                rows.append([self.label(m), *ours])
                if ask.data == "mnist" and (theirs := self.THEIRS.get((m, skew))):
                    numbers = ["–" if n is None else f"{n:.2f}" for n in theirs]
                    rows.append([f"{self.label(m)}, source's EMNIST", *numbers])
            title = f"Common test set (%){self._of(skew)}: {self._title(ask)}"
            out.append(Table(title, heads, rows))
        return out

    def _of(self, skew: str) -> str:
        return f", {skew} heterogeneity" if len(self.skews) > 1 else ""

    def value(self, value: float) -> str:
        return f"{value:g}"

    def place(self, ask: Ask, value: float) -> float:
        """Where it is drawn."""
        return value

    def pictures(self, ask: Ask, results: Results) -> Figures:
        out = []
        for skew in self.skews:
            curves: dict[str, list[pd.DataFrame]] = {}
            for method in self.METHODS:
                frames = []
                for seed in range(ask.seeds):
                    points = [
                        (self.place(ask, value), runs[seed].summary["test_accuracy"])
                        for value in self.VALUES
                        if len(runs := results.get(f"{method}-{skew}-{value:g}", ())) > seed
                    ]
                    if points:
                        frames.append(pd.DataFrame(points, columns=[self.x, "test_accuracy"]))
                if frames:
                    curves[self.label(method)] = frames
            if curves:
                title = f"{self.title}{self._of(skew)}"
                panels = {"test_accuracy": ask.data}
                out.append(Picture(f"sweep-{skew}", title, panels, curves, x=self.x))
        return out


class S2Rho(_Sweep):
    name = "s2-rho"
    title = "Accuracy against the share of strong clients (S2 figures 3.6, 4.6)"
    x = "ρ"
    VALUES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    _PAIRS: Mapping[str, tuple[float, Sequence[str]]] = {
        "half": (0.5, ("heterofl", "federated-dropout", "fedrolex", "feddse")),
        "whole": (1.0, ("heterofl", "federated-dropout", "fedrolex", "fedgse-csl")),
    }
    METHODS = tuple(f"{m}@{pair}" for pair, (_, ms) in _PAIRS.items() for m in ms)

    def settings_at(self, method: str, value: float) -> dict[str, Any]:
        strong = self._PAIRS[method.partition("@")[2]][0]
        return {"capacities": f"rho:{value:g},{strong:g},0.0625"}

    def label(self, method: str) -> str:
        name, _, pair = method.partition("@")
        return f"{LABELS[name]}, {{{'1/2' if pair == 'half' else '1'}, 1/16}}"


class S2Classes(_Sweep):
    name = "s2-classes"
    title = "Accuracy against classes per client (S2 figure 3.8, table 4.5)"
    x = "classes per client"
    METHODS = (*BOTH, "fedgse-spl@high-quality")
    VALUES = (2, 4, 6, 8, 10)
    skews: ClassVar = {"any": "classes:2"}
    THEIRS: ClassVar = {
        ("feddse@low-quality", "any"): (95.34, 98.55, None, None, None),
        ("fedgse-spl@high-quality", "any"): (97.44, 98.77, 98.94, 98.81, 99.01),
    }

    def settings_at(self, method: str, value: float) -> dict[str, Any]:
        return {"partition": f"classes:{value:g}", "capacities": method.partition("@")[2]}


class S2Participation(_Sweep):
    name = "s2-participation"
    title = "Accuracy against participation (S2 figures 3.9, 4.9)"
    x = "share of clients a round"
    METHODS = BOTH
    VALUES = (0.05, 0.1, 0.15, 0.2)
    THEIRS: ClassVar = {("feddse@low-quality", "high"): (93.62, 95.34, None, None)}

    def settings_at(self, method: str, value: float) -> dict[str, Any]:
        return {"participation": value, "capacities": method.partition("@")[2]}


class S2Samples(_Sweep):
    name = "s2-samples"
    title = "Accuracy against samples that sub-models are chosen by (S2 figures 3.10, 4.10)"
    x = "samples"
    METHODS = ("feddse@low-quality", "fedgse-csl@high-quality", "fedgse-spl@high-quality")
    VALUES = (64, 128, 256, 512, np.inf)
    THEIRS: ClassVar = {("feddse@low-quality", "high"): (93.99, 95.13, None, None, 95.34)}

    def settings_at(self, method: str, value: float) -> dict[str, Any]:
        some = None if np.isinf(value) else int(value)
        return {"samples": some, "capacities": method.partition("@")[2]}

    def place(self, ask: Ask, value: float) -> float:
        return min(value, ALL[ask.data])

    def value(self, value: float) -> str:
        return "all" if np.isinf(value) else f"{value:g}"


class S2Gap(_S2):
    """How far sub-models' gradients and updates are from the whole model's: S2's theorem 1 and
    figures 4.3 and 4.4. The means over a round's clients are added up over rounds."""

    name = "s2-gradient-gap"
    title = "Sub-models against the whole: gradients and updates (S2 theorem 1, figures 4.3, 4.4)"
    METHODS = ("federated-dropout", "fedrolex", "heterofl", "feddse", "fedgse-csl", "fedgse-spl")
    GAPS: ClassVar[Mapping[str, str]] = {
        "gradient_gap": "‖∇f(w) − ∇f(w_sub)‖ before training",
        "update_gap": "‖Δw − Δw_sub‖ after training",
    }

    def cells(self, ask: Ask) -> list[Cell]:
        rounds = 6 if ask.data == "digits" else 100
        return [
            self._cell(ask, method, method, capacities="high-quality", rounds=rounds,
                       eval_every=max(rounds // 5, 1), measure_gap=True)
            for method in self.METHODS
        ]  # fmt: skip

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        rounds = int(self.cells(ask)[0].settings["rounds"])
        at = sorted({max(rounds * i // 5, 1) for i in range(1, 6)})
        out = []
        for gap, what in self.GAPS.items():
            rows = []
            for method in self.METHODS:
                sums = [_added_up(run, gap) for run in results.get(method, ())]
                each = [spread([float(s.loc[t]) for s in sums]) for t in at]
                rows.append([LABELS[method], *each, _accuracy(results.get(method, ()))])
            heads = ["method", *(f"up to round {t}" for t in at), "test accuracy (%)"]
            title = f"{what}, added up: {self._title(ask)}"
            out.append(Table(title, heads, rows))
        return out

    def _title(self, ask: Ask) -> str:
        rounds = self.cells(ask)[0].settings["rounds"]
        return f"{ask.data}, {rounds} rounds, {ask.preset} constants, {ask.over}"

    def pictures(self, ask: Ask, results: Results) -> Figures:
        from fedloom.report.submodel_plots import plot_gaps

        curves = {
            what: {
                LABELS[m]: [_added_up(run, gap) for run in results[m]]
                for m in self.METHODS
                if m in results
            }
            for gap, what in self.GAPS.items()
        }
        return [Drawn("gaps", self.title, lambda: plot_gaps(curves))]


class S2Activations(_S2):
    """Which neurons clients with different classes activate."""

    name = "s2-activations"
    title = "Activations of clients with different classes (S2 figures 3.2, 3.3)"
    presets = ("source",)
    scales: ClassVar[tuple[str, ...]] = ("quick",)  # takes seconds as the source ran it

    def cells(self, ask: Ask) -> list[Cell]:
        settings = {
            "data": ask.data, "clients": 5, "participation": 1.0, "partition": "classes:2",
            "model": "mlp", "model_options": {"hidden": [50, 24]}, "rounds": 20, "lr": 0.05,
            "eval_every": 10,
        }  # fmt: skip
        return [Cell("fedavg", "fedavg", settings)]

    def tables(self, ask: Ask, results: Results) -> list[Table]:
        found = [_profiles(run) for run in results.get("fedavg", ())[:1]]
        if not found:
            return []
        profiles, classes = found[0]
        rows = [
            [f"hidden layer {i + 1}", *(f"{_overlap(layer, k):.2f}" for k in range(len(layer)))]
            for i, layer in enumerate(profiles)
        ]
        heads = ["share of the most active half in common with the others", *classes]
        return [Table(f"{ask.data}, MLP of 50 and 24 neurons, seed 0", heads, rows)]

    def pictures(self, ask: Ask, results: Results) -> Figures:
        from fedloom.report.submodel_plots import plot_activations

        runs = results.get("fedavg", ())
        if not runs:
            return []
        return [Drawn("activations", self.title, lambda: plot_activations(*_profiles(runs[0])))]


def _profiles(run: Result) -> tuple[list[np.ndarray], list[str]]:
    """Per hidden layer, clients × neurons; and the classes of each client."""
    import torch

    from fedloom.experiment.config import make_config
    from fedloom.experiment.plugins import method_class
    from fedloom.experiment.setup import make_federation
    from fedloom.select import Channels
    from fedloom.select.scores import activations

    config, _ = make_config(run.config, method_class(run.config["method"]))
    federation = make_federation(config, load(config.data))
    module = run.model()
    channels = Channels.of(module, federation.dataset.shape)
    found, names = [], []
    for client in range(config.clients):
        images = federation.dataset.x[federation.indices(client, "train")]
        found.append(activations(module, channels, torch.as_tensor(run.normalise(images))))
        held = np.flatnonzero(federation.classes_of(client))
        names.append(" and ".join(federation.dataset.classes[c] for c in held))
    return [np.stack(layer) for layer in zip(*found, strict=True)], names


def _overlap(layer: np.ndarray, client: int) -> float:
    half = layer.shape[1] // 2
    top = [set(np.argsort(-h)[:half]) for h in layer]
    others = [len(top[client] & top[k]) / half for k in range(len(layer)) if k != client]
    return float(np.mean(others))


def _added_up(run: Result, gap: str) -> pd.Series:
    """By round; rounds in which nobody measured (all were strong) add nothing."""
    return run.rounds.set_index("round")[gap].fillna(0).cumsum()


def _ahead(mine: Sequence[Result], others: Sequence[Result]) -> str:
    """The mean difference over seeds that both have, and how often it is above 0."""
    by_seed = {run.config["seed"]: run.summary["test_accuracy"] for run in others}
    apart = [
        100 * (run.summary["test_accuracy"] - by_seed[run.config["seed"]])
        for run in mine
        if run.config["seed"] in by_seed
    ]
    if not apart:
        return "–"
    return f"{spread(apart, sign='+')} ({sum(d > 0 for d in apart)} of {len(apart)})"


def _accuracy(runs: Iterable[Result]) -> str:
    return spread([100 * run.summary["test_accuracy"] for run in runs])


S2: tuple[type[Study], ...] = (
    S2Low,
    S2High,
    S2Temperature,
    S2Rho,
    S2Classes,
    S2Participation,
    S2Samples,
    S2Activations,
    S2Gap,
)
