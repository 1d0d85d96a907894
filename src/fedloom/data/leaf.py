"""LEAF's files: JSON with the samples of every user (https://leaf.cmu.edu).

FEMNIST has pictures of 28 x 28 numbers, Shakespeare lines of text and the letter that follows,
others rows of numbers. The column `user` says whose a sample is, for `--partition by:user`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.data.formats import reason
from fedloom.data.options import Value, sizes
from fedloom.data.raw import Raw
from fedloom.errors import FedloomError
from fedloom.tasks import AUTO, NextToken

USER = "user"
# LEAF's own alphabet, so that letters have the numbers that its models know them by.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_PICTURE = 784


def read(
    path: Path, shape: Value | None, test_share: Value, seed: Value, task: str = AUTO
) -> Dataset:
    """The data set in a file or folder of LEAF's."""
    train = path / "train" if _files(path / "train") else path
    parts = [_content(file) for file in ([train] if train.is_file() else _files(train))]
    parts += [_content(file).as_test() for file in _files(path / "test") if train != path]
    raw = Raw.joined(parts)
    x = raw["x"]
    if isinstance(x[0], str):
        return _text(path, raw, shape, test_share, seed, task)
    wide = {len(row) for row in x if isinstance(row, list)}
    if len(wide) != 1 or not all(isinstance(v, int | float) for v in x[0]):
        raise FedloomError(
            f"{path} has samples that are neither text nor rows of as many numbers. Of LEAF's "
            "data, FEMNIST, Shakespeare and Synthetic are read; make arrays of the others (.npz)."
        )
    array = np.array(x, np.float32)
    if shape is not None or wide == {_PICTURE}:
        array = array.reshape(-1, *sizes("shape", "1x28x28" if shape is None else shape, 3))
    raw.columns["x"] = array
    return raw.dataset(path.stem, user=USER, test_share=test_share, seed=seed, task=task)


def _text(
    path: Path, raw: Raw, shape: Value | None, test_share: Value, seed: Value, task: str
) -> Dataset:
    """Letters as their numbers in the alphabet, those to predict too: the one that follows a line
    is its class or, for next-token, there is one to predict at every place."""
    if shape is not None:
        raise FedloomError(f"{path} holds text, which has no shape. Leave shape out.")
    lines, follow = raw["x"], [str(y) for y in raw["y"]]
    lengths = {len(line) for line in lines}
    if len(lengths) > 1 or any(len(y) != 1 for y in follow):
        raise FedloomError(
            f"{path} must hold lines of one length, each with the one letter that follows."
        )
    others = sorted({*"".join(lines), *follow} - set(LETTERS))
    alphabet = LETTERS + "".join(others)
    number = {letter: i for i, letter in enumerate(alphabet)}
    x = np.array([[number[letter] for letter in line] for line in lines], np.int32)
    y = np.array([number[y] for y in follow])
    if task == NextToken.name:
        y = np.concatenate([x[:, 1:], y[:, None]], axis=1)
    raw.columns |= {"x": x, "y": y}
    raw.classes["y"] = tuple(alphabet)
    raw.alphabet = alphabet
    return raw.dataset(
        path.stem, user=USER, features="x", label="y", test_share=test_share, seed=seed, task=task
    )


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _content(file: Path) -> Raw:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedloomError(f"Cannot read {file}: {reason(error)}") from None
    held = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(held, dict) or not held:
        raise FedloomError(
            f"{file} is not one of LEAF's files: it must have user_data, x and y of every user."
        )
    x: list[Any] = []
    y: list[Any] = []
    user: list[str] = []
    for name in content.get("users", held):
        mine = held.get(name)
        if not isinstance(mine, dict) or len(mine.get("x", ())) != len(mine.get("y", (0,))):
            raise FedloomError(f"{file}: user {name} must have x and y, as many of both.")
        x += mine["x"]
        y += mine["y"]
        user += [name] * len(mine["y"])
    if not x:
        raise FedloomError(f"{file} has no samples.")
    return Raw.of({"x": x, "y": y, USER: np.array(user, dtype=object)})
