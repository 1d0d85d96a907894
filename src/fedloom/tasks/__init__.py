"""Tasks: what is learned, how it is scored, and what a label is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.errors import unknown
from fedloom.tasks.base import LOSS, Kept, Loss, Sums, Task
from fedloom.tasks.classes import Binary, Classification
from fedloom.tasks.labels import MultiLabel
from fedloom.tasks.maps import Segmentation
from fedloom.tasks.measure import Measure
from fedloom.tasks.tokens import NextToken
from fedloom.tasks.values import Regression

__all__ = ["AUTO", "CLASSES", "LOSS", "TASKS", "Binary", "Classification", "Kept", "Loss",
           "Measure", "MultiLabel", "NextToken", "Regression", "Segmentation", "Sums", "Task",
           "check", "kind", "task_of"]  # fmt: skip

TASKS: dict[str, type[Task]] = {
    cls.name: cls
    for cls in (Classification, Binary, MultiLabel, Regression, NextToken, Segmentation)
}
AUTO = "auto"
#: the task of a batch that names none
CLASSES = Classification(0)


def check(name: str) -> str:
    """A task's name, as a setting."""
    if name != AUTO and name not in TASKS:
        raise unknown("task", name, (AUTO, *TASKS))
    return name


def kind(name: str) -> type[Task]:
    """The task of this name."""
    check(name)
    return TASKS[name]


def task_of(plain: Mapping[str, Any]) -> Task:
    """The task that a checkpoint speaks of (`Task.plain`)."""
    words: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in plain.items() if k != "name"
    }
    return TASKS[plain["name"]](**words)
