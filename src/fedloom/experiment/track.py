"""Rounds as scalars where tracking tools look for them: TensorBoard, MLflow, Weights & Biases.

A tracker is a watcher like a progress bar. It asks the tool which rounds it has and takes missing
ones from the run's own records, so that a resumed run continues its curves without gaps or repeated
steps, and a finished run can be tracked later.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from fedloom.errors import FedloomError, unknown
from fedloom.experiment.settings import Config
from fedloom.experiment.store import RunStore
from fedloom.files import atomic_file, locked, state_folder

PROJECT = "fedloom"  # where MLflow and W&B put runs, unless their own variables say otherwise
_EVERY_ROUND = "train_loss"  # a scalar that every round has


class Tracker(ABC):
    """Writes the numbers of every round, under the names that `Result.rounds` gives them."""

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()
    look: ClassVar[str]  # the command that shows it

    def __init__(self, store: RunStore, config: Config, mode: str = "") -> None:
        self.store, self.mode = store, mode
        self.settings = {key: v for key, v in config.model_dump().items() if v is not None}
        self.folder = store.tracking
        self._last, self._rounds, self._lost = 0, config.rounds, False

    def start(self, name: str, rounds: int, done: int) -> None:
        self._rounds, self._lost = rounds, False
        self.folder.mkdir(exist_ok=True)
        try:
            self._last = self.open(name)
        except FedloomError:
            raise
        except Exception as e:
            raise FedloomError(
                f"--track {self.name} can't begin: {_first_line(e)} The run itself is "
                "unaffected; fix that, or leave --track out."
            ) from e
        for record in self.store.rounds() if done > self._last else ():
            if record["round"] <= done:
                self.round(record)

    def round(self, record: dict[str, Any]) -> None:
        t = int(record["round"])
        if self._lost or t <= self._last:
            return
        try:
            self.write(t, scalars(record))
        except Exception as e:  # hours of training are worth more than their curve
            self._lost = True
            warnings.warn(
                f"Tracking by {self.name} stopped in round {t}: {_first_line(e)} The run "
                "continues. Missing rounds are filled in when it is resumed: fedloom run "
                f"--resume --out {self.store.path}.",
                stacklevel=2,
            )
            return
        self._last = t

    def end(self) -> None:
        try:
            self.close(finished=self._last >= self._rounds)
        except Exception as e:
            warnings.warn(f"{self.name} could not be closed: {_first_line(e)}", stacklevel=2)

    @abstractmethod
    def open(self, name: str) -> int:
        """Start the tracked run or continue it; returns the last round that it has."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None: ...

    @abstractmethod
    def close(self, *, finished: bool) -> None: ...

    def remember(self, **words: Any) -> None:
        """What has to be known to go on with the tracked run."""
        with atomic_file(self._memory) as part:
            part.write_text(json.dumps(words), encoding="utf-8")

    def remembered(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    @property
    def _memory(self) -> Path:
        return self.folder / f"{self.name}.json"


class TensorBoard(Tracker):
    """Event files in the run's directory: `tensorboard --logdir runs`."""

    name, look = "tensorboard", "tensorboard --logdir {run}"

    def open(self, name: str) -> int:
        from torch.utils.tensorboard import SummaryWriter

        there = self._steps()
        # The last step may be half written: what it has is dropped, and it is written again.
        again = max(there, default=None)
        self._writer = SummaryWriter(str(self.folder), purge_step=again)
        if again is None:
            text = "\n".join(f"    {key}: {value}" for key, value in self.settings.items())
            self._writer.add_text("settings", text)
        return 0 if again is None else again - 1

    def _steps(self) -> list[int]:
        if not any(self.folder.glob("events.*")):
            return []
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        # As written: dropping the steps that an earlier resume wrote again would be a warning.
        events = EventAccumulator(
            str(self.folder), size_guidance={"scalars": 0}, purge_orphaned_data=False
        )
        events.Reload()
        if _EVERY_ROUND not in events.Tags()["scalars"]:
            return []
        return [event.step for event in events.Scalars(_EVERY_ROUND)]

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow, on the server that MLFLOW_TRACKING_URI names or in its local store."""

    name, look = "mlflow", "mlflow ui"

    def open(self, name: str) -> int:
        # Two processes at once would both make the tables of a store that is new.
        with locked(state_folder() / "mlflow.lock"):
            return self._open(name)

    def _open(self, name: str) -> int:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        known = self.remembered()
        uri = None if os.environ.get("MLFLOW_TRACKING_URI") else known.get("tracking_uri")
        self._client = MlflowClient(tracking_uri=uri)
        if "run_id" in known:
            self._run = known["run_id"]
            try:
                history = self._client.get_metric_history(self._run, _EVERY_ROUND)
                self._client.update_run(self._run, status="RUNNING")
                return max((metric.step for metric in history), default=0)
            except MlflowException:
                warnings.warn(
                    f"MLflow has no run {self._run} at {self._client.tracking_uri}: a new one is "
                    "started, with all rounds.",
                    stacklevel=3,
                )
        tags = {"mlflow.runName": name, "folder": str(self.store.path.resolve())}
        self._run = self._client.create_run(self._experiment(), tags=tags).info.run_id
        for key, value in self.settings.items():
            self._client.log_param(self._run, key, str(value)[:500])
        self.remember(run_id=self._run, tracking_uri=self._client.tracking_uri)
        return 0

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has just made it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


class WandB(Tracker):
    """A run of Weights & Biases; offline, in the run's directory, to be sent with `wandb sync`."""

    name, modes = "wandb", ("offline",)
    look = "wandb sync {run}/tracking/wandb/offline-run-*"

    def open(self, name: str) -> int:
        import wandb

        known = self.remembered()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), id=known.get("id"), name=name,
                group=self.store.path.resolve().parent.name, dir=str(self.folder),
                config=self.settings, resume="allow", reinit="create_new",
                mode="offline" if self.mode == "offline" else None,
                settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip
        except (wandb.errors.UsageError, wandb.errors.CommError) as e:
            raise FedloomError(
                f"Weights & Biases can't be reached: {_first_line(e)} Log in (wandb login), or "
                "track without its service: --track wandb:offline."
            ) from None
        self.remember(id=self._run.id, round=known.get("round", 0))
        return int(known.get("round", 0))

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)
        self.remember(id=self._run.id, round=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, type[Tracker]] = {cls.name: cls for cls in (TensorBoard, MLflow, WandB)}


