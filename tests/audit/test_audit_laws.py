"""The laws that an audit holds beside the right one: of planted faults, and of logits within rounding."""

from __future__ import annotations

import pytest
import torch

from outrider.audit.planted import FAULTS, fault_law
from outrider.audit.support import rounding_needed, truncated_first, within_rounding
from outrider.sampling import SamplingSettings
from tests.helpers.audit_texts import ONE
from tests.helpers.toys import WRONG_RULES, table


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_laws_and_leave_untested_positions_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(5, 9, generator=generator, dtype=torch.float64)
    draft = torch.rand(5, 9, generator=generator, dtype=torch.float64)
    target[0, 3], draft[1, 4] = 0.0, 0.0
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    draft[4] = torch.nan
    tested = torch.tensor([True, True, True, False, True])
    law = fault_law(FAULTS[name], target, draft, tested)
    assert torch.allclose(law.sum(-1), torch.ones(5, dtype=torch.float64))
    assert bool((law >= 0).all())
    assert torch.equal(law[3:], target[3:])
    assert float((law[:3] - target[:3]).abs().max()) > 0.01


def test_noise_used_again_has_the_law_that_is_predicted() -> None:
    """200,000 draws each; 0.005 is above 4 σ of a frequency."""
    generator = torch.Generator().manual_seed(3)
    target, draft = (torch.rand(1, 7, generator=generator, dtype=torch.float64) ** 2 for _ in range(2))
    target, draft = target / target.sum(), draft / draft.sum()
    count = 200_000
    noise = torch.rand(2, count, generator=generator, dtype=torch.float64)
    residual = (target - draft).clamp(min=0)
    for name, again in (("noise of the proposal used again", 0), ("noise of the rejection used again", 1)):
        proposed = torch.searchsorted(draft[0].cumsum(0), noise[0]).clamp(max=6)
        kept = noise[1] * draft[0, proposed] < target[0, proposed]
        recovered = torch.searchsorted(residual[0].cumsum(0) / residual.sum(), noise[again]).clamp(max=6)
        tokens = torch.where(kept, proposed, recovered)
        found = torch.bincount(tokens, minlength=7) / count
        law = fault_law(FAULTS[name], target, draft, torch.tensor([True]))[0]
        assert torch.allclose(found.double(), law, atol=0.005)


@pytest.mark.parametrize("rule", ["always accept", "residual = target", "ratio upside down"])
def test_a_faults_law_is_what_the_faulty_rule_gives(rule: str) -> None:
    """The closed form beside the law of the rule itself, enumerated."""
    from tests.helpers.enumerate import round_joint

    name = {
        "always accept": "every draft token accepted",
        "residual = target": "recovered token drawn from the target",
        "ratio upside down": "acceptance ratio upside down",
    }[rule]
    target, draft = table(1, 4, order=0).probs_after([]), table(2, 4, order=0).probs_after([])
    joint = round_joint(WRONG_RULES[rule], lambda _: target, lambda _: draft, 4, 1)
    law = fault_law(FAULTS[name], target.unsqueeze(0), draft.unsqueeze(0), torch.tensor([True]))
    assert torch.allclose(joint.sum(1), law[0], atol=1e-9)


LOGITS = torch.tensor([5.0, 4.0, 3.99, 1.0, -torch.inf])


@pytest.mark.parametrize(
    ("sampling", "token", "rounding", "expected"),
    [
        (SamplingSettings(), 1, 0.1, False),
        (SamplingSettings(), 1, 0.5, True),
        (SamplingSettings(temperature=1.0, top_k=2), 2, 0.001, False),
        (SamplingSettings(temperature=1.0, top_k=2), 2, 0.01, True),
        (SamplingSettings(temperature=1.0, top_p=0.5), 1, 0.01, False),
        (SamplingSettings(temperature=1.0, top_p=0.57), 1, 0.01, True),
        (SamplingSettings(temperature=1.0, min_p=0.37), 1, 0.001, False),
        (SamplingSettings(temperature=1.0, min_p=0.37), 1, 0.01, True),
        (ONE, 4, 50.0, False),
    ],
)
def test_the_edge_of_a_law_is_as_wide_as_the_rounding(
    sampling: SamplingSettings, token: int, rounding: float, expected: bool
) -> None:
    assert within_rounding(LOGITS, token, sampling, rounding) is expected


def test_what_rounding_would_be_needed() -> None:
    assert rounding_needed(LOGITS, 1, SamplingSettings()) == pytest.approx(0.5, rel=0.02)
    assert rounding_needed(LOGITS, 4, ONE) == float("inf")
    assert rounding_needed(LOGITS, 2, SamplingSettings(temperature=1.0, top_k=2)) == pytest.approx(0.005, rel=0.02)


def test_what_processors_and_bias_did_is_not_done_again() -> None:
    """The logits have it already: a second time would need the texts, and would favour token 3 twice."""

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"called again, with {ids.shape} and {scores.shape}")

    settings = SamplingSettings(temperature=0.5, top_k=3, logit_bias={3: 3.5}, processors=(processor,))
    assert [truncated_first(LOGITS, token, settings) for token in range(5)] == [True, True, True, False, False]
