"""Encoder–decoders: the logits of the plain pass however tokens are fed, and the exact law, whoever drafts.

False-alarm rate of the chi-square tests: each rejects at p < 1e-6, and there are fewer than 30. The seeds are fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SelfDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.models.base import Source
from outrider.models.decoder_rules import decoder_prefix
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.encoder_states import source_key
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.request.own_rules import with_own_rules
from outrider.sampling import Context, SamplingSettings, standardize
from tests.helpers.encoder_decoder import FOUR, ruled, some_source
from tests.helpers.enumerate import target_joint
from tests.helpers.marks import slow, thinned
from tests.helpers.ragged import ragged_difference, score, some_tokens
from tests.helpers.tiny_models import ENCODER_DECODERS, module, tiny, tiny_encoder_decoder
from tests.helpers.toys import WRONG_RULES, plant_rule

CLOSE = 1e-9
ALARM = 1e-6
COUNT = 16


def reference(model: EncoderDecoderModel, source: Source, tokens: list[int]) -> Tensor:
    """The logits of a pass of the whole model without any cache. [T, V]"""
    key = "input_features" if model.hears else "input_ids"
    inputs = {key: source.unsqueeze(0) if isinstance(source, Tensor) else torch.tensor([source])}
    with torch.inference_mode():
        logits: Tensor = model.module(**inputs, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("architecture", ENCODER_DECODERS)
def test_ragged_sources_calls_and_rollbacks_give_the_logits_of_the_plain_pass(architecture: str) -> None:
    model = tiny_encoder_decoder(architecture)
    rows = [some_tokens(n, n) for n in (40, 23, 31)]
    sources = [some_source(model, i, length) for i, length in enumerate((17, 3, 30))]
    wanted = [reference(model, source, row) for source, row in zip(sources, rows, strict=True)]
    sequences = [model.open(source=source) for source in sources]
    try:
        assert ragged_difference(model, sequences, rows, wanted) <= CLOSE
    finally:
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("architecture", FOUR)
def test_the_modules_own_pass_is_left_as_it_was(architecture: str) -> None:
    """Positions are told for the time of a pass only: the model stays transformers' own."""
    untouched = module(architecture)
    model = EncoderDecoderModel(module(architecture))
    source, tokens = some_source(model, 1), some_tokens(9, 1)
    score(model, [model.open(source=source)], [tokens])
    with torch.inference_mode():
        key = "input_features" if model.hears else "input_ids"
        inputs = {key: source.unsqueeze(0) if isinstance(source, Tensor) else torch.tensor([source])}
        inputs["decoder_input_ids"] = torch.tensor([tokens])
        torch.testing.assert_close(model.module(**inputs).logits, untouched(**inputs).logits, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", FOUR)
def test_the_encoder_runs_once_a_sequence(architecture: str) -> None:
    model = tiny_encoder_decoder(architecture)
    calls: list[int] = []
    hook = model.module.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    projected: list[int] = []
    names = ("EncDecAttention.k", "encoder_attn.k_proj")
    hooks = [
        m.register_forward_hook(lambda *_: projected.append(1)) for n, m in model.module.named_modules() if n.endswith(names)
    ]
    layers = len(hooks)
    assert layers == 3
    try:
        requests = [request(model, some_source(model, i), 8, 0, i) for i in range(2)]
        decode(model, requests, SamplingSettings(), RandomDrafter(), FixedLength(2))
    finally:
        for one in (hook, *hooks):
            one.remove()
    assert len(calls) == 2
    assert len(projected) == 2 * layers


@pytest.mark.parametrize("architecture", FOUR)
@pytest.mark.parametrize("kind", ["same", "one weight differs", "another scale"])
def test_a_draft_with_the_targets_encoder_does_not_run_its_own(architecture: str, kind: str) -> None:
    """As distilled drafts have it. Whether it is shared or not, the tokens are those of plain decoding."""
    target, draft = EncoderDecoderModel(module(architecture)), EncoderDecoderModel(module(architecture))
    with torch.no_grad():
        for parameter in draft.module.get_decoder().layers.parameters() if architecture != "T5" else ():
            parameter.mul_(0.9)
        if kind == "one weight differs":
            list(draft.module.get_encoder().parameters())[-1].view(-1)[-1] += 0.5
        if kind == "another scale":  # of which no weight tells
            for part in draft.module.get_encoder().modules():
                for name in ("scaling", "relative_attention_max_distance", "variance_epsilon"):
                    if isinstance(getattr(part, name, None), int | float):
                        setattr(part, name, 5 if "distance" in name else 0.7)
    calls: list[int] = []
    hook = draft.module.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    requests = [request(target, some_source(target, i), 8, 0, i) for i in range(2)]
    wanted = decode(target, requests, SamplingSettings(), None, FixedLength(0))[0]
    try:
        drafter = ModelDrafter(draft)
        drafter.bind(target)
        calls.clear()
        tokens, rounds = decode(target, requests, SamplingSettings(), drafter, FixedLength(2))
    finally:
        hook.remove()
    assert tokens == wanted
    assert len(calls) == (0 if kind == "same" else 2)
    assert any(record.drafted for row in rounds for record in row)
    for model in (target, draft):
        assert not model._open
        assert not model._states


@pytest.mark.parametrize("architecture", ["T5", "Bart"])
def test_what_an_encoder_made_with_other_weights_is_not_read(architecture: str) -> None:
    """A policy that drafted for its reference once, and is trained while a stream of the reference, or its own, is open."""
    reference, policy = EncoderDecoderModel(module(architecture)), EncoderDecoderModel(module(architecture))
    source, sampling = some_source(policy, 0), SamplingSettings()
    drafter = ModelDrafter(policy)
    drafter.bind(reference)

    def written(model: EncoderDecoderModel, draft: ModelDrafter | None = None) -> list[int]:
        return decode(model, [request(model, source, 8)], sampling, draft, FixedLength(2))[0][0]

    before = written(reference, drafter)
    assert written(policy) == before
    streams = [model.open(8, source) for model in (reference, policy)]
    with torch.no_grad():
        for number, parameter in enumerate(policy.module.get_encoder().parameters()):
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    fresh = EncoderDecoderModel(module(architecture))
    fresh.module.load_state_dict(policy.module.state_dict())
    wanted = policy.module.get_encoder()(**policy._inputs(source)).last_hidden_state
    opened = policy.open(8, source)
    torch.testing.assert_close(policy._states.known(source_key(policy._inputs(source))), wanted)
    opened.close()
    assert written(policy) == written(fresh)
    drafter.bind(reference)
    assert written(reference, drafter) == before  # it is another encoder now
    assert policy._states._lender is None
    for stream in streams:
        stream.close()
    assert not policy._states
    assert not reference._states


def request(model: EncoderDecoderModel, source: Source, count: int, seed: int = 0, row: int = 0) -> Request:
    return Request(decoder_prefix(model, source), count, RandomStream(seed, row), model.end_tokens, source=source)


def greedy_by_transformers(model: EncoderDecoderModel, source: Source, count: int) -> list[int]:
    """The new tokens of `module.generate` with one beam. It counts a forced first token as new; here it is prefix."""
    key = "input_features" if model.hears else "input_ids"
    inputs = {key: source.unsqueeze(0) if isinstance(source, Tensor) else torch.tensor([source])}
    prefix = decoder_prefix(model, source)
    count += len(prefix) - 1
    with torch.inference_mode():
        out = model.module.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=count, use_cache=False)[
            0
        ].tolist()
    new: list[int] = out[len(prefix) :] if out[: len(prefix)] == prefix else out
    return new


