"""Chen's set-up on paper: Chinchilla 70B and its 4B draft on 16 TPUs, beside what the paper prints of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.theory.chinchilla import DRAFT, DRAFT_MS, TARGET, TARGET_MS, TOKEN_MS, TOKENS_PER_LOOP, alpha_of
from outrider.theory.scale import Machine, Network, Pair, fit, forward

MEMORY = 34.4e9  # bytes of a TPU v4


@dataclass(frozen=True)
class Check:
    """What the paper prints, and what the model gives here. fitted: the printed number went into the model."""

    what: str
    printed: str
    ours: float
    fitted: bool = False


def chens_networks() -> tuple[Network, Network]:
    """Target and draft."""
    return Network(*TARGET), Network(*DRAFT)


def chens_machine() -> Machine:
    """Chen's machine, with what makes its two printed times come out."""
    return fit(*chens_networks(), Machine(memory=MEMORY), TARGET_MS / 1000, DRAFT_MS / 1000)


def printed_and_ours(pair: Pair) -> list[Check]:
    """What the paper prints, beside what the pair's machine gives."""
    base = replace(pair, context=0)
    seven = Network(7e9, 32, 4096)  # the paper does not say; the shape of other models of this size
    bare = replace(base, machine=replace(base.machine, hop_seconds=1e-6, fixed_seconds=0.0))
    weights = 1000 * forward(base.target, base.machine).weights
    small = forward(seven, replace(base.machine, devices=4)).seconds
    large = forward(seven, base.machine).seconds
    return [
        Check("target, ms a token", f"{TARGET_MS}", 1000 * base.target_seconds, fitted=True),
        Check("draft, ms a token", f"{DRAFT_MS}", 1000 * base.draft_seconds, fitted=True),
        Check("target, hops of 1 us and no fixed part", f"{TARGET_MS}", 1000 * bare.target_seconds),
        Check("draft, hops of 1 us and no fixed part", f"{DRAFT_MS}", 1000 * bare.draft_seconds),
        Check("limit of the bandwidth, ms a token", "between 7.00 and 7.52", weights),
        Check("7B on 4 devices, ms a token", "5", 1000 * small),
        Check("7B on 16 devices, ms a token", "more than on 4", 1000 * large),
        *(
            Check(f"{task}, nucleus, K = 4, ms a token", f"{TOKEN_MS[task]}", 1000 * base.token_seconds(alpha_of(task), 4))
            for task in TOKENS_PER_LOOP
        ),
        Check(
            "Figure 1, ms a drafted token more", "slightly above 1.8", 1000 * (base.loop_seconds(5) - base.loop_seconds(4))
        ),
    ]
