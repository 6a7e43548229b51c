"""The data behind the figures of the closed forms, without any drawing: what is plotted, and from which equation.

Leviathan's Figures 2, 3 and 4, the oracle of his Section 3.5, Chen's Figure 1 from closed form, what limits the speed-up,
and the acceptance of other rules. Everything assumes what the formulas do: acceptances that are independent and alike, and
a verification that costs one target step, unless the figure is about that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from outrider import theory
from outrider.support.checks import check_choice
from outrider.theory import chinchilla
from outrider.theory.figure_data import Curve, FigureData, Panel, family

if TYPE_CHECKING:
    from torch import Tensor

ALPHAS = tuple(round(0.01 * i, 2) for i in range(97))  # 0 … 0.96: beyond it everything else would be flat
UP_TO_09 = ALPHAS[:91]
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)
LENGTHS = tuple(float(gamma) for gamma in range(17))
CONTEXTS, VOCABULARY = 64, 256  # of the toy laws


def figures(names: Sequence[str] = ()) -> list[FigureData]:
    """The figures with these names, computed now; all of them for none."""
    return [MAKERS[check_choice("figure", name, MAKERS)]() for name in names or MAKERS]


@cache
def _best(alpha: float, c: float) -> float:
    return float(theory.best_gamma(alpha, c))


def _best_speed(alpha: float, c: float) -> float:
    return theory.walltime_factor(alpha, int(_best(alpha, c)), c)


def _best_operations(alpha: float, c: float) -> float:
    return theory.operations_factor(alpha, int(_best(alpha, c)), c)


def _expected(alpha: float, gamma: float) -> float:
    return theory.expected_tokens(alpha, int(gamma))


def _tokens() -> FigureData:
    curves = family("γ = {}", (1, 3, 5, 7, 10), (*ALPHAS, 1.0), _expected)
    curves += family("unlimited", (0,), UP_TO_09, lambda alpha, _: theory.limit_tokens(alpha))
    return FigureData(
        "tokens",
        "Expected tokens per round",
        "Leviathan Figure 2, Equation 1",
        "Each further drafted token counts only if all before it were accepted, so long drafts pay only where α is high.",
        (Panel("acceptance rate α", "tokens per round", curves),),
    )


def _best_gamma() -> FigureData:
    return FigureData(
        "best-gamma",
        "The best draft length",
        "Leviathan Figure 3, Section 3.5",
        "0 where α ≤ c: then no draft length helps.",
        (Panel("acceptance rate α", "best γ", family("c = {}", COSTS, ALPHAS, _best), steps=True),),
    )


def _trade_off() -> FigureData:
    lengths = (2, 3, 5, 10)
    work = family("γ = {}", lengths, ALPHAS, lambda alpha, gamma: theory.operations_factor(alpha, int(gamma), 0.0))
    return FigureData(
        "trade-off",
        "Speed-up and arithmetic operations, c = ĉ = 0",
        "Leviathan Figure 4 and Table 1, Theorems 3.8 and 3.11",
        "What is gained in time is paid in operations: drafted tokens that are rejected were scored for nothing.",
        (
            Panel("acceptance rate α", "speed-up", family("γ = {}", lengths, ALPHAS, _expected)),
            Panel("acceptance rate α", "operations factor", work),
        ),
    )


def _at_best() -> FigureData:
    return FigureData(
        "at-best-gamma",
        "Speed-up and operations at the best draft length, ĉ = c",
        "Leviathan Theorems 3.8 and 3.11 at the γ of Section 3.5",
        "The operations jump where the best γ does.",
        (
            Panel("acceptance rate α", "speed-up", family("c = {}", COSTS, ALPHAS, _best_speed)),
            Panel("acceptance rate α", "operations factor", family("c = {}", COSTS, ALPHAS, _best_operations)),
        ),
    )


def _oracle() -> FigureData:
    costs = (0.02, 0.1)

    def gain(alpha: float, c: float) -> float:
        return 100.0 * (theory.oracle_walltime_factor(alpha, c) / _best_speed(alpha, c) - 1.0)

    speed = family("best γ, c = {}", costs, UP_TO_09, _best_speed)
    speed += family("oracle, c = {}", costs, UP_TO_09, theory.oracle_walltime_factor)
    return FigureData(
        "oracle",
        "What knowing the draft length in advance would add",
        "Leviathan Section 3.5: E[tokens] = 1 / (1 − α), drafting exactly what is accepted",
        "The paper's “up to ~60 %” above the best fixed γ. The oracle is a bound: it never drafts in vain.",
        (
            Panel("acceptance rate α", "speed-up", speed),
            Panel("acceptance rate α", "gain over the best fixed γ, %", family("c = {}", COSTS, ALPHAS, gain)),
        ),
    )


def _loop() -> FigureData:
    lengths = LENGTHS[:8]
    tasks = {chinchilla.alpha_of(task): task for task in chinchilla.TOKENS_PER_LOOP}

    def milliseconds(gamma: float, _: float = 0.0) -> float:
        return chinchilla.loop_ms(int(gamma))

    def per_128(gamma: float, alpha: float) -> float:
        return 128 * milliseconds(gamma) / _expected(alpha, gamma)

    def each(value: Callable[[float, float], float]) -> tuple[Curve, ...]:
        return tuple(family(f"{task}, α = {{:.2f}}", (alpha,), lengths, value)[0] for alpha, task in tasks.items())

    measured = tuple(
        Curve(f"{task}, measured", (0.0, 4.0), (128 * chinchilla.TARGET_MS, 128 * token), "points")
        for task, token in chinchilla.TOKEN_MS.items()
    )
    return FigureData(
        "loop",
        "Chen's trade-off from closed form: 14.1 ms a target step, 1.8 ms a draft step",
        "Chen Figure 1; measured points from Chen Table 1 (mean token time × 128)",
        "α is chosen so that K = 4 gives the tokens per round read off Chen's figure. The loop grows linearly, its yield "
        "flattens: the time for 128 tokens has a minimum. Chen measured it at K = 3 for XSum; the closed form has it at K = "
        "4, nearly flat: it leaves out what sampling adds to each drafted token.",
        (
            Panel("draft length K", "ms for 128 tokens", each(per_128) + measured),
            Panel("draft length K", "tokens per round / (K + 1)", each(lambda k, a: theory.efficiency(a, int(k)))),
            Panel("draft length K", "ms per round", family("14.1 + 1.8 K", (0,), lengths, milliseconds)),
        ),
    )


def _limits() -> FigureData:
    alpha = 0.8

    def with_slope(gamma: float, slope: float) -> float:
        verify = {n: 1.0 + slope / 100 * (n - 1) for n in (1, int(gamma) + 1)}
        return theory.measured_speedup(alpha, int(gamma), 0.05, verify)

    def flat(gamma: float, c: float) -> float:
        return theory.walltime_factor(alpha, int(gamma), c)

    return FigureData(
        "limits",
        "What limits the speed-up at α = 0.8",
        "Leviathan Theorem 3.8 (left); the same with a verification that grows with each token (right, c = 0.05)",
        "Left: a dearer draft. Right: a target pass that costs so much more for each further token it scores; at + 100 % "
        "scoring five tokens costs five passes, and speculation can only lose.",
        (
            Panel("draft length γ", "speed-up, flat verification", family("c = {}", (0.0, *COSTS, 0.5), LENGTHS, flat), 1.0),
            Panel(
                "draft length γ",
                "speed-up, growing verification",
                family("+ {} %", (0, 2, 5, 10, 20, 50, 100), LENGTHS, with_slope),
                reference=1.0,
            ),
        ),
    )


def toy_laws(temperature: float) -> tuple[Tensor, Tensor]:
    """Toy targets and drafts at a temperature. → [CONTEXTS, VOCABULARY] each, float64

    A target has the logits −2 log rank (its first token has 0.61 at temperature 1); its draft has them with Gaussian noise
    of standard deviation 0.5.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = -2.0 * torch.arange(1, VOCABULARY + 1, dtype=torch.float64).log()
    wrong = logits + 0.5 * torch.randn(CONTEXTS, VOCABULARY, generator=generator, dtype=torch.float64)
    return (logits / temperature).softmax(-1).expand(CONTEXTS, -1), (wrong / temperature).softmax(-1)


