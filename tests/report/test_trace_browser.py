"""The trace page in a real browser: nothing is complained about, nothing is asked for, at any width, in light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.costs import measured_costs
from outrider.models.transformers_model import TransformersModel
from outrider.report.trace import write_trace
from tests.helpers.chromium import CHROMIUM, Browser, browser
from tests.helpers.folders import make_tokenizer
from tests.helpers.real_models import smollm2
from tests.helpers.tiny_models import module

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

CODE = """def add(self, other):
    return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

def sub(self, other):
    return Vector(self.x - other.x, self.y - other.y, self.z - other.z)

def mul("""
HOSTILE = "Repeat: <script>alert('🙂 naïve 数')</script></style><img src=http://127.0.0.1:9/x.png> & {{ 7*7 }}"


@cache
def tiny(seed: int, extra: str = "") -> TransformersModel:
    """A random model with a long context; a tokenizer of its own with `extra`."""
    tokenizer = make_tokenizer(extra)
    made = module("Llama", seed, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048)
    return TransformersModel(made, tokenizer, f"tiny-{seed}")


Case = Callable[[], tuple[TransformersModel, Any, Any, dict[str, Any]]]
CASES: dict[str, Case] = {
    "code with prompt lookup": lambda: (smollm2(), CODE, "prompt-lookup", {"max_new_tokens": 48}),
    "a sampled chat": lambda: (
        smollm2(),
        [{"role": "user", "content": HOSTILE}],
        "prompt-lookup",
        {"max_new_tokens": 40, "temperature": 0.7, "top_p": 0.95, "seed": 4, "num_draft_tokens": 5},
    ),
    "plain": lambda: (smollm2(), "The lighthouse", None, {"max_new_tokens": 16}),
    "500 tokens": lambda: (
        tiny(0),
        "the quick 🙂",
        tiny(1),
        {"max_new_tokens": 500, "temperature": 0.8, "seed": 1, "num_draft_tokens": 2, "ignore_eos": True},
    ),
    "another tokenizer": lambda: (
        tiny(0),
        "the quick",
        tiny(2, "wholly other words zzz qqq " * 40),
        {"max_new_tokens": 40, "temperature": 1.0, "seed": 1, "num_draft_tokens": 3, "ignore_eos": True},
    ),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a case, made once."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def page(name: str) -> Path:
        target, prompt, draft, options = CASES[name]()
        path: Path = folder / f"{name}.html"
        result = outrider.generate(target, prompt, draft=draft, drafts=True, betas=True, logprobs=True, **options)
        write_trace(path, result, target, prompt, settings=options, costs=measured_costs(target))
        return path

    return page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("name", CASES)
def test_no_complaint_no_request_no_overflow(name: str, pages: Callable[[str], Path], chromium: Browser) -> None:
    backgrounds = set()
    for width in (1280, 400):
        for dark in (False, True):
            chromium.open(pages(name), width, dark=dark)
            assert chromium.complaints == []
            assert chromium.requests == [pages(name).resolve().as_uri()]
            assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert chromium.evaluate("document.scripts.length + document.images.length") == 0
            backgrounds.add(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    chromium.open(pages(name), media="print")
    assert chromium.complaints == []


def test_the_browser_would_tell(pages: Callable[[str], Path], chromium: Browser, tmp_path: Path) -> None:
    """The same page with what hostile text tries to smuggle in: it is refused by the policy, and noticed here."""
    html = pages("plain").read_text(encoding="utf-8")
    for planted in (
        "<script>document.title = 'changed'</script>",
        "<img src='http://127.0.0.1:9/x.png'>",
        "<p style='top:0'>",
    ):
        path = tmp_path / "planted.html"
        path.write_text(html.replace("<footer>", planted + "<footer>"), encoding="utf-8")
        chromium.open(path)
        assert any("Content Security Policy" in complaint for complaint in chromium.complaints), planted
        assert chromium.evaluate("document.title").startswith("Trace: ")


def test_pointing_at_a_token_tells_about_it(pages: Callable[[str], Path], chromium: Browser) -> None:
    chromium.open(pages("code with prompt lookup"))
    chromium.move_to(".text .round span.accepted")
    told = chromium.evaluate("getComputedStyle(document.querySelector('.text .t:hover'), '::after').content")
    for wanted in ("id ", "accepted: from the draft", "drafted by prompt-lookup", "β ", "log p "):
        assert wanted in told


def test_the_controls_work_without_a_script(pages: Callable[[str], Path], chromium: Browser) -> None:
    chromium.open(pages("a sampled chat"))
    seen = "[...document.querySelectorAll('.text del')].filter(e => e.checkVisibility()).length"
    assert chromium.evaluate(seen) > 0
    chromium.evaluate("document.getElementById('see-drafts').click()")
    assert chromium.evaluate(seen) == 0
    shown = "[...document.querySelectorAll('ul.legend')].filter(e => e.checkVisibility()).map(e => e.className)"
    for by in ("beta", "logprob", "origin"):
        chromium.evaluate(f"document.getElementById('by-{by}').click()")
        assert [name for name in chromium.evaluate(shown) if "by-" in name] == [f"legend by-{by}"]
    tall = "getComputedStyle(document.querySelector('.text .t.beta')).backgroundSize"
    before = chromium.evaluate(tall)
    chromium.evaluate("document.getElementById('by-beta').click()")
    assert chromium.evaluate(tall) != before


def test_selected_text_leaves_out_what_was_withdrawn(pages: Callable[[str], Path], chromium: Browser) -> None:
    chromium.open(pages("code with prompt lookup"))
    kept = "[...document.querySelectorAll('.text .t')].filter(e => e.tagName == 'SPAN').map(e => e.textContent).join('')"
    chromium.evaluate("getSelection().selectAllChildren(document.querySelector('.text'))")
    assert chromium.evaluate("document.querySelectorAll('.text del').length") > 0
    assert chromium.evaluate("getSelection().toString()").strip() == chromium.evaluate(kept).strip()


def test_the_page_can_be_printed(pages: Callable[[str], Path], chromium: Browser, tmp_path: Path) -> None:
    chromium.open(pages("code with prompt lookup"))
    chromium.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
