"""Tables for papers, with the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence


def escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def number(text: str) -> str:
    """Mean ± std as TeX."""
    return text.replace("±", r"$\pm$").replace("–", "--")


def framed(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A tabular of cells that are TeX already, the first `left` columns being text."""
    lines = [r"\begin{tabular}{" + "l" * left + "r" * (len(heads) - left) + "}", r"\toprule",
             " & ".join(map(escaped, heads)) + r" \\", r"\midrule"]  # fmt: skip
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def tabular(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, lower: bool = False
) -> str:
    """Rows of text; of each column of numbers, the highest mean is bold, or the lowest.

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
    sign = -1 if lower else 1
    means = [[_mean(row[i], sign) for row in rows] for i in range(left, len(heads))]
    best = [max(column, default=float("-inf")) for column in means]
    made = []
    for row in rows:
        cells = [number(escaped(text)) for text in row[:left]]
        for text, top in zip(row[left:], best, strict=True):
            bold = _mean(text, sign) == top and top > float("-inf") and len(rows) > 1
            cells.append(rf"\textbf{{{number(text)}}}" if bold else number(text))
        made.append(cells)
    return framed(heads, made, left)


def _mean(text: str, sign: int) -> float:
    try:
        return sign * float(text.partition(" ")[0])
    except ValueError:
        return float("-inf")
