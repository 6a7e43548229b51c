"""The race as one kernel for a GPU: interpreted on this machine, and compiled for GPUs that are not here."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers.triton import run_with_triton

GPUS = (75, 80, 90)


def try_all() -> None:
    """Winners of both ways, of rows of several lengths and types, cut and not, and of rows without a law."""
    from outrider.sampling import race_triton
    from outrider.sampling.race import race_on_device
    from outrider.sampling.race_triton import race_in_one

    race_triton.MOST_PARTS = 2  # so that a program has several steps
    found = []
    for vocabulary in (1, 33, 2500):
        for dtype in (torch.float32, torch.float64):
            weights = torch.randn(8, 2 * vocabulary, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
            weights = weights.to(dtype)[:, :vocabulary]
            weights[4] = 0.0
            weights[5, vocabulary // 2] = torch.nan
            weights[6, -1] = torch.inf
            weights[7, 1::2] = 0.0
            keys = torch.tensor([(7919 * i + 3) * 10**14 % 2**63 for i in range(8)])
            positions = torch.arange(8) + 2**31 - 4
            both = [race(weights, keys, positions).tolist() for race in (race_in_one, race_on_device)]
            other = race_in_one(weights, keys, positions + 1).tolist()
            found.append([*both, other])
    print(json.dumps(found))


def compile_all() -> None:
    """As for a call of `race_in_one`; the assembler comes with Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outrider.sampling import race_triton

    types = {"weights": "*fp32", "keys": "*i64", "positions": "*i64", "times": "*fp64", "tokens": "*i64", "totals": "*fp64"}
    types |= {"stride": "i64", "V": "i32", "steps": "i32", "SIZE": "constexpr"}
    source = ASTSource(fn=race_triton._race, signature=types, constexprs={"SIZE": race_triton.BLOCK})
    print([len(triton.compile(source, target=GPUTarget("cuda", gpu, 32)).asm["cubin"]) > 0 for gpu in GPUS])


@pytest.mark.slow
def test_it_gives_the_same_tokens() -> None:
    out = run_with_triton("from tests.devices.test_race_triton import try_all; try_all()", interpret=True)
    for ours, wanted, elsewhere in json.loads(out.splitlines()[-1]):
        assert ours == wanted
        assert ours[4:7] == [-1, -1, -1]
        assert len(set(wanted)) == 2 or elsewhere != wanted  # another place, other numbers


@pytest.mark.slow
def test_it_compiles() -> None:
    out = run_with_triton("from tests.devices.test_race_triton import compile_all; compile_all()", interpret=False)
    assert out.splitlines()[-1] == str([True] * len(GPUS))
