"""Text as sequences of letters: the user's own files, each the text of one user.

A text is cut into consecutive pieces of `length` letters; the label of a place is the letter that
follows it. Letters are numbered by an alphabet, those of the training text in sorted order, after a
blank that stands for unknown letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset, hold_out
from fedloom.data.formats import reason
from fedloom.data.options import Value, integer, number
from fedloom.errors import FedloomError
from fedloom.tasks import AUTO, NextToken

USER = "user"
ENDINGS = (".txt", ".text", ".md")
LENGTH = 64
_BLANK = "\ufffd"  # Unicode's replacement character
_MOST = 1000  # different letters: a table of more is hardly text by letters


def is_text(path: Path) -> bool:
    """Whether this is a file of text, or a folder with nothing but such files."""
    if path.is_file():
        return path.suffix.lower() in ENDINGS
    return path.is_dir() and bool(found := _there(path)) and all(map(is_text, found))


def _there(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.is_file())


def from_text(
    path: Path,
    *,
    length: Value = LENGTH,
    users: Value = "file",
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """A file of text, or a folder of them; each file is a user, or (`users=speaker`) each
    name that stands before paragraphs as NAME: in a line of its own."""
    files = [path] if path.is_file() else _there(path)
    texts = {file.stem: _read(file) for file in files}
    if users == "speaker":
        texts = _speakers(texts.values())
    elif users != "file":
        raise FedloomError(f"data_options.users={users} is not valid: give file or speaker.")
    return of_texts(path.stem, texts, length=length, test_share=test_share, seed=seed, task=task)


def of_texts(
    name: str,
    texts: Mapping[str, str],
    *,
    length: Value = LENGTH,
    test_share: Value = 0.2,
    seed: Value = 0,
    task: str = AUTO,
) -> Dataset:
    """The data set of these texts, by user: at every place, the letter that follows."""
    if task not in (AUTO, NextToken.name):
        raise FedloomError(
            f"task={task} needs labels, and '{name}' is text alone, for next-token. To classify "
            "texts, give a table with a label and data_options.text=COLUMN."
        )
    places = integer("length", length, low=1)
    alphabet = alphabet_of(texts.values())
    rows: list[npt.NDArray[np.int32]] = []
    users: list[str] = []
    for user, text in texts.items():
        letters = spelled([text], alphabet, len(text))[0]
        count = (len(letters) - 1) // places
        if count < 1:
            continue
        at = places * np.arange(count)[:, None] + np.arange(places + 1)
        rows.append(letters[at])
        users += [user] * count
    if not rows:
        raise FedloomError(
            f"No text of '{name}' is longer than {places} letters: give more, or a smaller "
            "data_options.length."
        )
    both = np.concatenate(rows)
    x, y = both[:, None, None, :-1], both[:, 1:].astype(np.int64)
    share, drawn = number("test_share", test_share), integer("seed", seed)
    x, follows = np.ascontiguousarray(x), NextToken(len(alphabet))
    made = hold_out(name, x, y, tuple(alphabet), share, drawn, True, follows)
    columns = {USER: np.array(users, dtype=object)}
    return replace(made, columns=columns, tokens=len(alphabet))


def alphabet_of(texts: Iterable[str]) -> str:
    """A blank, then the letters of the texts in sorted order."""
    found = sorted(set().union(*map(set, texts)) - {_BLANK})
    if len(found) > _MOST:
        raise FedloomError(
            f"There are {len(found)} different letters, more than the {_MOST} that text is read "
            "by letter with. Give text with fewer, or arrays of tokens of your own."
        )
    return _BLANK + "".join(found)


def spelled(texts: Sequence[str], alphabet: str, length: int) -> npt.NDArray[np.int32]:
    """Texts as numbers of letters, cut to a length or filled with blanks in front.

    >>> spelled(["ab", "c"], "?abc", 3).tolist()
    [[0, 1, 2], [0, 0, 3]]
    """
    number = {letter: i for i, letter in enumerate(alphabet)}
    out = np.zeros((len(texts), length), np.int32)
    for row, text in zip(out, texts, strict=True):
        letters = [number.get(letter, 0) for letter in text[:length]]
        if letters:
            row[-len(letters) :] = letters
    return out


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FedloomError(f"Cannot read {file}: {reason(error)}") from None


def speakers(text: str) -> dict[str, str]:
    """What each one says, in a play where a line NAME: comes before each speech."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        head, _, rest = block.strip().partition("\n")
        if head.endswith(":") and rest:
            said.setdefault(head[:-1].strip(), []).append(rest.strip())
    return {who: "\n".join(lines) + "\n" for who, lines in said.items()}


def _speakers(texts: Iterable[str]) -> dict[str, str]:
    found = speakers("\n\n".join(texts))
    if not found:
        raise FedloomError(
            "data_options.users=speaker needs paragraphs that begin with NAME: in a line of its "
            "own, and there are none."
        )
    return found
