"""How the last process of a run ended, if not well: what it says in the run's folder, in words.

A process that fails leaves `error.json`; one that is killed can't, but its `.running` stays behind.
Whoever shows runs reads both, so nothing here may need more than the standard library and files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fedloom.experiment.checksums import Damaged, open_json, seal_json
from fedloom.files import atomic_file

FAILED, DIVERGED, KILLED = "failed", "diverged", "ended"
_LONGEST = 2000  # characters of a message


@dataclass(frozen=True)
class Ending:
    """`kind` is failed, diverged or, of a process that is gone without a word, ended."""

    kind: str
    round: int = 0
    message: str = ""

    @staticmethod
    def of(message: str, round: int, *, diverged: bool = False) -> Ending:
        """The message becomes one paragraph."""
        words = " ".join(message.split())
        short = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
        return Ending(DIVERGED if diverged else FAILED, round, short)

    @property
    def text(self) -> str:
        """
        >>> Ending("failed", 3, "ValueError: oops").text
        'failed in round 3: ValueError: oops'
        """
        if self.kind == KILLED:
            return "ended without a word (killed?)"
        where = f" in round {self.round}" if self.round else ""
        return f"{self.kind}{where}: {self.message.removeprefix('Training diverged: ')}"

    def write(self, file: Path) -> None:
        with atomic_file(file) as part:
            part.write_text(seal_json(asdict(self), ensure_ascii=False), encoding="utf-8")

    @staticmethod
    def read(file: Path) -> Ending | None:
        """What `write` left; nothing depends on it, so damage is only named."""
        try:
            found, _ = open_json(file.read_text(encoding="utf-8"))
            right = {"kind": str, "round": int, "message": str}
            if found.keys() != right.keys() or found["kind"] not in (FAILED, DIVERGED):
                raise Damaged("it does not say how the run ended")
            if not all(isinstance(found[key], kind) for key, kind in right.items()):
                raise Damaged("it does not say how the run ended")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:  # damage is a ValueError
            return Ending(FAILED, 0, f"why is not known, {file.name} is damaged ({e})")
        return Ending(**found)
