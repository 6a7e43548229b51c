"""What a pass computes of its tokens before its first layer, by our kernels: angles, what is seen, and what is joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outrider.kernels.models import Kernels, kernels
from outrider.models.cache.masks import AttentionPattern, make_mask
from outrider.models.kernels.rows import RotaryAngles, replace_rows
from tests.helpers.tiny_models import module

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 32), ((3, 5), 1), ((2, 300), 33), ((0, 2), 4)])
def test_angles_are_those_of_the_positions(built: Kernels, shape: tuple[int, int], count: int) -> None:
    draw = torch.Generator().manual_seed(4)
    positions = torch.randint(0, 120_000, shape, generator=draw)
    frequencies = 1e5 ** (-torch.arange(count) / count)
    for times in (1.0, 1.3):
        cos, sin = built.ops.angles(positions, frequencies, times)
        angles = (positions.float().unsqueeze(-1) * frequencies).double().repeat(1, 1, 2)
        assert cos.shape == sin.shape == (*shape, 2 * count)
        torch.testing.assert_close(cos.double(), times * angles.cos(), rtol=0.0, atol=3e-7)
        torch.testing.assert_close(sin.double(), times * angles.sin(), rtol=0.0, atol=3e-7)
        turned = built.ops.angles(positions.T, frequencies, times)
        assert torch.equal(turned[0].transpose(0, 1), cos)
    for wrong in ((positions.int(), frequencies), (positions.reshape(-1), frequencies), (positions, frequencies.double())):
        with pytest.raises(RuntimeError):
            built.ops.angles(*wrong, 1.0)


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("columns", [0, 1, 40])
def test_what_is_seen_is_what_a_mask_says(built: Kernels, window: int | None, columns: int) -> None:
    draw = torch.Generator().manual_seed(5)
    positions, at = (torch.randint(0, 60, (3, 9), generator=draw) for _ in range(2))
    for own in (None, at):
        want = make_mask(positions, columns, AttentionPattern({"full_attention": window}, False), at=own)
        assert torch.equal(built.ops.seen(positions, own, columns, window or 0), want)
    nowhere = torch.full_like(positions, -1)
    want = make_mask(positions, columns, AttentionPattern({"full_attention": window}, False), at=nowhere)
    assert torch.equal(built.ops.seen(positions, nowhere, columns, window or 0), want)
    for wrong in ((positions, at[:1], columns, 0), (positions, None, -1, 0), (positions, None, columns, -1)):
        with pytest.raises(RuntimeError):
            built.ops.seen(*wrong)


def test_what_is_joined_has_the_bits_of_its_norms(built: Kernels) -> None:
    draw = torch.Generator().manual_seed(6)
    parts = [torch.randn(2, 5, 2 * size, generator=draw)[..., :size] for size in (24, 8, 17)]
    weights = [torch.rand(part.shape[-1], generator=draw) for part in parts]
    normed = [built.ops.rms_norm(part, weight, 1e-5, 0.5) for part, weight in zip(parts, weights, strict=True)]
    want = torch.cat(normed, -1)
    assert torch.equal(built.ops.join(parts, weights, 1e-5, 0.5, 49), want)
    assert torch.equal(built.ops.join(parts, weights, 1e-5, 0.5, 60), nn.functional.pad(want, (0, 11)))
    for wrong, said in (
        ((parts, weights, 1e-5, 0.5, 48), "wider than its result"),
        ((parts, weights[:2], 1e-5, 0.5, 49), "has a norm"),
        (([parts[0], parts[1][:, :4]], weights[:2], 1e-5, 0.5, 49), "other rows"),
        ((parts[:1], weights[1:2], 1e-5, 0.5, 49), "as long as its weight"),
    ):
        with pytest.raises(RuntimeError, match=said):
            built.ops.join(*wrong)


@pytest.mark.parametrize(
    ("scaling", "replaced"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0}, True),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
            True,
        ),
        ({"rope_type": "dynamic", "factor": 4.0}, False),
    ],
)
def test_rotary_positions_that_do_not_depend_on_the_context_are_replaced(scaling: dict[str, object], replaced: bool) -> None:
    ours = kernels()
    assert ours is not None
    rope = {"rope_theta": 1e4, **scaling}
    made = module("Llama", dtype=torch.float32, rope_parameters=rope)
    own = made.model.rotary_emb
    replace_rows(made, ours)
    found = made.model.rotary_emb
    assert isinstance(found, RotaryAngles) is replaced
    x, at = torch.zeros(1, 9, 8), torch.arange(60, 69)[None]
    for want, got in zip(own(x, at), found(x, at), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6)
    assert found(x.bfloat16(), at)[0].dtype is torch.bfloat16
    assert found.config is own.config  # and whatever else a model reads of it
    assert not hasattr(found, "nothing")


def test_what_only_looks_like_rotary_positions_stays() -> None:
    class InterleavedRotaryEmbedding(nn.Module):
        inv_freq: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.5]))

        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, -1)
            return angles.cos(), angles.sin()

    class FarRotaryEmbedding(InterleavedRotaryEmbedding):
        """Others from some context on, as old models made them: a scale of its own, and frequencies that stay."""

        last, changes = 100_000, "scale"

        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            far = int(position_ids.max()) > self.last
            if far and self.changes == "frequencies":
                self.inv_freq *= 0.9
            angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)
            times = 1.2 if far and self.changes == "scale" else 1.0
            return times * angles.cos(), times * angles.sin()

    class NearRotaryEmbedding(FarRotaryEmbedding):
        last = 1000

    class ChangingRotaryEmbedding(FarRotaryEmbedding):
        changes = "frequencies"

    class AskedForMoreRotaryEmbedding(InterleavedRotaryEmbedding):
        def forward(self, x: Tensor, position_ids: Tensor, more: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x, position_ids)

    ours = kernels()
    assert ours is not None
    odd = (FarRotaryEmbedding(), NearRotaryEmbedding(), ChangingRotaryEmbedding(), AskedForMoreRotaryEmbedding())
    assert replace_rows(nn.Sequential(InterleavedRotaryEmbedding(), *odd), ours) == 0
    assert all(torch.equal(one.inv_freq, torch.tensor([1.0, 0.5])) for one in odd)  # trying them changes nothing
