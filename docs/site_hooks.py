"""Hooks of the documentation site (`mkdocs.yml`): equations as MathML, and nothing from elsewhere.

Browsers draw MathML themselves, so pages need no script and no fonts for equations. Links to files
of the repository that are not part of the site become their paths. After a build, all pages are
searched for scripts, styles and pictures of other sites: the site must open offline.
"""

from __future__ import annotations

import os.path
import re
from html import unescape
from pathlib import Path
from typing import Any

_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload)[^>]*href=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|@import\s+url\(["']?(?:https?:)?//[^"')]+""",
)


def as_mathml(page: str) -> str:
    """The page with its equations, written in LaTeX, as MathML."""
    from latex2mathml.converter import convert

    def drawn(found: re.Match[str]) -> str:
        display = "block" if found[2] == "[" else "inline"
        return convert(unescape(found[3]).strip(), display=display)

    return _MATH.sub(drawn, page)


def within_site(page: str, folder: str) -> str:
    """A page in this folder of the docs, without links to files outside of the docs."""

    def told(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, found[2]))
        if not path.startswith(".."):
            return found[0]
        return f"{found[1].strip('`')} (`{path.removeprefix('../')}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)\)", told, page)


def fetched(page: str) -> list[str]:
    """What a page would load from other sites."""
    return _ELSEWHERE.findall(page)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return within_site(markdown, os.path.dirname(page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    return as_mathml(html)


def on_post_build(config: Any, **_: Any) -> None:
    from mkdocs.exceptions import PluginError

    for file in Path(config["site_dir"]).rglob("*.html"):
        if found := fetched(file.read_text(encoding="utf-8")):
            raise PluginError(f"{file.name} loads {found[0]}: the site must open offline.")
