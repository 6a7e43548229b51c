"""A page in one file: sections with words, figures and tables, inline SVG and CSS, no script, nothing loaded from anywhere.

A content security policy forbids everything but the page's own style; whatever is not an `<svg>` made here is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import outrider


@dataclass(frozen=True)
class DataTable:
    """A table of text cells. numeric: columns set flush right. marked: rows that are pointed out, by number."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """One part of a page. svg: an element from `plots`, trusted. folded: tables shown on demand (and in no print)."""

    name: str
    heading: str
    source: str = ""
    text: Sequence[str] = ()
    svg: str = ""
    table: DataTable | None = None
    folded: Sequence[tuple[str, DataTable]] = ()


@dataclass(frozen=True)
class Page:
    """A whole page. command: how it was made, shown at its end."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    command: str


def render(page: Page) -> str:
    """The page as HTML: the same bytes for the same content, no date."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from outrider.report.plots import style_sheet

    environment = Environment(
        loader=PackageLoader("outrider.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["trusted"] = Markup
    template = environment.get_template("page.html")
    return template.render(page=page, colours=Markup(style_sheet(":root")), version=outrider.__version__)


def cell(value: float | None, digits: int = 4) -> str:
    """A number for a table: so many significant digits, a dash for none."""
    return "—" if value is None else f"{value:.{digits}g}"