def parse(text: str) -> tuple[type[Tracker], str]:
    """`tensorboard`, `mlflow`, `wandb` or `wandb:offline`."""
    name, _, mode = text.partition(":")
    if name not in TRACKERS or (mode and mode not in TRACKERS[name].modes) or text.endswith(":"):
        words = [f"{n}:{m}" for n, cls in TRACKERS.items() for m in cls.modes]
        raise unknown("tracker", text, [*TRACKERS, *words])
    return TRACKERS[name], mode


def check(track: str | None) -> None:
    """Refuse a tracker whose package is not here, before any work."""
    if track is None:
        return
    tracker, _ = parse(track)
    if importlib.util.find_spec(tracker.name) is None:
        raise FedloomError(
            f"--track {tracker.name} needs a package that is not installed: "
            f"pip install 'fedloom[{tracker.name}]'."
        )


def looked_at(track: str, run: Path) -> str:
    """How to see what was tracked."""
    tracker, mode = parse(track)
    online = tracker.modes and not mode
    return "in your workspace" if online else tracker.look.format(run=run)


def trackers(config: Config, store: RunStore) -> list[Tracker]:
    """The watcher that the run's settings ask for, if they do."""
    if config.track is None:
        return []
    tracker, mode = parse(config.track)
    return [tracker(store, config, mode)]


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a round's record, under the names of `Result.rounds`."""
    from fedloom.experiment.result import flat

    return {
        key: float(value)
        for key, value in flat(record).items()
        if key != "round"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def _first_line(error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split("\n")[0].split())
    return text if text.endswith((".", "!", "?")) else f"{text}."
