"""feddom by hand: every node keeps what it was told in a round in a dictionary, with a copy of each
model.

Distances are taken node by node on the stack of the models it knows, as one would write it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Bare, Workload
from fedloom.layout import Layout
from fedloom.mix.dominating import PAIRWISE, criteria_weights
from fedloom.streams import stream
from fedloom.topology import network

Known = dict[int, dict[str, Any]]
THETA, BALANCE, DELTA = 0.2, 0.4, 0.7


class BareDom(Bare):
    """Plain torch, plain Python."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._layout = Layout.of(self._module)
        self._models = [self._layout.flatten(self._module) for _ in range(workload.clients)]
        self._graphs: list[Known] = [{} for _ in range(workload.clients)]
        self._criteria = criteria_weights(PAIRWISE)

    def round(self, t: int) -> None:
        nodes = self._workload.clients
        for node in range(nodes):
            self._layout.load(self._module, self._models[node])
            self._fit(node, t)
            self._models[node] = self._layout.flatten(self._module)
        meetings = network("waypoint").meetings(
            t, nodes, lambda *names, round=t: stream(0, *names, round)
        )
        self._graphs = [
            {
                node: {
                    "step": 0, "model": self._models[node].clone(), "met": frozenset(),
                    "size": self._federation.size(node, "train"), "accuracy": self._accuracy(node),
                }
            }
            for node in range(nodes)
        ]  # fmt: skip
        for step in np.unique(meetings[:, 0]):
            self._step(int(step), meetings[meetings[:, 0] == step, 1:])
        self._models = [
            self._mixed(node, graph) if len(graph) > 1 else self._models[node]
            for node, graph in enumerate(self._graphs)
        ]

    def _step(self, step: int, pairs: np.ndarray) -> None:
        """All that meet tell each other what they knew before."""
        met: dict[int, list[int]] = {}
        for a, b in pairs.tolist():
            met.setdefault(a, []).append(b)
            met.setdefault(b, []).append(a)
        told = [dict(graph) for graph in self._graphs]
        for node, others in met.items():
            graph = self._graphs[node]
            for other in others:
                for who, entry in told[other].items():
                    if who not in graph:
                        graph[who] = {**entry, "model": entry["model"].clone()}
                    elif entry["step"] > graph[who]["step"]:
                        graph[who] = {**entry, "model": graph[who]["model"]}
            mine = graph[node]
            graph[node] = {**mine, "step": step, "met": mine["met"] | set(others)}

    def weights(self) -> torch.Tensor:
        return torch.stack(self._models).double().mean(0).float()

    def _accuracy(self, node: int) -> float:
        x, y = self._part(node, "validation")
        self._layout.load(self._module, self._models[node]).eval()
        with torch.no_grad():
            return float((self._module(x).argmax(1) == y).float().mean()) if len(y) else 0.0

    def _mixed(self, me: int, graph: Known) -> torch.Tensor:
        from pymcdm.methods import WASPAS  # here, as all bare loops' start-up holds this module

        ids = sorted(graph)
        sizes = np.array([graph[i]["size"] for i in ids], dtype=float)
        accuracy = np.array([graph[i]["accuracy"] for i in ids])
        models = torch.stack([graph[i]["model"] for i in ids]).double()
        unit = torch.nn.functional.normalize(models)
        cosine = 1 - (unit @ unit.T).numpy()
        pearson = 1 - np.atleast_2d(torch.corrcoef(models).numpy())
        near: dict[int, list[int]] = {i: [] for i in ids}
        for a in ids:
            for b in ids:
                if a != b and (b in graph[a]["met"] or a in graph[b]["met"]):
                    near[a].append(b)
        at = {i: k for k, i in enumerate(ids)}
        links = [(at[a], at[b]) for a in ids for b in near[a]]
        far = [max((d[a, b] for a, b in links), default=1.0) for d in (cosine, pearson)]
        apart = BALANCE * cosine / far[0] + (1 - BALANCE) * pearson / far[1]
        w = sizes / sizes.sum() / (1 + np.exp(THETA - accuracy))
        w /= w.max()
        score = w.copy()
        for i in ids:
            if near[i]:
                best = max(len(near[j]) for j in near[i])
                drift = np.mean([apart[at[i], at[j]] * w[at[j]] for j in near[i]])
                score[at[i]] *= min(1, len(near[i]) / best) / (1 + drift)
        covered: set[int] = set()
        members = []
        for k in np.argsort(-score.round(12), kind="stable"):  # equals stay equal
            if ids[k] not in covered:
                members.append(k)
                covered |= {ids[k], *near[ids[k]]}
        table = np.stack([accuracy, sizes, score], axis=1)[members]
        scale = np.where(table.max(axis=0) > 0, table.max(axis=0), 1)
        table = np.where(table.max(axis=0) > 0, table / scale, 1)
        quality = WASPAS(normalization_function=lambda x, cost=False: x)(
            table, self._criteria, np.ones(3), validation=False
        )
        mean = torch.from_numpy(quality / quality.sum()) @ models[members]
        own = self._models[me].double()
        return (own + DELTA * (mean - own)).float()
