"""Draft heads of every kind with random weights, and the exact law of what they draft for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import HeadDrafter
from outrider.heads.config import HeadConfig, save_head
from outrider.heads.layers import make_network
from outrider.models.base import LanguageModel
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import Context, SamplingSettings, standardize
from tests.helpers.enumerate import target_joint
from tests.helpers.samples import LENGTH, SAMPLES, V
from tests.helpers.tiny_models import VOCABULARY, module
from tests.helpers.toys import PROMPT

Shape = Literal["autoregressive", "layered", "blockwise"]  # layered: autoregressive, reading a layer's states, too
KINDS: list[Shape] = ["autoregressive", "layered", "blockwise"]


def write_head(
    folder: Path, kind: Shape, vocabulary: int = VOCABULARY, tokens: list[int] | None = None, **options: Any
) -> Path:
    """A head with random weights for the tiny targets, in float64."""
    ids = torch.tensor(tokens if tokens is not None else range(vocabulary))
    shape: dict[str, Any] = {
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "window": 7,
        **options,
    }
    if kind == "layered":
        shape["layers"] = (1,)
    config = HeadConfig("blockwise" if kind == "blockwise" else "autoregressive", "tiny", 32, vocabulary, len(ids), **shape)
    torch.manual_seed(3)
    network = make_network(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    save_head(folder, config, ids, network.state_dict(), torch.float64)
    return folder


@cache
def small_target() -> TransformersModel:
    """A transformers model of three tokens, whose law can be enumerated."""
    return TransformersModel(module("Llama", 4, vocab_size=V), name="three")


def exact_joint(target: TransformersModel, settings: SamplingSettings) -> torch.Tensor:
    @cache
    def law(new: tuple[int, ...]) -> torch.Tensor:
        tokens = torch.tensor([[*PROMPT, *new]])
        with torch.inference_mode():
            logits = target.module(input_ids=tokens).logits[0, -1:]
        return standardize(logits, settings, [Context(tokens[0], len(PROMPT))])[0]

    return target_joint(law, V, LENGTH)


def sample(
    target: TransformersModel, drafter: Any, settings: SamplingSettings, length: Any
) -> tuple[list[list[int]], list[Round]]:
    asked = [Request(PROMPT, LENGTH, RandomStream(0, i)) for i in range(SAMPLES // 3)]
    tokens, rounds = decode(target, asked, settings, drafter, length)
    return tokens, [record for row in rounds for record in row]


def first_draft(
    target: LanguageModel, path: Path, tokens: list[int], count: int, dtype: str = "auto"
) -> tuple[HeadDrafter, DraftRow, torch.Tensor]:
    """The same for any target."""
    drafter = HeadDrafter(path, 0.1, dtype)
    drafter.bind(target)
    sequence = target.open()
    target.score([sequence], torch.tensor([tokens[:-1]]), [len(tokens) - 1], "none")
    row = DraftRow(list(tokens), len(tokens), RandomStream(1), sequence)
    return drafter, row, propose(drafter, target, row, count, fresh=True)


def propose(drafter: HeadDrafter, target: LanguageModel, row: DraftRow, count: int, fresh: bool = False) -> torch.Tensor:
    from outrider.drafters.base import DraftContext

    context = DraftContext(SamplingSettings(temperature=1.0), target, VOCABULARY)
    if fresh:
        drafter.begin([row], context)
    plan = FixedLength(count).start().plan(drafter.prospects(row), count, len(row.tokens))
    proposal = drafter.propose([row], [plan], context)
    assert proposal.probs is not None
    return proposal.probs[0]
