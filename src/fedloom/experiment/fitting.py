"""Whether a method makes sense for a task: what needs classes is refused where there are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedloom.errors import FedloomError
from fedloom.local import LocalRule
from fedloom.method import Method
from fedloom.select import Select
from fedloom.tasks import Task


def check_task(name: str, method: Method, task: Task) -> None:
    """Refuse a method that can't learn this task, with the reason."""
    if task.by_class:
        return
    for why in _reasons(method, task):
        raise FedloomError(
            f"{name} can't learn this: it {why}, and {task.name} has no class for a sample. Choose "
            "another method or option."
        )
    if "accuracy" in method.mix.needs and not task.primary.share:
        raise FedloomError(
            f"{name} can't learn this: it weighs nodes by a score between 0 and 1, and "
            f"{task.name} is scored by {task.primary.called}. Choose p2p-fedavg or wafl."
        )
    if "exits" in method.select.model_options and task.answers(1, (1, 2, 2)) != (1, task.outputs):
        raise FedloomError(
            f"{name} can't learn this: it puts an output behind each block that answers once for a "
            f"sample, and {task.name} has an answer for every place. Choose another method."
        )


def same_task(names: Iterable[str]) -> str:
    """The task of all of these runs."""
    found = sorted(set(names))
    if len(found) > 1:
        raise FedloomError(
            f"These runs learn different tasks, {' and '.join(found)}: their scores can't stand in "
            "one table. Take data of one task at a time."
        )
    return found[0]


def _reasons(method: Method, task: Task) -> Iterator[str]:
    """What the parts of a method do with classes."""
    rules = [rule for rule in (method.local, method.own, method.adapt.rule) if rule is not None]
    parts: list[LocalRule | Select] = [*rules, method.select]
    for part in parts:
        if part.probabilities:
            yield part.probabilities
    if any("classes" in rule.needs for rule in rules):
        yield "masks the classes that a client does not hold (mask=none does without)"
    if "classes" in method.mix.needs:
        yield "counts rows class by class (by_class=false does without)"
    if "classes" in method.topology.needs:
        yield "draws clients by their classes"
    if method.newcomer.choice == "vote":
        yield "gives newcomers a vote of class probabilities"
