"""Speculative decoding of images: tokens are tokens (Leviathan Section 6 leaves images to future work).

    python examples/image_tokens.py

The target is an autoregressive transformer over the tokens of small images, row by row, as image models with a codebook are.
It is trained here, in a minute or so, on pictures that are made up by formula. The draft is a table of what follows the
token to the left and the one above, counted on the same pictures: no model, a look-up. Outrider's own decoder runs both: the
sampled images follow the target's law.

Prints the seconds of an image with and without the draft, and the gain beside two predictions: of the recorded rounds by the
measured cost of a pass, and Leviathan's Theorem 3.8 from alpha and c.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from outrider.costs import measured_costs
from outrider.costs.draft_seconds import DraftSeconds
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.draft_length.base import Plan
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.drafters import Drafter
from outrider.drafters.base import DraftContext
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow, Proposal, empty_proposal
from outrider.randomness import RandomStream
from outrider.records import Round, summarise
from outrider.sampling import SamplingSettings, draw, standardize
from outrider.theory import walltime_factor

SIDE, LEVELS = 12, 16
START = LEVELS  # the token before an image, and what stands left of it and above
VOCABULARY = LEVELS + 1
SHADES = " .,:;i1tfLCG08@#"


def pictures(count: int, seed: int) -> Tensor:
    """Waves and discs with a little noise, as tokens. → int64 [count, SIDE²]"""
    rng = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")

    def some(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1, generator=rng)

    turn, speed = 6.3 * some(), 2 + 4 * some()
    waves = torch.sin(speed * (x * torch.cos(turn) + y * torch.sin(turn)) + 6.3 * some())
    places, sizes = 2 * some(2) - 1, 0.2 + 0.4 * some()
    disc = ((x - places[:, 0]) ** 2 + (y - places[:, 1]) ** 2 < sizes**2).float()
    light = 0.5 + 0.35 * waves * (1 - disc) + 0.4 * (some() - 0.5) * disc
    light = light + 0.03 * torch.randn(light.shape, generator=rng)
    return (light.clamp(0, 0.999) * LEVELS).long().flatten(1)


def train(images: Tensor, steps: int, seed: int) -> TransformersModel:
    """A small transformer that has seen the images `steps` batches long."""
    from rich.console import Console
    from rich.progress import track
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=SIDE**2 + 1,
        bos_token_id=START,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(2, steps))
    rng = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.pad(images, (1, 0), value=START)
    for _ in track(range(steps), "Training", console=Console(stderr=True)):
        batch = rows[torch.randint(len(rows), (16,), generator=rng)]
        logits: Tensor = model(batch[:, :-1]).logits
        loss: Tensor = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return TransformersModel(model, name="image-tokens")


class NeighbourDrafter(Drafter):
    """Proposes tokens by those to the left and above, from counts; where a pair was rarely seen, by the one above."""

    name = "neighbours"

    def __init__(self, images: Tensor) -> None:
        image = images.reshape(-1, SIDE, SIDE)
        left = torch.nn.functional.pad(image, (1, 0), value=START)[:, :, :-1]
        above = torch.nn.functional.pad(image, (0, 0, 1, 0), value=START)[:, :-1]
        cell = (left * VOCABULARY + above) * VOCABULARY + image
        counts = torch.bincount(cell.flatten(), minlength=VOCABULARY**3).reshape([VOCABULARY] * 3).double()
        every = counts.sum((0, 1)) + 1e-3
        coarse = counts.sum(0) + every / every.sum()
        fine = counts + 2.0 * coarse / coarse.sum(-1, keepdim=True)
        self._logits = fine.log()  # [left, above, V]; standardised like the target's

    def propose(self, rows: Sequence[DraftRow], plans: Sequence[Plan], context: DraftContext) -> Proposal:
        """One image at a time."""
        (row,), (plan,) = rows, plans
        if not plan.limit:
            return empty_proposal(1, context.device)
        drafted: list[int] = []
        laws = []
        with context.clock.phase("draft"):
            for uniform in row.stream.take(plan.limit):
                place = len(row.tokens) + len(drafted) - row.prompt_length
                tokens = [*row.tokens[-SIDE:], *drafted]
                left = tokens[-1] if place % SIDE else START
                above = tokens[-SIDE] if place >= SIDE else START
                law = standardize(self._logits[left, above].unsqueeze(0), context.sampling)[0]
                laws.append(law)
                drafted.append(int(draw(law, torch.tensor(uniform, dtype=torch.float64))))
        return Proposal(torch.tensor([drafted]), [len(drafted)], torch.stack(laws).unsqueeze(0))


@dataclass(frozen=True)
class Gain:
    """Seconds an image; speed-ups over plain decoding. alpha: accepted / tested. c: a drafted token over a pass."""

    images: int
    num_draft_tokens: int
    plain: float
    speculative: float
    speedup: float
    predicted_by_costs: float
    predicted_closed_form: float
    alpha: float
    c: float
    tokens_per_round: float


def sample(
    target: TransformersModel, drafter: Drafter | None, length: int, seeds: Sequence[int]
) -> tuple[list[list[int]], list[list[Round]], list[float]]:
    """Images one by one. → their tokens, their rounds, seconds of each"""
    images, rounds, seconds = [], [], []
    for seed in seeds:
        start = time.perf_counter()
        request = Request([START], SIDE**2, RandomStream(seed))
        made, records = decode(target, [request], SETTINGS, drafter, FixedLength(length))
        seconds.append(time.perf_counter() - start)
        images.append(made[0])
        rounds.append(records[0])
    return images, rounds, seconds


# `START` is in the vocabulary but in no image.
SETTINGS = SamplingSettings(temperature=1.0, logit_bias={START: -float("inf")})


def measure(count: int, length: int, steps: int, seed: int) -> tuple[Gain, list[int]]:
    """Train, sample with and without the draft in turn. → the gain, an image"""
    images = pictures(2000, seed)
    target, drafter = train(images, steps, seed), NeighbourDrafter(images)
    costs = measured_costs(target)
    for warm in (None, drafter):
        sample(target, warm, length, [seed])
    plain, drafted, records = [], [], []
    last: list[int] = []
    for number in range(count):
        plain += sample(target, None, 0, [seed + number])[2]
        (last,), made, seconds = sample(target, drafter, length, [seed + number])
        records += made
        drafted += seconds
    rounds = [one for image in records for one in image]
    stats = summarise(rounds)
    step = stats.seconds["draft"] / max(stats.drafted, 1)
    expected = sum(predicted_seconds(image, costs, {drafter.name: DraftSeconds(step)}, 1) for image in records)
    alone = sum(plain_seconds(image, costs, 1) for image in records)
    alpha, c = stats.acceptance_rate or 0.0, step / costs.verify(1)
    return Gain(
        images=count,
        num_draft_tokens=length,
        plain=sum(plain) / count,
        speculative=sum(drafted) / count,
        speedup=sum(plain) / sum(drafted),
        predicted_by_costs=alone / expected,
        predicted_closed_form=walltime_factor(alpha, length, c),
        alpha=alpha,
        c=c,
        tokens_per_round=stats.mean_acceptance_length,
    ), last


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--train-steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    gain, image = measure(given.images, given.num_draft_tokens, given.train_steps, given.seed)
    if given.json:
        print(json.dumps(asdict(gain)))
        return
    shown = ("".join(2 * SHADES[token] for token in image[i : i + SIDE]) for i in range(0, SIDE**2, SIDE))
    print("\n".join(shown), file=sys.stderr)
    print(
        f"{gain.images} images of {SIDE**2} tokens, K = {gain.num_draft_tokens}: {gain.plain:.3f} s each plain, "
        f"{gain.speculative:.3f} s speculative: {gain.speedup:.2f}×, predicted {gain.predicted_by_costs:.2f}× by the "
        f"measured costs, {gain.predicted_closed_form:.2f}× from alpha {gain.alpha:.2f} and c {gain.c:.3f} "
        f"({gain.tokens_per_round:.2f} tokens a round)"
    )


if __name__ == "__main__":
    main()
