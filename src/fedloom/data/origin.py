"""Where a row of a table stands in its file, as the user finds it there.

Only errors ask for this, so the file is read a second time for it. It knows nothing of what is in
the rows.
"""

from __future__ import annotations

import csv
import gzip
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Origin:
    """A file and its number of rows; `sign` separates the cells of a line ("": it has no lines)."""

    file: Path
    rows: int
    sign: str = ""

    def place(self, row: int) -> str:
        """A row (from 0, below the header) in words."""
        return f"line {self._line(row)}" if self.sign else f"row {row} (from 0)"

    def _line(self, row: int) -> int:
        """Where a row begins: lines may be blank, and cells in quotes may have several."""
        with self._opened() as content, suppress(csv.Error):  # a cell may be too long for it
            records = csv.reader(content, delimiter=self.sign)
            count, begins = -1, 1  # the first record is the header
            for cells in records:
                if any(cell.strip() for cell in cells) or len(cells) > 1:
                    if count == row:
                        return begins
                    count += 1
                begins = records.line_num + 1
        return row + 2

    def _opened(self) -> IO[str]:
        if self.file.suffix == ".gz":
            return gzip.open(self.file, "rt", encoding="utf-8", newline="")
        return self.file.open(encoding="utf-8", newline="")
