"""The transformers module that a student is, before its training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.errors import ModelError, in_one_line


def student_module(source: Any, config: Any, weights: Mapping[str, Tensor], refusal: str) -> Any:
    """Of the class of `source`, without what loading did to that, in float32, embeddings and head frozen.

    refusal: what a `ModelError` begins with where the weights don't fit the configuration.
    """
    student = type(source)(config)
    try:
        student.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"{refusal}: {in_one_line(error)}") from error
    student.generation_config = copy.deepcopy(source.generation_config)
    student = student.float()
    for frozen in (student.get_input_embeddings(), student.get_output_embeddings()):
        frozen.requires_grad_(False)
    return student
