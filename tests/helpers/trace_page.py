"""A trace page as a browser would read it, and results by hand to make pages of."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from outrider.models.transformers_model import TransformersModel
from outrider.records import Round, summarise
from outrider.results import Result

PROMPT = "the quick brown fox jumps over the quick brown"


@dataclass
class Element:
    """What a test asks of an HTML element: its class names, its attributes, the text inside."""

    tag: str
    attributes: dict[str, str]
    text: str = ""

    @property
    def kinds(self) -> list[str]:
        return self.attributes.get("class", "").split()


@dataclass
class Page(HTMLParser):
    """A page as a browser would read it."""

    elements: list[Element] = field(default_factory=list)
    text: str = ""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.text = [], ""
        self._open: list[Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "input"):  # these have no end
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data
        for element in self._open:
            element.text += data

    def having(self, kind: str, tag: str | None = None) -> list[Element]:
        return [e for e in self.elements if kind in e.kinds and tag in (None, e.tag)]

    @property
    def tokens(self) -> list[Element]:
        """The tokens of the text, kept (span) and withdrawn (del)."""
        return [e for e in self.having("t") if "data-tip" in e.attributes]


def hand_made(target: TransformersModel, prompt: str, new: list[int], **known: Any) -> Result:
    """A result with these tokens, all from the target."""
    rounds = [Round((token,), 0, 0, None, {"verify": 0.01, "sampling": 0.001}, **known) for token in new]
    count = len(target.tokenizer.encode(prompt))
    return Result("", new, "length", 0, summarise(rounds), rounds, count)
