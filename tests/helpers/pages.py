"""Pages checked as a browser would: what is closed, nothing that loads."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checker(HTMLParser):
    """Well-formed, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src", "srcset", "action", "data"):
                self.references.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> Checker:
    """Nothing is loaded, run, or left open; every id is there once and every reference leads to one."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert not {"script", "iframe", "object", "embed", "img", "base", "form"} & set(checker.tags)
    assert checker.handlers == []
    assert all(reference == "data:," or reference.startswith("#") for reference in checker.references)
    assert len(checker.ids) == len(set(checker.ids))
    used = [reference[1:] for reference in checker.references if reference.startswith("#")]
    used += re.findall(r"url\(#([^)]+)\)", html)
    assert set(used) <= set(checker.ids)
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    return checker
