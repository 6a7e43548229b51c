"""On a GPU nothing in standardisation, drawing and acceptance may wait for the device: a round has one synchronisation.

Run with tensors on torch's "meta" device, which have shapes but no values, so that whatever reads one back to the host
raises. They take the paths of a GPU, since only a CPU has paths of its own.
"""

from __future__ import annotations

import pytest
import torch

from outrider.acceptance.verify import Uniforms, verify
from outrider.sampling import Context, draw, standardize
from tests.helpers.toys import SETTINGS

V, K, ROWS = 5000, 4, 3


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("point_mass", [False, True], ids=["model draft", "point mass"])
def test_a_round_on_the_device_reads_nothing_back(name: str, point_mass: bool) -> None:
    settings = SETTINGS[name]
    with torch.device("meta"):
        context = Context(torch.empty(9, dtype=torch.long), 4)
        probs = standardize(torch.empty(ROWS, K + 1, V, dtype=torch.bfloat16), settings, [context] * (ROWS * (K + 1)))
        drafted, tokens = None, torch.empty(ROWS, K, dtype=torch.long)
        if not point_mass:
            drafted = standardize(torch.empty(ROWS, K, V, dtype=torch.bfloat16), settings, [context] * (ROWS * K))
            tokens = draw(drafted, torch.empty(ROWS, K, dtype=torch.float64))
        uniforms = Uniforms(torch.empty(ROWS, K, dtype=torch.float64), torch.empty(ROWS, dtype=torch.float64))
        verdict = verify(probs, drafted, tokens, uniforms, torch.empty(ROWS, dtype=torch.long))
    assert verdict.num_accepted.shape == verdict.next_token.shape == (ROWS,)
    assert verdict.next_token.is_meta


def test_such_tensors_do_notice_a_read_back() -> None:
    probs = torch.empty(4, V, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        float(probs.sum())
