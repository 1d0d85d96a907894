"""A report as one self-contained HTML page: table, picture, and the settings that made it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
img { max-width: 100%; }
details td { text-align: left; font-family: ui-monospace, monospace; font-size: 13px; }
"""


def comparison_page(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    config: Mapping[str, Any],
    picture: Path,
    remarks: str,
    by_method: Mapping[str, Mapping[str, Sequence[str]]],
) -> str:
    """The page of a comparison; `config` is the first method's, `by_method` are remarks on methods
    under headings."""
    image = base64.b64encode(picture.read_bytes()).decode()
    shared = {k: v for k, v in config.items() if k not in ("method", "params", "seed")}
    about = (
        f"{config['data']}, {config['clients']} clients, partition {config['partition']}, "
        f"{config['rounds']} rounds"
    )
    settings = table(("setting", "value"), [(k, str(v)) for k, v in shared.items()])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fedloom comparison</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>Comparison</h1><p>{escape(about)}.
{escape(remarks)}</p>
{table(heads, rows)}
{"".join(_list(heading, found) for heading, found in by_method.items())}
<img alt="Accuracy over rounds" src="data:image/png;base64,{image}">
<details><summary>Settings of {escape(str(rows[0][0]))}</summary>{settings}</details></body></html>
"""


def _list(heading: str, found: Mapping[str, Sequence[str]]) -> str:
    items = "".join(
        f"<li><b>{escape(method)}</b>: {escape('; '.join(words))}</li>"
        for method, words in found.items()
    )
    return f"<p>{escape(heading)}:</p><ul>{items}</ul>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
