"""Where a model is computed: over all ranks in shares, whole on every rank, or on rank 0 alone.

A drafted token is one pass of a small model. In shares it costs two sums over the ranks a layer, which is why Chen et al.
(Results) trained a draft of few, wide layers. On rank 0 alone it costs no message, because the drafted tokens reach the
others with the call that scores them. On every rank it costs the same pass, and others beside it: since rank 0 decides, the
copies' results are not looked at, and nothing is saved by them; it is there to be measured, and for whoever must have it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelError, ParameterError
from outrider.sharded.loading import check_kind, find, load_part, plan_of
from outrider.sharded.model import TeamModel
from outrider.sharded.team import Op, share

if TYPE_CHECKING:
    from outrider.models.base import TextModel
    from outrider.sharded.team import Team

PLACEMENTS = ("auto", "sharded", "replicated", "rank0")
_ORDER = ("rank0", "replicated", "sharded")
WORTH = 0.97  # another than rank 0 must take less than this share of its seconds
_numbers = itertools.count()


def place(team: Team, model: str | Path | None, dtype: str, engine: str, placement: str, pack: bool) -> TextModel:
    """Load a model where it belongs. Run on rank 0, which finds the files and makes conversions before the others load."""
    if placement not in PLACEMENTS:
        raise ParameterError(f"placement must be {', '.join(PLACEMENTS[:-1])} or {PLACEMENTS[-1]}, got {placement!r}")
    check_kind(dtype, engine)
    team.check()
    source, name = find(model, dtype, team.device)
    if placement == "auto":
        return cheapest(team, source, name, dtype, pack)
    return _placed(team, source, name, dtype, placement, pack)


def _placed(team: Team, source: str | Path, name: str, dtype: str, placement: str, pack: bool) -> TextModel:
    if placement == "rank0":
        return _alone(team, source, name, dtype, pack)
    plan = plan_of(source, name, team.size) if placement == "sharded" else None
    number = next(_numbers)
    order: dict[str, Any] = {"source": str(source), "name": name, "dtype": dtype, "plan": plan, "pack": pack}
    with team.together(Op.LOAD, number):
        share(order)
        return TeamModel(team, number, load_part(**order), placement)


def _alone(team: Team, source: str | Path, name: str, dtype: str, pack: bool) -> TextModel:
    from outrider.models.loading import load_transformers

    made = load_transformers(source, dtype=dtype, device=str(team.device), pack=pack)
    made._name = name
    return made


def cheapest(team: Team, source: str | Path, name: str, dtype: str, pack: bool) -> TextModel:
    """The placement in which scoring one token takes least by the measured costs, rank 0 in doubt; says so in one line.

    The costs are kept on disk (`costs.measured_costs`), so that the next run chooses the same.
    """
    from outrider.costs import measured_costs

    seconds: dict[str, float] = {}
    kept: Any = None
    for placement in _ORDER if _has_plan(source, name, team.size) else _ORDER[:-1]:
        model: Any = _placed(team, source, name, dtype, placement, pack)
        seconds[placement] = measured_costs(model).verify(1)
        better = kept is None or seconds[placement] < WORTH * min(s for p, s in seconds.items() if p != placement)
        loser, kept = (kept, model) if better else (model, kept)
        if isinstance(loser, TeamModel):
            team.drop(loser)
    chosen = getattr(kept, "placement", "rank0")
    told = ", ".join(f"{placement} {1000 * s:.2f}" for placement, s in seconds.items())
    sys.stderr.write(f"outrider: draft {name} placed on {chosen} (ms a drafted token: {told})\n")
    return kept  # type: ignore[no-any-return]


def _has_plan(source: str | Path, name: str, ranks: int) -> bool:
    try:
        return bool(plan_of(source, name, ranks))
    except ModelError:
        return False
