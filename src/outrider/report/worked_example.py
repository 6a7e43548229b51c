"""One round by hand: small laws over seven words, four drafted tokens, five numbers, and what `verify` makes of them.

The pictures and the documents show this round, so that what they show is what the code does. And a simulated timeline of
rounds, for the picture of where the time goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.randomness import RandomStream

WORDS = ("mat", "sofa", "and", "slept", "purred", "yawned", ".")
CONTEXT = "The cat sat on the"
DRAFTED = ("mat", "and", "slept", ".")
# Row i: the law after i drafted tokens, in the order of WORDS.
TARGET = (
    (0.50, 0.40, 0.00, 0.00, 0.00, 0.00, 0.10),
    (0.00, 0.00, 0.55, 0.00, 0.00, 0.00, 0.45),
    (0.00, 0.00, 0.00, 0.20, 0.45, 0.30, 0.05),
    (0.00, 0.00, 0.15, 0.00, 0.00, 0.00, 0.85),
    (0.25, 0.25, 0.10, 0.10, 0.10, 0.10, 0.10),
)
DRAFT = (
    (0.60, 0.25, 0.05, 0.00, 0.00, 0.00, 0.10),
    (0.00, 0.00, 0.40, 0.00, 0.00, 0.00, 0.60),
    (0.00, 0.00, 0.00, 0.55, 0.20, 0.15, 0.10),
    (0.00, 0.00, 0.20, 0.00, 0.00, 0.00, 0.80),
)
ACCEPT = (0.31, 0.80, 0.64, 0.12)
NEXT = 0.35


@dataclass(frozen=True)
class Step:
    """One drafted token: its probability under target and draft, the chance to be kept, the number, what came of it.

    outcome: accepted, rejected, or unused, after a rejection.
    """

    word: str
    target: float
    draft: float
    chance: float
    uniform: float
    outcome: str


@dataclass(frozen=True)
class Example:
    """The round: its steps, how many were accepted, the token after them, and the law that was drawn from for it."""

    steps: tuple[Step, ...]
    accepted: int
    recovered: str
    residual: dict[str, float]
    beta: float


def work() -> Example:
    """Run the round with `verify`."""
    import torch

    from outrider.acceptance.verify import Uniforms, verify
    from outrider.theory import acceptance_probability

    target, draft = (torch.tensor(rows, dtype=torch.float64) for rows in (TARGET, DRAFT))
    tokens = torch.tensor([WORDS.index(word) for word in DRAFTED])
    uniforms = Uniforms(torch.tensor(ACCEPT, dtype=torch.float64), torch.tensor(NEXT, dtype=torch.float64))
    verdict = verify(target, draft, tokens, uniforms)
    accepted = int(verdict.num_accepted)
    steps = []
    for i, (word, uniform) in enumerate(zip(DRAFTED, ACCEPT, strict=True)):
        p, q = TARGET[i][WORDS.index(word)], DRAFT[i][WORDS.index(word)]
        outcome = "accepted" if i < accepted else "rejected" if i == accepted else "unused"
        steps.append(Step(word, p, q, min(1.0, p / q), uniform, outcome))
    missing = (target[accepted] - draft[accepted]).clamp(min=0.0)
    law = (missing / missing.sum()).tolist()
    residual = {word: share for word, share in zip(WORDS, law, strict=True) if share > 0}
    beta = float(acceptance_probability(target[accepted], draft[accepted]))
    return Example(tuple(steps), accepted, WORDS[int(verdict.next_token)], residual, beta)


def timeline(alpha: float, gamma: int, tokens: int, seed: int) -> list[int]:
    """Accepted tokens of each round until there are `tokens`, each drafted one accepted with probability `alpha`."""
    stream = RandomStream(seed)
    rounds: list[int] = []
    while sum(rounds) + len(rounds) < tokens:
        numbers = stream.take(gamma)
        rounds.append(next((i for i, number in enumerate(numbers) if number >= alpha), gamma))
    return rounds
