"""The trace page: it shows what the rounds did, whatever the text is made of, and asks for nothing else."""

from __future__ import annotations

import base64
import errno
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.costs import Costs
from outrider.decode import Request
from outrider.decode.loop import decode
from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.errors import ParameterError
from outrider.generation import Generation
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.records import Round, summarise
from outrider.report.trace import render_trace, write_trace
from outrider.results import Result
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.trace_page import PROMPT, Element, Page, hand_made

HOSTILE = (
    "<script>alert(1)</script></style><img src=x onerror=alert(2)> {{ 7*7 }} {% raw %} & \"q\" 'a' --> "
    "naïve 数 🙂 \u202e\u0007"
)
TAGS = frozenset(
    re.findall(
        "[a-z0-9]+",
        """html head meta title style body header main section footer h1 h2 p b ul li dl div dt dd span strong i del sub form
        fieldset legend label input details summary figure figcaption table thead tbody tr th td svg g a path rect
        text tspan""",
    )
)
RECORD: dict[str, Any] = {"drafts": True, "betas": True, "logprobs": True}


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TransformersModel:
    return load_transformers(target_folder, dtype="float64")


@pytest.fixture(scope="module")
def draft(draft_folder: Path) -> TransformersModel:
    return load_transformers(draft_folder, dtype="float64")


def tip(element: Element, pattern: str) -> str:
    found = re.search(pattern, element.attributes["data-tip"])
    assert found is not None, (pattern, element)
    return found.group(1)


def ids(elements: list[Element]) -> list[int]:
    return [int(tip(e, r"id (\d+)")) for e in elements]


def page_of(model: TransformersModel, prompt: Any, drafter: Any, **options: Any) -> tuple[Page, Result]:
    result = outrider.generate(model, prompt, draft=drafter, **RECORD, **options)
    return Page(render_trace(result, model, prompt, costs=Costs({1: 0.01, 8: 0.012}))), result


# What the rounds record


def test_offered_tokens_are_recorded_if_asked_for_and_change_nothing(
    target: TransformersModel, draft: TransformersModel
) -> None:
    options: dict[str, Any] = {"num_draft_tokens": 3, "temperature": 0.9, "seed": [5, 6], "max_new_tokens": 40}
    prompts = [PROMPT, "def f(x):"]
    off = outrider.generate(target, prompts, draft=draft, **options)
    on = outrider.generate(target, prompts, draft=draft, drafts=True, **options)
    assert [r.tokens for r in on] == [r.tokens for r in off]
    assert all(record.drafts is None for r in off for record in r.rounds)
    rejections = 0
    for record in (record for r in on for record in r.rounds):
        assert record.drafts is not None
        assert len(record.drafts) == record.drafted
        kept = min(record.accepted, len(record.tokens))
        assert record.drafts[:kept] == record.tokens[:kept]
        rejections += record.accepted < record.drafted
    assert rejections > 10


def test_greedily_a_rejected_draft_is_not_the_token_in_its_place(
    target: TransformersModel, draft: TransformersModel
) -> None:
    result = outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=3, drafts=True, max_new_tokens=60)
    rejected = [r for r in result.rounds if r.accepted < r.drafted and len(r.tokens) > r.accepted]
    assert len(rejected) > 10
    assert all(r.drafts is not None and r.drafts[r.accepted] != r.tokens[r.accepted] for r in rejected)


