"""Inference mode for functions that call each other, and the small tensors of a pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.support.device_data import places_from
from outrider.support.inference import in_inference_mode


@in_inference_mode
def doubled(x: Tensor, times: int = 2) -> Tensor:
    """Of a tensor."""
    if times > 2:
        return doubled(x, times - 1) + x
    return x * times


def test_a_function_runs_in_that_mode_wherever_it_is_called() -> None:
    x = torch.ones(2, requires_grad=True)
    for times in (2, 4):
        out = doubled(x, times=times)
        assert out.is_inference()
        assert not out.requires_grad
        assert out.tolist() == [times, times]
        with torch.inference_mode():
            assert doubled(x, times).tolist() == [times, times]
    assert not torch.is_inference_mode_enabled()
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Of a tensor.")


@pytest.mark.parametrize("starts", [(0,), (7,), (0, 3), (5, 5, 1)])
@pytest.mark.parametrize("count", [1, 4])
def test_places_of_rows(starts: tuple[int, ...], count: int) -> None:
    found = places_from(starts, count, torch.device("cpu"))
    assert found.dtype is torch.long
    assert found.tolist() == [[start + i for i in range(count)] for start in starts]
