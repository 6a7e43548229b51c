"""What the ranks of the jobs in test_sharded.py run: started by torchrun with a case and its settings, a JSON object."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outrider
from outrider.audit.greedy import first_divergence
from outrider.audit.sampled import TextAudit
from outrider.audit.sources import own_texts
from outrider.audit.verdict import judge
from outrider.drafters import ModelDrafter
from outrider.errors import OutriderError
from outrider.sampling import SamplingSettings
from outrider.sharded import Team, lead, loading
from outrider.sharded.linear import RowLinear
from outrider.sharded.model import TeamModel, Whole
from outrider.support.device_data import pad_rows

RANK = int(os.environ["RANK"])
PLACES = ("rank0", "replicated", "sharded")
PROMPTS = ["the quick brown", "def f(x):"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True, "seed": 0}


def other_bits(value: Tensor) -> Tensor:
    """The next number up, everywhere."""
    return torch.nextafter(value, torch.full_like(value, torch.inf))


def plant(what: str, rank: int, flag: str) -> None:
    """On one rank, as long as a file is there: "logits", a pass returns their negative; "sums", all sums over the ranks
    differ in their last bits.
    """
    if rank != RANK:
        return
    right, forward = Whole.score, RowLinear.forward

    def score(*arguments: Any) -> Tensor | None:
        out = right(*arguments)
        return -out if out is not None and Path(flag).exists() else out

    def sums(self: RowLinear, x: Tensor) -> Tensor:
        out = forward(self, x)
        return other_bits(out) if Path(flag).exists() else out

    if what == "logits":
        Whole.score = score  # type: ignore[method-assign,assignment]
    else:
        RowLinear.forward = sums  # type: ignore[method-assign]


def greedy(target: Any, draft: Any) -> list[list[int]]:
    """The tokens of each prompt, alone and then as a batch."""
    alone = [outrider.generate(target, text, draft=draft, num_draft_tokens=3, **GREEDY) for text in PROMPTS]
    batch = outrider.generate(target, PROMPTS, draft=draft, num_draft_tokens=3, **GREEDY)
    return [result.tokens for result in [*alone, *batch]]


def compare(single: Any, wanted: list[list[int]], got: list[list[int]]) -> list[str]:
    """What differs from one process, near ties left out."""
    found = []
    for text, a, b in zip(PROMPTS * 2, wanted, got, strict=True):
        parted = first_divergence(single, single.tokenizer.encode(text), a, b)
        if (parted is None and a != b) or (parted is not None and not parted.near_tie):
            found.append(f"{text!r}: {parted}")
    return found


def logits(model: Any) -> Tensor:
    """Of a short text, after a wrong continuation was taken back."""
    sequence = model.open()
    model.score([sequence], *pad_rows([[5, 6, 7, 8, 9]], model.device), "all")
    sequence.truncate(3)
    out = model.score([sequence], *pad_rows([[11, 12, 13, 14]], model.device), "all")
    sequence.close()
    return out[0].clone()  # type: ignore[no-any-return]


@cache
def alone(target: str) -> Any:
    """The model in one process, loaded once for all cases."""
    return outrider.load(target, dtype="float32", device="cpu")


@cache
def wanted_of(target: str) -> list[list[int]]:
    return greedy(alone(target), None)


def greedy_case(
    team: Team, target: str, draft: str, flag: str | None = None, places: tuple[str, ...] = PLACES
) -> dict[str, Any]:
    """Tokens of these placements beside one process. flag: made for the time being, which lets in what was planted."""
    single, wanted = alone(target), wanted_of(target)
    sharded = team.load(target, dtype="float32")
    assert isinstance(sharded, TeamModel)
    if flag:
        Path(flag).touch()
    off = float((logits(sharded) - logits(single)).abs().max()) / float(logits(single).std())
    found: dict[str, Any] = {"off": off, "differs": {"plain": compare(single, wanted, greedy(sharded, None))}}
    accepted = {}
    for place in places:
        model = team.load_draft(draft, placement=place, dtype="float32")
        found["differs"][place] = compare(single, wanted, greedy(sharded, model))
        result = outrider.generate(sharded, PROMPTS[0], draft=model, num_draft_tokens=3, **GREEDY)
        accepted[place] = result.stats.accepted
    if flag:
        Path(flag).unlink()
    return {**found, "accepted": accepted, "sums": sharded.part.cut.sums if sharded.part.cut else None}


def audit_case(team: Team, target: str, draft: str, tokens: int) -> dict[str, Any]:
    """Sampled texts of all placements, judged by the one-process model."""
    single = alone(target)
    drafter = ModelDrafter(outrider.load(draft, dtype="float32", device="cpu"))
    drafter.bind(single)
    sharded = team.load(target, dtype="float32")
    sampling = SamplingSettings(temperature=1.0)
    found = {}
    for place in PLACES:
        model = team.load_draft(draft, placement=place, dtype="float32")
        audit = TextAudit(single, drafter, sampling, seed=3)
        for text in own_texts(sharded, model, sampling, tokens, 3, PROMPTS, seed=7):
            audit.add(text)
        report = judge(audit, "t=1")
        of_rule = {name for name, planted in audit.planted.items() if planted.of_rule}
        unseen = [sight.fault for sight in report.sights if sight.fault in of_rule and not sight.seen]
        found[place] = {"verdict": report.verdict, "p": report.p, "alpha": report.alpha, "unseen": unseen}
    return found


def refusals(team: Team, target: str, no_plan: str) -> dict[str, str]:
    """What can't be sharded says why, and the ranks go on."""
    calls: dict[str, Any] = {
        "no plan": lambda: team.load(no_plan),
        "int8": lambda: team.load(target, dtype="int8"),
        "engine": lambda: team.load(target, engine="openvino"),
        "placement": lambda: team.load_draft(target, placement="nowhere"),
        "missing": lambda: team.load("/nowhere/at/all"),
        "early exit": lambda: outrider.generate(team.load(target, dtype="float32"), "x", draft="early-exit", **GREEDY),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except OutriderError as error:
            found[name] = str(error)
    return found


def automatic(team: Team, target: str, draft: str, no_plan: str) -> dict[str, Any]:
    """Where an automatic placement puts a draft that can be sharded, and one that can't."""
    places = [getattr(team.load_draft(name, dtype="float32"), "placement", "rank0") for name in (draft, no_plan, draft)]
    return {"places": places}


def architectures(team: Team, folders: dict[str, str]) -> dict[str, float]:
    """How far the logits of each are from those of one process, relative to their spread."""
    found = {}
    for name, folder in folders.items():
        wanted = logits(outrider.load(folder, dtype="float32", device="cpu"))
        found[name] = float((logits(team.load(folder, dtype="float32")) - wanted).abs().max()) / float(wanted.std())
    return found


def endless(team: Team, target: str, marker: str) -> None:
    """Generate until the job is ended from outside."""
    model = team.load(target, dtype="float32")
    for number in range(10**9):
        outrider.generate(model, PROMPTS[0], draft=None, **GREEDY)
        if number == 1:
            Path(marker).write_text(str(time.time()))


def main(settings: dict[str, Any]) -> None:
    if settings.get("bad_rank") == RANK:  # this rank finds other files than the others
        right = loading.load_part
        loading.load_part = lambda source, **rest: right("/nowhere/at/all", **rest)
    cases: dict[str, Any] = {
        "greedy": greedy_case,
        "audit": audit_case,
        "refusals": refusals,
        "automatic": automatic,
        "architectures": architectures,
        "endless": endless,
    }

    def work(team: Team) -> dict[str, Any]:
        found = {}
        for name, given in settings["cases"].items():
            case, _, _ = name.partition(":")
            begun = time.perf_counter()
            found[name] = cases[case](team, **given)
            sys.stderr.write(f"{name}: {time.perf_counter() - begun:.1f} s\n")
            if settings.get("out"):
                Path(settings["out"]).write_text(json.dumps(found))
        return found

    for planted in settings.get("plant", []):
        plant(*planted)
    lead(work)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OutriderError as error:
        sys.stderr.write(f"outrider: {error}\n")
        sys.exit(error.exit_code)
