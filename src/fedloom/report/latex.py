"""Tables for papers, with the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedloom.report.marks import bests


def escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def number(text: str) -> str:
    """Mean ± std as TeX."""
    return text.replace("±", r"$\pm$").replace("–", "--")


def bold(text: str, best: bool) -> str:
    """A cell of numbers as TeX, bold if it is the best of its column."""
    return rf"\textbf{{{number(text)}}}" if best else number(text)


def framed(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A tabular of cells that are TeX already, the first `left` columns being text."""
    lines = [r"\begin{tabular}{" + "l" * left + "r" * (len(heads) - left) + "}", r"\toprule",
             " & ".join(map(escaped, heads)) + r" \\", r"\midrule"]  # fmt: skip
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def tabular(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, lower: bool = False
) -> str:
    """Rows of text; of each column of numbers, the highest mean is bold, or the lowest (`bests`).

    >>> print(tabular(["m", "score (%)"], [["a", "1.5 ± 0.1"], ["b", "2.5 ± 0.2"]]))
    \\begin{tabular}{lr}
    \\toprule
    m & score (\\%) \\\\
    \\midrule
    a & 1.5 $\\pm$ 0.1 \\\\
    b & \\textbf{2.5 $\\pm$ 0.2} \\\\
    \\bottomrule
    \\end{tabular}
    """
    marks = [bests([row[i] for row in rows], lower) for i in range(left, len(heads))]
    made = []
    for row, best in zip(rows, zip(*marks, strict=True), strict=True):
        cells = [number(escaped(text)) for text in row[:left]]
        made.append(cells + [bold(text, b) for text, b in zip(row[left:], best, strict=True)])
    return framed(heads, made, left)