def test_recording_drafts_reads_nothing_more_from_the_device(
    target: TransformersModel, draft: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    original = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        reads.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    seen = []
    for extras in (Extras(betas=True), Extras(betas=True, drafts=True)):
        reads.clear()
        request = Request(target.tokenizer.encode(PROMPT), 30, RandomStream(1))
        decode(target, [request], SamplingSettings(temperature=0.9), ModelDrafter(draft), FixedLength(3), extras)
        seen.append(list(reads))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 10


# What the page shows


def test_every_token_is_there_with_its_id_origin_round_and_beta(target: TransformersModel, draft: TransformersModel) -> None:
    page, result = page_of(target, PROMPT, draft, num_draft_tokens=3, temperature=0.9, seed=3, max_new_tokens=60)
    prompt = [e for e in page.tokens if "prompt" in e.kinds]
    assert ids(prompt) == target.tokenizer.encode(PROMPT)
    kept = [e for e in page.tokens if e.tag == "span" and "prompt" not in e.kinds]
    assert ids(kept) == result.tokens
    origins = [origin for r in result.rounds for origin in r.origins]
    assert [e.kinds[1] for e in kept] == origins
    numbers = [i for i, r in enumerate(result.rounds, 1) for _ in r.tokens]
    assert [int(tip(e, r"round (\d+)")) for e in kept] == numbers
    assert result.logprobs is not None
    shown = [float(tip(e, r"log p (-?[\d.]+)")) for e in kept]
    assert shown == pytest.approx(result.logprobs, abs=6e-4)
    wanted = [b for r in result.rounds for b in (r.betas or ())[: len(r.tokens)]]
    assert [float(tip(e, r"β ([\d.]+)")) for e in kept if "beta" in e.kinds] == pytest.approx(wanted, abs=6e-4)
    assert [e.attributes["id"] for e in page.having("round")] == [f"r{i + 1}" for i in range(len(result.rounds))]


def test_withdrawn_drafts_stand_before_the_token_in_their_place(target: TransformersModel, draft: TransformersModel) -> None:
    page, result = page_of(target, PROMPT, draft, num_draft_tokens=3, temperature=0.9, seed=3, max_new_tokens=60)
    gone = [e for e in page.tokens if e.tag == "del"]
    wanted = [(r, i) for r in result.rounds for i in range(min(r.accepted, len(r.tokens)), r.drafted)]
    assert ids(gone) == [(r.drafts or ())[i] for r, i in wanted]
    assert [e.kinds[1] == "rejected" for e in gone] == [i == r.accepted for r, i in wanted]
    after_rejection = [page.tokens[i + 1] for i, e in enumerate(page.tokens[:-1]) if e.tag == "del"]
    assert {e.kinds[1] for e in after_rejection} == {"untested", "recovered"}
    recovered = [e for e in page.tokens if e.kinds[1] == "recovered"]
    refused = [tip(e, r"^(.*?)    id") for e in gone if e.kinds[1] == "rejected"]
    assert [tip(e, r"in place of (.*)") for e in recovered] == refused[: len(recovered)]


def test_the_shown_text_is_prompt_and_output(target: TransformersModel) -> None:
    """Copied from the page without what was withdrawn, it is the text itself, blanks and all."""
    text = "def f(x):\n\n\treturn  x 🙂 数 <b>&amp;\n"
    new = target.tokenizer.encode("    ünï\n\t🙂 </div>  end")
    page = Page(render_trace(hand_made(target, text, new), target, text))
    assert "".join(e.text for e in page.tokens if e.tag == "span") == text + "    ünï\n\t🙂 </div>  end"
    assert {e.attributes["data-s"] for e in page.having("newline")} == {"↵"}
    assert page.having("tab")
    assert page.having("blank")


def test_a_character_of_several_tokens_shows_the_bytes_of_the_first_ones(target: TransformersModel) -> None:
    new = target.tokenizer.encode("🙂")
    assert len(new) > 1
    page = Page(render_trace(hand_made(target, "x", new), target, "x"))
    raw = [e.attributes["data-s"] for e in page.having("bytes")]
    assert "🙂".encode().startswith(bytes.fromhex("".join(raw)))
    assert len(raw) == len(new) - 1
    assert page.tokens[-1].text == "🙂"


def test_special_invisible_and_moving_characters_are_marked(target: TransformersModel) -> None:
    new = [*target.tokenizer.encode("a\u202eb\u0000\u200b"), target.tokenizer.eos_token_id]
    html = render_trace(hand_made(target, "x", new), target, "x")
    page = Page(html)
    assert [e.attributes["data-s"] for e in page.having("control")] == ["U+202E", "U+0000", "U+200B"]
    assert [e.attributes["data-s"] for e in page.having("special")] == ["<eos>"]
    assert not set("\u202e\u0000\u200b") & set(html)


def test_a_long_prompt_is_folded_and_complete(target: TransformersModel) -> None:
    prompt = "the quick brown fox jumps over the lazy dog\n" * 30
    page = Page(render_trace(hand_made(target, prompt, [50]), target, prompt))
    (early,) = page.having("early")
    assert early.tag == "details"
    (summary,) = [e for e in page.elements if e.tag == "summary" and "prompt" in e.text]
    shown = early.text.removeprefix(summary.text) + "".join(e.text for e in page.tokens if "prompt" in e.kinds)
    assert shown == prompt


def test_drafts_behind_the_end_of_the_text_are_shown_as_not_used(target: TransformersModel) -> None:
    a, b = target.tokenizer.encode("the quick")[:2]
    eos = target.tokenizer.eos_token_id
    ended = Round((a, eos), 4, 3, "x", {"verify": 0.01}, (-0.1, -0.1), (0.9, 0.8, 0.7, 0.6), (a, eos, b, a), None, "eos")
    page = Page(render_trace(Result("", [a, eos], "eos", 0, summarise([ended]), [ended], 1), target, [b]))
    assert [e.kinds[1] for e in page.tokens] == ["prompt", "accepted", "accepted", "unused", "rejected"]


@pytest.mark.parametrize("invariant", [False, True])
def test_the_rule_that_decided_is_told(invariant: bool, target: TransformersModel, draft: TransformersModel) -> None:
    options = {"num_draft_tokens": 3, "temperature": 0.9, "seed": 3, "max_new_tokens": 8, "drafter_invariant": invariant}
    page, _ = page_of(target, PROMPT, draft, **options)
    assert ("min(1, target / draft)" in page.text) is ("Σ min(target, draft)" in page.text) is not invariant
    assert ("decided by position" in page.text) is invariant


def test_what_was_not_recorded_is_said(target: TransformersModel, draft: TransformersModel) -> None:
    result = outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=3, max_new_tokens=20, betas=True)
    page = Page(render_trace(result, target, PROMPT))
    assert "Not recorded, so not shown: logprobs, drafts" in page.text
    assert "no cost table" in page.text
    assert not [e for e in page.tokens if e.tag == "del"]