def drafters(architecture: str) -> dict[str, Drafter]:
    return {
        "encoder-decoder": ModelDrafter(tiny_encoder_decoder(architecture, 1), step_seconds=1e-3),
        "itself": SelfDrafter(),
        "decoder-only": ModelDrafter(tiny("Llama"), step_seconds=1e-3),
        "copies": PromptLookupDrafter(),
        "suffix": SuffixDrafter(),
        "random": RandomDrafter(),
        "several": ChoiceDrafter(
            [PromptLookupDrafter(), ModelDrafter(tiny_encoder_decoder(architecture, 1), step_seconds=1e-3)]
        ),
        "speculative": SpeculativeDrafter(
            tiny_encoder_decoder(architecture, 1), PromptLookupDrafter(), FixedLength(2), step_seconds=1e-3
        ),
        "speculative, decoder-only": SpeculativeDrafter(
            tiny("Llama"), PromptLookupDrafter(), FixedLength(2), step_seconds=1e-3
        ),
    }


@pytest.mark.parametrize(
    ("architecture", "drafting"),
    [
        *(("T5", name) for name in drafters("T5")),
        *((name, drafting) for name in FOUR[1:] for drafting in ("encoder-decoder", "copies", "several")),
    ],
)
def test_greedy_output_is_that_of_transformers(architecture: str, drafting: str) -> None:
    """In a ragged batch, in float64: every token, with sources of different length, under the config's rules."""
    model = ruled(architecture)
    sources = [some_source(model, i, length) for i, length in enumerate((9, 21, 4))]
    wanted = transformers_outputs(architecture)
    assert len({token for row in wanted for token in row}) > 10  # not one token again and again
    requests = [request(model, source, COUNT) for source in sources]
    settings = with_own_rules(model, SamplingSettings(), [one.prompt for one in requests], COUNT)
    tokens, rounds = decode(model, requests, settings, drafters(architecture)[drafting], FixedLength(3))
    assert tokens == wanted
    assert any(record.drafted for row in rounds for record in row)
    assert not model._open


