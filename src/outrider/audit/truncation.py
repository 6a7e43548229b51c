"""Whether the tokens of an audit tell of a truncation that nobody declared: transformers' own default was a top-k of 50.

Under the declared law the tokens beyond the k likeliest have a known share, and so have those outside a nucleus and those
less likely than a share of the likeliest. Where many of them are to be expected and none came, with each token drawn by
itself the chance of that is at most exp(-expected). So this is a remark about what went wrong, where a test has already
said that something did; p-values do not come from here. A cooler law avoids unlikely tokens, too: of both explanations
the one that makes the tokens likelier is told (`TemperatureFit.gain`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANKS = (2, 3, 4, 5, 8, 10, 15, 16, 20, 25, 30, 32, 40, 50, 60, 64, 80, 100, 128, 150, 200, 250, 256, 300, 400, 500, 1000)
"""Not 1: that is the best token alone, which a temperature of 0 gives, too."""
MASSES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)
SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
POSITIONS = 1000  # that are read
ENOUGH = 12.0  # expected where none came: a chance of 6e-6 for each of the limits that are looked at


@dataclass(frozen=True)
class Undeclared:
    """A limit that no token passed. setting: top-k, top-p or min-p. expected: how many of so many positions should have.

    gain: by how much the law that it leaves makes the tokens likelier, a log-likelihood.
    """

    setting: str
    value: float
    expected: float
    positions: int
    gain: float


class TruncationFit:
    """Adds up how many tokens were to be expected beyond each limit, and whether any came."""

    def __init__(self) -> None:
        self._limits = [("top-k", float(k)) for k in RANKS] + [("top-p", p) for p in MASSES] + [("min-p", m) for m in SHARES]
        self._expected = torch.zeros(len(self._limits), dtype=torch.float64)
        self._came = torch.zeros(len(self._limits), dtype=torch.float64)
        self._gain = torch.zeros(len(self._limits), dtype=torch.float64)
        self._read = 0

    @property
    def wanted(self) -> int:
        """How many positions more are read."""
        return POSITIONS - self._read

    def add(self, law: Tensor, tokens: Tensor) -> None:
        """law: untruncated, [n, V]. tokens: [n], each with a positive probability."""
        law, tokens = law[: self.wanted].double(), tokens[: self.wanted]
        self._read += len(law)
        own = law.gather(-1, tokens.unsqueeze(-1))
        ahead = law > own
        rank, before = ahead.sum(-1, keepdim=True), law.where(ahead, 0.0).sum(-1, keepdim=True)
        best = law.topk(min(max(RANKS), law.shape[-1])).values
        mass = best.cumsum(-1)
        ks = torch.tensor(RANKS, device=law.device)
        ps = torch.tensor(MASSES, dtype=law.dtype, device=law.device)
        shares = torch.tensor(SHARES, dtype=law.dtype, device=law.device)
        beyond_k = 1.0 - mass[:, ks.clamp(max=mass.shape[-1]) - 1]
        inside = (mass.unsqueeze(-1) < ps).sum(1)  # of each nucleus but the last one, or all of `best`
        known = mass.gather(-1, inside.clamp(max=mass.shape[-1] - 1))
        beyond_p = 1.0 - torch.maximum(known, ps)
        floor = best[:, :1] * shares
        beyond_m = torch.stack([law.where(law < edge.unsqueeze(-1), 0.0).sum(-1) for edge in floor.unbind(-1)], -1)
        expected = torch.cat([beyond_k, beyond_p, beyond_m], -1).clamp(min=0.0)
        came = torch.cat([rank >= ks, before >= ps, own < floor], -1)
        self._expected += expected.sum(0).cpu()
        self._came += came.double().sum(0).cpu()
        self._gain -= torch.log1p(-expected.clamp(max=1.0 - 1e-9)).sum(0).cpu()

    def undeclared(self) -> Undeclared | None:
        """The limit that leaves out most of what was to be expected, among those that no token passed."""
        silent = self._expected.where(self._came == 0, 0.0)
        most = int(silent.argmax())
        if float(silent[most]) < ENOUGH:
            return None
        return Undeclared(*self._limits[most], float(silent[most]), self._read, float(self._gain[most]))


def told(found: Undeclared | None) -> str:
    """A remark for the reason of a verdict, empty if there is nothing to say."""
    if found is None:
        return ""
    limit = f"{found.setting} {found.value:g}"
    return (
        f"; no token lies outside {limit}, where {found.expected:.0f} of {found.positions} were to be expected: was such a "
        "limit set and not declared?"
    )