def test_the_header_has_the_figures(target: TransformersModel, draft: TransformersModel) -> None:
    result = outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=3, max_new_tokens=40, **RECORD)
    plain = outrider.generate(target, PROMPT, draft=None, max_new_tokens=40)
    page = Page(render_trace(result, target, PROMPT, plain=plain, settings={"top_p": 0.9, "stop": ("<end>",)}))
    stats = result.stats
    assert stats.acceptance_rate is not None
    for wanted in (
        f"{stats.tokens_per_second:.1f}",
        f"{stats.mean_acceptance_length:.2f}",
        f"{stats.acceptance_rate:.2f}",
        f"{stats.tokens_per_second / plain.stats.tokens_per_second:.2f}×",
    ):
        assert wanted in [e.text for e in page.elements if e.tag == "strong"]
    listed = {e.text for e in page.elements if e.tag == "dd"}
    assert {"0.9", "'<end>'", str(result.seed)} <= listed
    assert any(draft.name in text for text in listed)


def test_a_prompt_of_another_result_is_refused(target: TransformersModel) -> None:
    with pytest.raises(ParameterError, match="prompt must be the one of the result"):
        render_trace(hand_made(target, "the quick", [50]), target, "the")


def test_nothing_generated_is_a_page_too(target: TransformersModel) -> None:
    generation = Generation(target, [PROMPT], draft=None)
    page = Page(render_trace(generation.results()[0], target, PROMPT, costs=Costs({1: 0.01})))
    assert "cut short" in page.text
    assert "No round was finished" in page.text


# What the page must not do


def test_hostile_text_stays_text(target: TransformersModel) -> None:
    new = target.tokenizer.encode(HOSTILE)
    half = len(new) // 2
    drafted = Round(tuple(new[:3]), len(new), 2, HOSTILE, {"verify": 0.01}, (-1.0,) * 3, (0.5,) * len(new), tuple(new))
    rest = Round(tuple(new[half:]), len(new) - half - 1, len(new) - half - 1, HOSTILE, {"verify": 0.01})
    count = len(target.tokenizer.encode(HOSTILE))
    result = Result("", [*drafted.tokens, *rest.tokens], "length", 0, summarise([drafted, rest]), [drafted, rest], count)
    page = Page(render_trace(result, target, HOSTILE, settings={HOSTILE: HOSTILE, "stop": (HOSTILE,)}))
    assert {e.tag for e in page.elements} <= TAGS
    for element in page.elements:
        assert not [name for name in element.attributes if name.startswith("on") or name in ("src", "style", "action")]
        assert element.attributes.get("href", "#").startswith("#")
    visible = HOSTILE.replace("\u202e", "").replace("\u0007", "")
    assert "".join(e.text for e in page.tokens if "prompt" in e.kinds) == visible
    assert "{{ 7*7 }}" in page.text
    assert "<script>alert(1)</script>" in page.text


def test_the_policy_allows_the_style_sheet_and_nothing_else(target: TransformersModel) -> None:
    page = Page(render_trace(hand_made(target, "x", [50]), target, "x"))
    (style,) = [e for e in page.elements if e.tag == "style"]
    (policy,) = [e for e in page.elements if e.attributes.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(maxsplit=1) for rule in policy.attributes["content"].split("; "))
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.search(r"url\(|@import|@font-face", style.text)


# The file


def test_a_file_that_is_there_is_replaced_whole_or_not_at_all(
    target: TransformersModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, result = tmp_path / "t.html", hand_made(target, "x", [50])
    (tmp_path / "link.html").symlink_to(path)
    path.write_text("old")
    write_trace(tmp_path / "link.html", result, target, "x")
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "link.html").is_symlink()
    path.write_text("old")

    def fail(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ParameterError, match=r"can't be written \(No space left on device\)"):
        write_trace(path, result, target, "x")
    assert path.read_text() == "old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.html", "t.html"]