@cache
def transformers_outputs(architecture: str) -> list[list[int]]:
    model = ruled(architecture)
    return [greedy_by_transformers(model, some_source(model, i, length), COUNT) for i, length in enumerate((9, 21, 4))]


TINY = {"vocab_size": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
LENGTH = 3
SAMPLES = 1000


# Factors of the decoder's matrices, of its head and of its attention to the source, with which a law depends on all of them.
WEIGHTS = {"T5": (3, 1, 3), "Bart": (1, 1, 3), "Marian": (6, 3, 0.3), "Whisper": (1, 3, 3)}
DRAFT = {"T5": 2, "Bart": 1, "Marian": 5, "Whisper": 3}  # seeds of drafts that are right often enough for all wrong rules


@cache
def five(architecture: str, seed: int = 0) -> EncoderDecoderModel:
    """A vocabulary of five tokens; its law depends on source and past."""
    overrides: dict[str, Any] = {**TINY, **({"decoder_vocab_size": 5} if architecture == "Marian" else {})}
    made = module(architecture, seed, **overrides)
    inside, head, across = WEIGHTS[architecture]
    with torch.no_grad():
        for name, parameter in made.get_decoder().named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(across if "encoder_attn." in name or "EncDecAttention." in name else inside)
        for parameter in made.get_output_embeddings().parameters():
            parameter.mul_(head)
    return EncoderDecoderModel(made, name=f"five-{architecture}-{seed}")


def distance(laws: Sequence[Tensor]) -> float:
    """The mean total variation between two of them."""
    pairs = [(a, b) for i, a in enumerate(laws) for b in laws[:i]]
    return sum(float((a - b).abs().sum()) / 2 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("architecture", FOUR)
def test_the_laws_that_are_tested_depend_on_source_and_past(architecture: str) -> None:
    """Or a cache of other tokens, or another source's, would not be seen."""
    model, settings = five(architecture), LAWS["temperature 1"]
    laws = [law_of(model, some_source(model, i, length), [1, 3], settings) for i, length in enumerate((7, 3))]
    assert distance([laws[0](past) for past in ((), (0,), (3,), (4,), (3, 4), (4, 4))]) > 0.2
    assert distance([law(()) for law in laws]) > 0.2


def law_of(model: EncoderDecoderModel, source: Source, prefix: list[int], settings: SamplingSettings) -> Any:
    def law(new: tuple[int, ...]) -> Tensor:
        tokens = [*prefix, *new]
        context = Context(torch.tensor(tokens), len(prefix))
        return standardize(reference(model, source, tokens)[-1:], settings, [context])[0]

    return law


def p_value(tokens: Sequence[Sequence[int]], joint: Tensor) -> float:
    counts = Counter(tuple(row) for row in tokens)
    expected = joint.flatten() * len(tokens)
    every = torch.cartesian_prod(*[torch.arange(5)] * LENGTH)
    observed = torch.tensor([counts[tuple(map(int, index))] for index in every])
    if int(observed[expected < 1e-9].sum()):
        return 0.0
    small = expected < 5
    got = [*observed[~small].tolist(), int(observed[small].sum())]
    want = [*expected[~small].tolist(), float(expected[small].sum())]
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if w > 1e-9]
    if len(pairs) == 1:
        return 1.0
    scale = sum(g for g, _ in pairs) / sum(w for _, w in pairs)
    return float(stats.chisquare([g for g, _ in pairs], [w * scale for _, w in pairs]).pvalue)


def sample(
    model: EncoderDecoderModel,
    sources: Sequence[Source],
    prefix: list[int],
    settings: SamplingSettings,
    drafter: Drafter,
    count: int = SAMPLES,
) -> list[list[list[int]]]:
    """`count` continuations of each source, all in one ragged batch. → by source"""
    requests = [
        Request(prefix, LENGTH, RandomStream(7, i), source=sources[i % len(sources)]) for i in range(count * len(sources))
    ]
    tokens, _ = decode(model, requests, settings, drafter, FixedLength(2))
    return [tokens[i :: len(sources)] for i in range(len(sources))]


LAWS = {
    "temperature 1": SamplingSettings(temperature=1.0),
    "top-p and penalty": SamplingSettings(temperature=0.8, top_p=0.9, repetition_penalty=1.3),
}


def small_drafters(architecture: str) -> dict[str, Drafter]:
    one = ModelDrafter(five(architecture, DRAFT[architecture]), step_seconds=1e-3)
    reads = ModelDrafter(TransformersModel(module("Llama", 3, vocab_size=5)), step_seconds=1e-3)
    return {"encoder-decoder": one, "decoder-only": reads, "copies": PromptLookupDrafter(), "suffix": SuffixDrafter()}


@pytest.mark.parametrize(
    ("architecture", "drafting", "law"),
    [
        slow("T5", "encoder-decoder", "temperature 1"),
        slow("T5", "encoder-decoder", "top-p and penalty"),
        slow("T5", "decoder-only", "temperature 1"),
        slow("T5", "copies", "temperature 1"),
        slow("Bart", "encoder-decoder", "temperature 1"),
        ("Bart", "suffix", "top-p and penalty"),
        slow("Marian", "encoder-decoder", "top-p and penalty"),
        slow("Whisper", "encoder-decoder", "temperature 1"),
    ],
)
def test_sampled_texts_follow_the_exact_law_of_their_source(architecture: str, drafting: str, law: str) -> None:
    """The joint law of three tokens, enumerated by plain passes, against what a ragged batch of two sources draws."""
    model, settings = five(architecture), LAWS[law]
    sources = [some_source(model, i, length) for i, length in enumerate((7, 3))]
    joints = [target_joint(law_of(model, source, [1, 3], settings), 5, LENGTH) for source in sources]
    drawn = sample(model, sources, [1, 3], settings, small_drafters(architecture)[drafting])
    for tokens, joint in zip(drawn, joints, strict=True):
        assert p_value(tokens, joint) > ALARM
    assert p_value(drawn[0], joints[1]) < ALARM  # and the test would see the wrong one


@pytest.mark.parametrize("architecture", [FOUR[0], *map(slow, FOUR[1:])])
@pytest.mark.parametrize("rule", thinned(WRONG_RULES, every=3))
def test_wrong_rules_are_seen(rule: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rule(monkeypatch, rule)
    model, settings = five(architecture), LAWS["temperature 1"]
    source = some_source(model, 0, 7)
    (drawn,) = sample(model, [source], [1, 3], settings, small_drafters(architecture)["encoder-decoder"])
    assert p_value(drawn, target_joint(law_of(model, source, [1, 3], settings), 5, LENGTH)) < ALARM
