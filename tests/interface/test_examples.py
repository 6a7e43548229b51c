"""The examples run, small, and what they print follows from what they did."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from outrider.speculation.gain import expected_seconds
from outrider.speculation.workers import Context

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The examples set torch's threads for their own process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_environment_runs_and_tells_its_gain() -> None:
    module = example("environment")
    gain = module.measure(steps=6, lookahead=1, workers="threads", seed=1, samples=30)
    assert gain.steps == 6
    assert 0.0 < gain.beta <= 1.0
    assert gain.speedup == pytest.approx(gain.plain / gain.speculative)
    expected = expected_seconds(gain.acceptance, gain.slow, gain.consume, gain.fast, 1)
    assert gain.predicted == pytest.approx((gain.slow + gain.consume) / expected)


def test_the_simulated_world_leaves_the_old_one_as_it_is() -> None:
    """A guess that is rejected must have changed nothing."""
    module = example("environment")
    world = module.new_world(3)
    places, velocities = world.places.copy(), world.velocities.copy()
    context = Context(np.random.default_rng(0), lambda: False)
    after = module.simulate(world, 3, context)
    assert np.array_equal(world.places, places)
    assert np.array_equal(world.velocities, velocities)
    assert not np.array_equal(after.places, places)
    stopped = module.simulate(world, 3, Context(np.random.default_rng(0), lambda: True))
    assert np.array_equal(stopped.places, places)


@pytest.mark.slow
def test_image_tokens_run_and_tell_their_gain() -> None:
    module = example("image_tokens")
    gain, image = module.measure(count=1, length=3, steps=1, seed=1)
    assert len(image) == module.SIDE**2
    assert max(image) < module.LEVELS, "the token before an image is in none"
    assert 0.0 < gain.alpha < 1.0
    assert gain.c > 0.0
    assert all(math.isfinite(value) for value in (gain.speedup, gain.predicted_by_costs, gain.predicted_closed_form))


def test_the_neighbours_law_is_that_of_the_counts() -> None:
    """By hand, for the place after a left and an upper neighbour that stand together often."""
    module = example("image_tokens")
    images = module.pictures(300, 5)
    drafter = module.NeighbourDrafter(images)
    law = drafter._logits.softmax(-1)
    rows = images.reshape(-1, module.SIDE, module.SIDE)
    left, above, here = rows[:, 1:, :-1].flatten(), rows[:, :-1, 1:].flatten(), rows[:, 1:, 1:].flatten()
    pair = torch.mode(left * module.VOCABULARY + above).values
    chosen = here[left * module.VOCABULARY + above == pair]
    counted = torch.bincount(chosen, minlength=module.VOCABULARY) / len(chosen)
    found = law[pair // module.VOCABULARY, pair % module.VOCABULARY]
    assert float(found.sum()) == pytest.approx(1.0)
    assert torch.allclose(found, counted.double(), atol=4.0 / len(chosen))
