"""An agent in a simulated world: the policy network and the simulator run at the same time (`outrider.speculate`).

    python examples/environment.py

A probe steers through a swarm of gravitating bodies with turbulence. f is a deep policy network, which gives the law of the
next thrust; g is the simulator, which integrates the equations of motion after that thrust. Both are slow. f* is the network
imitated by least squares on a layer of random features, some hundred times cheaper. While f still computes, g already runs
on a thrust drawn from f*, and is kept with probability min(1, f / f*). The trajectory's law is that of the network.

Prints the seconds of a step, one after the other and speculatively, and the gain beside the one that is predicted from the
parts' times and the share of guesses kept. Take as many processors as there is work side by side: two, with threads.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import outrider
from outrider.speculation.gain import Gain, measured_gain
from outrider.speculation.run import Outcome
from outrider.speculation.workers import Context

BODIES, SUBSTEPS, DT = 130, 12, 0.005
GRID = 8
THRUSTS = np.array([(0, 0), *((np.cos(a), np.sin(a)) for a in np.arange(8) * np.pi / 4)])
Array = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Places and velocities, the probe's first. [BODIES + 1, 2] each"""

    places: Array
    velocities: Array


def new_world(seed: int) -> World:
    """A turning disc of bodies, the probe at its edge."""
    rng = np.random.default_rng(seed)
    places = rng.normal(size=(BODIES + 1, 2))
    places[0] = (2.0, 0.0)
    return World(places, 0.5 * places[:, ::-1] * (-1, 1))


def simulate(world: World, thrust: int, context: Context) -> World:
    """g: the world after the thrust, by the leapfrog method. Turbulence is drawn from the run's own randomness.

    A function of its arguments: the old world stays as it is. It stops early once nobody wants its result.
    """
    places, velocities = world.places.copy(), world.velocities.copy()
    push = np.zeros_like(places)
    push[0] = 2.0 * THRUSTS[thrust]
    for _ in range(SUBSTEPS):
        if context.cancelled():
            break
        velocities += 0.5 * DT * (gravity(places) + push)
        places += DT * velocities
        velocities += 0.5 * DT * (gravity(places) + push) + 0.02 * context.rng.normal(size=places.shape)
    return World(places, velocities)


def gravity(places: Array) -> Array:
    """Accelerations, softened at short distances. [N, 2]"""
    apart = places[None, :, :] - places[:, None, :]
    pull = (np.square(apart).sum(-1) + 0.05) ** -1.5
    return np.asarray((apart * pull[..., None]).sum(1) / BODIES)


def features(world: World) -> Tensor:
    """What the policy sees: where the bodies are around the probe, and how it moves. [GRID² + 4]"""
    around = world.places[1:] - world.places[0]
    edges = np.linspace(-4, 4, GRID + 1)
    counts = np.histogram2d(around[:, 0], around[:, 1], bins=(edges, edges))[0]
    seen = np.concatenate([np.sqrt(counts).ravel(), world.places[0], world.velocities[0]])
    return torch.from_numpy(seen).float()


class Policy(nn.Module):
    """f: a deep residual network with random weights, and a softmax over the thrusts."""

    def __init__(self, seed: int, width: int = 2048, depth: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.enter = nn.Linear(GRID**2 + 4, width)
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
            self.leave = nn.Linear(width, len(THRUSTS))

    def forward(self, seen: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.enter(seen))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits: Tensor = 4.0 * self.leave(hidden)
        return logits

    def law(self, world: World) -> Tensor:
        """f(x): probabilities of the thrusts."""
        with torch.inference_mode():
            return self.forward(features(world)).softmax(-1)


@dataclass(frozen=True)
class Imitation:
    """f*: a layer of random features and least squares onto the network's logits."""

    enter: Tensor
    leave: Tensor

    def law(self, world: World) -> Tensor:
        """f*(x): probabilities of the thrusts."""
        return (expand(features(world), self.enter) @ self.leave).softmax(-1)


def expand(seen: Tensor, enter: Tensor) -> Tensor:
    """The features, random combinations of them, and a constant."""
    return torch.cat([seen, torch.tanh(seen @ enter), torch.ones_like(seen[..., :1])], dim=-1)


def imitate(policy: Policy, seed: int, steps: int) -> Imitation:
    """Fit the imitation on worlds of their own, reached by random thrusts."""
    rng = np.random.default_rng(seed + 1)
    context = Context(rng, lambda: False)
    seen, world = [], new_world(seed + 1)
    for number in range(steps):
        if number % 40 == 0:
            world = new_world(seed + 2 + number)
        world = simulate(world, int(rng.integers(len(THRUSTS))), context)
        seen.append(features(world))
    inputs = torch.stack(seen)
    generator = torch.Generator().manual_seed(seed)
    enter = 0.2 * torch.randn(inputs.shape[1], 64, generator=generator)
    with torch.inference_mode():
        wanted = policy(inputs)
    rows = expand(inputs, enter)
    ridge = rows.T @ rows + 3.0 * torch.eye(rows.shape[1])
    return Imitation(enter, torch.linalg.solve(ridge, rows.T @ wanted))


def policy_law(policy: Policy, world: World) -> Tensor:
    """The law as a function of a module, for worker processes."""
    torch.set_num_threads(1)
    return policy.law(world)


def run(
    policy: Policy, imitation: Imitation, steps: int, lookahead: int, workers: str, seed: int
) -> tuple[list[Outcome], float]:
    """A trajectory. → its steps, seconds"""
    slow = partial(policy_law, policy)
    options = {"lookahead": lookahead, "workers": workers, "with_context": True, "seed": seed}
    with outrider.speculate(slow, imitation.law, simulate, **options) as speculation:  # type: ignore[arg-type]
        world = new_world(seed)
        for outcome in speculation.chain(world, 3):  # warm-up
            world = outcome.value
        start = time.perf_counter()
        outcomes = list(speculation.chain(world, steps))
        return outcomes, time.perf_counter() - start


def measure(steps: int, lookahead: int, workers: str, seed: int, samples: int = 300) -> Gain:
    """Plain and speculative trajectories of the same agent."""
    torch.set_num_threads(1)  # one processor for f, one for g
    policy = Policy(seed).eval()
    imitation = imitate(policy, seed, samples)
    plain, plain_seconds = run(policy, imitation, steps, 0, workers, seed)
    drafted, seconds = run(policy, imitation, steps, lookahead, workers, seed)
    return measured_gain(plain, plain_seconds, drafted, seconds, lookahead)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--workers", choices=("threads", "processes"), default="threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    gain = measure(given.steps, given.lookahead, given.workers, given.seed)
    print(json.dumps(asdict(gain)) if given.json else gain)


if __name__ == "__main__":
    main()
