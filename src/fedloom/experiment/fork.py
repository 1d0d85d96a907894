"""A run that starts from another run's checkpoint, with other settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import FedloomError
from fedloom.experiment.settings import Config
from fedloom.experiment.store import DamagedFile, RunStore

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.experiment.setup import Experiment


@dataclass(frozen=True, eq=False)
class Origin:
    """The run to start from, and one of its checkpoints."""

    store: RunStore
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    @staticmethod
    def find(spec: str) -> Origin:
        """`RUN` for its newest checkpoint, `RUN@ROUND` for that of a round."""
        path, at, number = spec.rpartition("@")
        named = bool(at) and number.isdigit() and not Path(spec).exists()
        store = RunStore.open(Path(path if named else spec))
        tensors, about = store.checkpoint(int(number) if named else None)
        try:
            config = store.config()
        except DamagedFile as e:
            if "settings" not in about:
                raise
            config = about["settings"]
            warnings.warn(
                f"{e.what}. The fork starts with the settings that the checkpoint was made with; "
                "rounds and what concerns only speed or scoring have their defaults unless given.",
                stacklevel=2,
            )
        return Origin(store, {k: v for k, v in config.items() if k != "fork"}, tensors, about)

    @property
    def round(self) -> int:
        return int(self.about["round"])

    @property
    def name(self) -> str:
        return f"{self.store.path}@{self.round}"

    def check_length(self, config: Config) -> None:
        if config.rounds <= self.round:
            raise FedloomError(
                f"'{self.store.path}' has {self.round} rounds already, so {config.rounds} rounds "
                "leave nothing to do. Rounds are counted from its first one: give --rounds "
                f"above {self.round}."
            )

    def start(self, store: RunStore, experiment: Experiment) -> int:
        """Make this the beginning of the run in `store`; the round after which it goes on."""
        store.inherit(self.store, self.round)
        store.add_checkpoint(self.round, experiment.state.tensors(), experiment.about)
        return self.round
