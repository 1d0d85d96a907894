"""Per-client scores of classes with S1's definitions, and the summaries of any task's.

Those of classes are computed from confusion matrices (true × predicted) and summed losses, for all
clients at once. A wrong prediction of a class that the client does not hold is first moved to a
class that it does hold and that is wrong for that sample (S1 appendix B), so that precision, recall
and F1 are taken over the client's own classes while the number of errors stays the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from fedloom.tasks import CLASSES, LOSS, Task


def move_foreign_errors(confusion: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """Move wrong predictions of classes not held to held classes that are wrong too.

    Which one, where there are several: the errors (y → p) go to the held classes after y in turn,
    counted by p; a client with a single class has no such class, and its errors stay.

    >>> y, p = [7, 7, 7, 7, 8, 8, 8, 8], [7, 7, 7, 0, 8, 8, 8, 1]
    >>> matrix = np.zeros((1, 9, 9), int); np.add.at(matrix[0], (y, p), 1)
    >>> move_foreign_errors(matrix, np.isin(np.arange(9), [7, 8])[None])[0, 7:, 7:].tolist()
    [[3, 1], [1, 3]]
    """
    moved = confusion.copy()
    for k in np.flatnonzero((confusion * ~holds[:, None, :]).any((1, 2)) & (holds.sum(1) > 1)):
        held = np.flatnonzero(holds[k])
        for y, p in np.argwhere(confusion[k] * ~holds[k][None, :]):
            if y == p:
                continue
            wrong = np.concatenate([held[held > y], held[held < y]])
            target = wrong[p % len(wrong)]
            moved[k, y, target] += moved[k, y, p]
            moved[k, y, p] = 0
    return moved


def client_scores(confusion: np.ndarray, loss: np.ndarray, holds: np.ndarray) -> pd.DataFrame:
    """One row per client: samples, correct, accuracy, loss, precision, recall, F1, of classes.

    Precision, recall and F1 are means over the classes that occur in the scored data; a class
    that is never predicted has precision 0. A client with nothing to score gets NaN.
    """
    samples = confusion.sum((1, 2))
    correct = np.trace(confusion, axis1=1, axis2=2)
    own = move_foreign_errors(confusion, holds)
    hits = np.diagonal(own, axis1=1, axis2=2).astype(float)
    true, guessed = own.sum(2), own.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(guessed > 0, hits / guessed, 0.0)
        recall = hits / true
        f1 = np.where(hits > 0, 2 * precision * recall / (precision + recall), 0.0)
        present = true > 0
        count = present.sum(1)

        def mean(values: np.ndarray) -> np.ndarray:
            return np.where(present, values, 0.0).sum(1) / count

        return pd.DataFrame(
            {
                "samples": samples,
                "correct": correct,
                "accuracy": correct / samples,
                "loss": loss / samples,
                "precision": mean(precision),
                "recall": mean(recall),
                "f1": mean(f1),
            }
        )


def summarise(table: pd.DataFrame, task: Task = CLASSES) -> dict[str, Any]:
    """Micro and macro scores over clients by the task's first measure, their spread, the tails, and
    each capacity group; where some are weak, the mean score with the sub-model that each can hold
    (`capacity_accuracy`, with the measure's name).

    `micro` counts every sample alike, `macro` every client; `worst10` and `best10` are the mean of
    the ⌈10 %⌉ of clients that are worst and best off; `majority` is what always guessing a client's
    largest class would score (micro); names with `before_` are of models before they were adapted.
    Of other measures there is the mean and spread over clients for whom they are defined.
    """
    scored = table[table["samples"] > 0]
    if scored.empty:
        return {}
    out = _summary(scored, task)
    first = task.primary.name
    if "majority" in scored:
        out["majority"] = float(np.average(scored["majority"], weights=scored["samples"]))
    if f"{first}_before" in scored:
        names = kept_before(task)
        before = scored[["samples"]].join(
            scored[[f"{name}_before" for name in names]].set_axis(names, axis=1)
        )
        found = _summary(before, task)
        out |= {f"before_{name}": value for name, value in found.items() if name != "clients"}
    held = f"capacity_{first}"
    if held in scored:
        out[held] = float(scored[held].mean())
    if "capacity" in scored and scored["capacity"].nunique() > 1:
        groups = scored.groupby("capacity")
        out["groups"] = {
            f"{capacity:g}": {
                "clients": len(group),
                "micro": _micro(group, task),
                "macro": float(group[first].mean()),
                "std": float(group[first].std(ddof=0)),
                **({held: float(group[held].mean())} if held in scored else {}),
            }
            for capacity, group in groups
        }
    return out


def kept_before(task: Task) -> list[str]:
    """The columns that are told of models before they adapt, too."""
    counts = ["correct"] if task.by_class else []
    return [*counts, *(measure.name for measure in (*task.measures, LOSS))]


def _micro(scored: pd.DataFrame, task: Task) -> float:
    """The first measure with all samples counted alike."""
    if task.by_class:
        return float(scored["correct"].sum() / scored["samples"].sum())
    known = scored[scored[task.primary.name].notna()]
    if known.empty:
        return float("nan")
    return float(np.average(known[task.primary.name], weights=known["samples"]))


def _summary(scored: pd.DataFrame, task: Task) -> dict[str, Any]:
    first = task.primary
    ordered = np.sort(scored[first.name].dropna().to_numpy())[:: first.sign]  # the worst first
    if not len(ordered):
        return {}
    tail = math.ceil(len(ordered) / 10)
    out: dict[str, Any] = {
        "clients": len(scored),
        "micro": _micro(scored, task),
        "macro": float(ordered.mean()),
        "std": float(ordered.std()),
        "worst10": float(ordered[:tail].mean()),
        "best10": float(ordered[-tail:].mean()),
    }
    for measure in (LOSS, *task.measures[1:]):
        values = scored[measure.name].to_numpy()
        if measure is not LOSS:  # which is always defined: one that is NaN must be seen
            values = values[~np.isnan(values)]
        if len(values):
            out[measure.name] = float(values.mean())
            out[f"{measure.name}_std"] = float(values.std())
    return out
