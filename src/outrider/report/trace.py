"""One run as one page: the text with every token's origin, the time line, the figures. A file that needs nothing else.

Whatever is shown was written by others (prompt, output, names of models), so everything is escaped, and a content security
policy forbids the page all but its own style sheet: no script, no request. Nothing on the page says something that the
records of the rounds do not hold; what comes from the cost table instead is called predicted.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from outrider.errors import ParameterError
from outrider.report import trace_figures, trace_header, trace_timeline, trace_tokens
from outrider.report.trace_file import check_path, unwritable
from outrider.request.prompts import Prompt, prepare
from outrider.results import Result
from outrider.support.whole_files import replace_whole

if TYPE_CHECKING:
    from jinja2 import Environment

    from outrider.costs import Costs
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel


class About(TypedDict, total=False):
    """What a page can tell besides the result.

    draft: who drafted, for the price of its tokens. settings: {name: value}, listed as they are. costs: the target's table
    (`outrider.costs.measured_costs`), for the time line of plain decoding. plain: the result of the same run without a
    draft, for the measured speed-up.
    """

    draft: Drafter | None
    settings: Mapping[str, object]
    costs: Costs | None
    plain: Result | None


def write_trace(path: Path | str, result: Result, target: TextModel, prompt: Prompt, **about: Unpack[About]) -> None:
    """Write the page of one result to `path`, whole or not at all; a file that is there is replaced.

    result: of `outrider.generate(target, prompt, drafts=True, betas=True, logprobs=True)`; what was not recorded is not
    shown. target, prompt: what it was generated with. about: keywords, see `About`.
    Raises `ParameterError` if the file can't be written, or the prompt is not the result's.
    """
    page = render_trace(result, target, prompt, **about)
    place = check_path(path)
    try:
        replace_whole(place, page.encode("utf-8", "replace"))
    except OSError as error:
        raise unwritable(path, error.strerror) from None


def render_trace(result: Result, target: TextModel, prompt: Prompt, **about: Unpack[About]) -> str:
    """The page of one result, as HTML; the arguments of `write_trace`."""
    draft, costs = about.get("draft"), about.get("costs")
    tokens = prepare(target, prompt).tokens
    if len(tokens) != result.prompt_tokens:
        raise ParameterError(
            f"prompt must be the one of the result, with {result.prompt_tokens} tokens, got one with {len(tokens)}"
        )
    early, late = trace_tokens.shown_prompt(target.tokenizer, tokens)
    rounds = result.rounds
    style = _style()
    return (
        _environment()
        .get_template("trace.html")
        .render(
            style=style,
            style_hash=_hash(style),
            target=target,
            draft=draft,
            result=result,
            listed=trace_header.listed(result, target, draft, about.get("settings", {})),
            figures=trace_header.figures(result, draft, costs, about.get("plain")),
            drafters=trace_header.drafters(result),
            ending=trace_header.ENDINGS[result.finish_reason],
            early=early,
            prompt=late,
            rounds=trace_tokens.shown_rounds(target.tokenizer, tokens, rounds),
            most_gone=trace_tokens.MOST_GONE,
            doubt=trace_header.doubt(result, draft, costs),
            missing=trace_header.missing(result),
            meaning=trace_tokens.MEANING,
            timeline=trace_timeline.make_timeline(rounds, len(tokens), costs),
            tl=trace_timeline,
            strip=trace_figures.beta_strip(rounds),
            histogram=trace_figures.beta_histogram(rounds),
            acceptance=trace_figures.acceptance_chart(rounds),
            fig=trace_figures,
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("outrider.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _style() -> str:
    return (Path(__file__).parent / "templates" / "trace.css").read_text(encoding="utf-8")


def _hash(style: str) -> str:
    """The source expression that allows this style sheet and no other (CSP level 2)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
