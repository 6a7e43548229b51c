"""What an audit says of a truncation that nobody declared: the limit, where its tokens tell, and nothing otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.audit.temperature import TemperatureFit
from outrider.audit.truncation import ENOUGH, TruncationFit, told
from outrider.sampling import SamplingSettings, standardize


def laws(count: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return 2.0 * torch.randn(count, vocabulary, generator=generator)


def sampled(settings: SamplingSettings, count: int = 900, vocabulary: int = 1200) -> tuple[Tensor, Tensor]:
    """Laws at temperature 1, and tokens by other settings."""
    logits = laws(count, vocabulary)
    drawn = torch.multinomial(standardize(logits, settings), 1, generator=torch.Generator().manual_seed(3)).squeeze(-1)
    return standardize(logits, SamplingSettings(temperature=1.0)), drawn


def fitted(settings: SamplingSettings, count: int = 900, vocabulary: int = 1200) -> TruncationFit:
    law, drawn = sampled(settings, count, vocabulary)
    fit = TruncationFit()
    for part in (slice(0, 500), slice(500, None)):
        fit.add(law[part], drawn[part])
    return fit


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SamplingSettings(temperature=1.0, top_k=50), ("top-k", 50)),
        (SamplingSettings(temperature=1.0, top_k=4), ("top-k", 4)),
        (SamplingSettings(temperature=1.0, top_p=0.9), ("top-p", 0.9)),
        (SamplingSettings(temperature=1.0, min_p=0.1), ("min-p", 0.1)),
    ],
)
def test_the_limit_is_named(settings: SamplingSettings, named: tuple[str, float]) -> None:
    found = fitted(settings).undeclared()
    assert found is not None
    assert (found.setting, found.value) == named
    assert found.positions == 900
    assert f"no token lies outside {named[0]} {named[1]:g}" in told(found)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 1.2])
def test_nothing_is_named_where_nothing_is_cut(temperature: float) -> None:
    fit = fitted(SamplingSettings(temperature=temperature))
    assert fit.undeclared() is None
    assert told(None) == ""


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        (SamplingSettings(temperature=1.0, top_k=50), True),
        (SamplingSettings(temperature=1.0, top_p=0.9), True),
        (SamplingSettings(temperature=0.4), False),
        (SamplingSettings(temperature=0.25), False),
    ],
)
def test_of_a_cut_and_a_cooler_law_the_likelier_explains_the_tokens(settings: SamplingSettings, cut: bool) -> None:
    """Cold enough, no token passes some limit, either; and cut text fits a lower temperature better than its own."""
    law, drawn = sampled(settings)
    temperature, truncation = TemperatureFit(), fitted(settings).undeclared()
    temperature.add(law, drawn)
    likeliest = temperature.likeliest(1.0)
    assert truncation is not None
    assert likeliest is not None
    gain = temperature.gain(1.0, likeliest.temperature)
    exact = law.gather(-1, drawn.unsqueeze(-1)).log().sum()
    cooler = (law.log() / likeliest.temperature).log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).sum()
    assert gain == pytest.approx(float(cooler - exact), rel=0.15)
    assert (truncation.gain > gain) is cut


def test_few_tokens_tell_nothing() -> None:
    assert fitted(SamplingSettings(temperature=1.0, top_p=0.98), count=int(ENOUGH / 0.02) - 50).undeclared() is None


def test_small_vocabularies_and_what_is_expected() -> None:
    """Expected counts are the law's own masses, ties and limits beyond the vocabulary included."""
    law = torch.tensor([[0.4, 0.3, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])
    fit = TruncationFit()
    fit.add(law, torch.tensor([1, 3]))
    expected = dict(zip(fit._limits, fit._expected.tolist(), strict=True))
    came = dict(zip(fit._limits, fit._came.tolist(), strict=True))
    assert expected["top-k", 2.0] == pytest.approx(0.3 + 0.5)
    assert expected["top-k", 50.0] == pytest.approx(0.0)
    assert expected["top-p", 0.7] == pytest.approx(0.3 + 0.25)
    assert expected["min-p", 0.5] == 0.0
    assert came["top-k", 2.0] == 0  # the second law's are all the likeliest
    assert fit._gain[fit._limits.index(("top-k", 2.0))] == pytest.approx(-math.log(0.7) - math.log(0.5))
    assert fit.wanted == 998
