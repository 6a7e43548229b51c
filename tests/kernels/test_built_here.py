"""Where kernels can be built they are: the other tests of theirs are left out where there are none."""

from __future__ import annotations

import shutil

import pytest

from outrider.kernels.build import COMPILERS, level_here
from outrider.kernels.models import kernels
from outrider.kernels.sampling import sampling_kernels


@pytest.mark.skipif(level_here() is None, reason="this processor or system has none")
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no compiler")
def test_a_processor_and_a_compiler_are_enough() -> None:
    assert kernels() is not None
    assert sampling_kernels() is not None
