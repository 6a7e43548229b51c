"""The trace's time line and figures: all time and all tokens once, at one scale, and what the records hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.costs import Costs
from outrider.draft_length.predicted import plain_seconds
from outrider.records import Round, acceptance_by_position, summarise
from outrider.report import trace_figures, trace_timeline

SECONDS = st.floats(0.0, 0.5)


@st.composite
def records(draw: st.DrawFn) -> list[Round]:
    found = []
    for _ in range(draw(st.integers(1, 60))):
        drafted = draw(st.integers(0, 5))
        accepted = draw(st.integers(0, drafted))
        seconds = {phase: draw(SECONDS) for phase in ("draft", "verify", "sampling", "other")}
        betas = tuple(draw(st.floats(0.0, 1.0)) for _ in range(drafted))
        found.append(Round((7,) * (accepted + 1), drafted, accepted, "x" if drafted else None, seconds, None, betas))
    return found


@pytest.mark.slow
@given(records(), st.floats(1e-4, 1.0))
def test_the_time_line_holds_all_time_and_all_tokens_once(rounds: list[Round], step: float) -> None:
    costs = Costs({1: step, 8: 2 * step}, {1: step / 100})
    timeline = trace_timeline.make_timeline(rounds, 3, costs)
    total = sum(summarise(rounds).seconds.values())
    if timeline is None:
        assert total == 0
        return
    shapes = [shape for line in timeline.lines for shape in line.rounds]
    for phase in ("draft", "verify", "sampling", "other"):
        width = sum(rect.width for shape in shapes for rect in shape.calls if rect.kind == phase)
        taken = sum(r.seconds[phase] for r in rounds)
        assert width * timeline.window / trace_timeline.WIDTH == pytest.approx(taken, abs=1e-9)
    rects = [rect for shape in shapes for rect in (*shape.calls, *shape.stack)]
    assert all(r.x >= -1e-6 and r.x + r.width <= trace_timeline.WIDTH + 1e-6 for r in rects)
    stacked = [rect.kind for shape in shapes for rect in shape.stack]
    origins = [origin for r in rounds for origin in r.origins]
    assert sorted(kind for kind in stacked if kind != "withdrawn") == sorted(origins)
    assert stacked.count("withdrawn") == sum(r.drafted - r.accepted for r in rounds)
    assert timeline.plain_seconds == pytest.approx(plain_seconds(rounds, costs, 3))
    assert timeline.lines[-1].tokens == len(origins)
    assert [line.tokens for line in timeline.lines] == sorted(line.tokens for line in timeline.lines)
    produced = [line.plain_tokens for line in timeline.lines if line.plain is not None]
    assert produced[-1] == len(origins)
    assert len(timeline.lines) <= trace_timeline.MOST_LINES + 1


def test_plain_decoding_is_drawn_call_by_call_on_the_same_axis() -> None:
    rounds = [Round((1, 2, 3, 4), 3, 3, "x", {"draft": 0.006, "verify": 0.014}) for _ in range(5)]
    timeline = trace_timeline.make_timeline(rounds, 3, Costs({1: 0.01}))
    assert timeline is not None
    (line,) = timeline.lines
    assert line.plain is not None
    assert line.plain.count("M") == 20
    starts = [float(x) for x in re.findall(r"M([\d.]+) 0h", line.plain)]
    assert starts == pytest.approx([trace_timeline.WIDTH * i / 20 for i in range(20)], abs=0.01)  # 0.2 s: the whole line
    ends = [max(r.x + r.width for r in shape.calls) for shape in line.rounds]
    assert ends == pytest.approx([trace_timeline.WIDTH * (i + 1) / 10 for i in range(5)])  # 0.1 s: half of it
    assert (line.ticks[0][1], line.ticks[-1][1]) == ("0", "200")


def test_a_thousand_rounds_are_wrapped_at_one_scale() -> None:
    rounds = [Round((1, 2), 2, 1, "x", {"draft": 0.004, "verify": 0.02}) for _ in range(1000)]
    timeline = trace_timeline.make_timeline(rounds, 3, Costs({1: 0.018}))
    assert timeline is not None
    assert 20 <= len(timeline.lines) <= 60
    widths = {round(r.width, 3) for line in timeline.lines for s in line.rounds for r in s.calls if r.kind == "verify"}
    assert max(widths) == pytest.approx(trace_timeline.WIDTH * 0.02 / timeline.window, abs=1e-3)


@given(records())
def test_the_charts_count_what_the_records_hold(rounds: list[Round]) -> None:
    tested = sum(r.tested for r in rounds)
    histogram = trace_figures.beta_histogram(rounds)
    assert sum(bar.of for bar in histogram) == tested
    assert sum(bar.accepted for bar in histogram) == sum(r.accepted for r in rounds)
    chart = trace_figures.acceptance_chart(rounds)
    assert [(bar.of, bar.accepted) for bar in chart] == [(of, n) for of, n in acceptance_by_position(rounds) if of]
    strip = trace_figures.beta_strip(rounds)
    assert (strip is None) == (tested == 0)
    if strip is not None:
        assert strip.accepted.count("h0") == strip.kept == sum(r.accepted for r in rounds)
        assert strip.expected == pytest.approx(sum(b for r in rounds for b in (r.betas or ())[: r.tested]))