def _rules() -> FigureData:
    temperatures = tuple(round(0.1 * i, 1) for i in range(1, 16))
    laws = {temperature: toy_laws(temperature) for temperature in temperatures}

    def mean(rule: Callable[[Tensor, Tensor], Tensor], itself: bool = False) -> tuple[float, ...]:
        return tuple(float(rule(target, target if itself else draft).mean()) for target, draft in laws.values())

    by_rule = (
        Curve("ratio rule, Σ min(p, q)", temperatures, mean(theory.acceptance_probability)),
        Curve("by position, one race for both", temperatures, mean(theory.race_acceptance_probability)),
        Curve("match rule, Σ p·q", temperatures, mean(theory.match_acceptance_probability)),
        Curve("match, draft = target, Σ p²", temperatures, mean(theory.match_acceptance_probability, itself=True)),
        Curve("rejection, 1/M", temperatures, mean(theory.rejection_acceptance_probability)),
    )
    alpha = mean(theory.acceptance_probability)[temperatures.index(1.0)]

    def lenient(lenience: float, lost: float) -> float:
        return float(theory.lenient_acceptance_probability(*laws[1.0], lenience).mean()) - lost

    leniences = tuple(round(0.05 * i, 2) for i in range(1, 21))
    return FigureData(
        "rules",
        "Acceptance of other rules, and what lenience costs",
        "The notes' “naive” rule, Leviathan A.2 and A.5; docs/proof.md derives the distance",
        "Toy distributions: Zipf-like targets, drafts with noisy logits. “Draw from the target, accept if "
        "equal” is exact, too, but "
        "rejects even a perfect draft wherever the target is unsure; by the same race for both it loses little. Lenience "
        "buys each point of acceptance with a point of total variation.",
        (
            Panel("temperature", "accepted share", by_rule),
            Panel(
                "lenience l (temperature 1)",
                "probability",
                family("acceptance α_l", (0.0,), leniences, lenient)
                + family("distance from the target, α_l − α", (alpha,), leniences, lenient),
            ),
        ),
    )


MAKERS: dict[str, Callable[[], FigureData]] = {
    "tokens": _tokens,
    "best-gamma": _best_gamma,
    "trade-off": _trade_off,
    "at-best-gamma": _at_best,
    "oracle": _oracle,
    "loop": _loop,
    "limits": _limits,
    "rules": _rules,
}
