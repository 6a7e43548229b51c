"""Models that keep a state: whatever is rolled back, copied or read again, logits are those of the plain forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.bench.peers import Pair, contenders
from outrider.costs.table import PadsWidths
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, EarlyExitDrafter, ModelDrafter, PromptLookupDrafter, SpeculativeDrafter, SuffixDrafter
from outrider.errors import ModelError, ParameterError
from outrider.models.cache import recurrent_cache
from outrider.models.cache.recurrent_cache import STEPS
from outrider.models.cache.runs import Mark, RunStates, _tensors_of
from outrider.models.kinds import engine_kind
from outrider.models.recurrent.model import RecurrentModel
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int4, quantize_to_int8
from outrider.models.weights.same_bits import use_same_bits
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.sharded.loading import plan_of
from tests.helpers.marks import thinned
from tests.helpers.ragged import last_state, ragged_difference, reference, score, some_tokens
from tests.helpers.tiny_models import RECURRENT, module, tiny, tiny_recurrent

# Nearly all compute their recurrences in float32, whatever their weights are, in sums that differ by hundreds of steps.
CLOSE = {"Lfm2": 1e-9}
SINGLE = 5e-3


def far(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max())


@pytest.mark.parametrize("architecture", RECURRENT)
def test_ragged_calls_and_rollbacks_give_the_logits_of_the_plain_pass(architecture: str) -> None:
    model = tiny_recurrent(architecture)
    rows = [some_tokens(n, n) for n in (40, 23, 31)]
    sequences = [model.open() for _ in rows]
    try:
        wanted = [reference(model, row) for row in rows]
        assert ragged_difference(model, sequences, rows, wanted) <= CLOSE.get(architecture, SINGLE)
    finally:
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("architecture", RECURRENT)
def test_far_rollbacks_copies_and_long_passes_do(architecture: str) -> None:
    """What is rolled back further than states are known is scored once more; sequences that move take their states along."""
    model = tiny_recurrent(architecture)
    close = CLOSE.get(architecture, SINGLE)
    tokens = some_tokens(96, 9)
    want = reference(model, tokens)
    first, second = model.open(), model.open()
    prefill(model, [first, second], [tokens[:50], tokens[: STEPS + 1]])
    second.truncate(10)
    got = score(model, [first, second], [tokens[50:55], tokens[10:14]])
    assert far(got[0], want[50:55]) <= close
    assert far(got[1], want[10:14]) <= close
    first.truncate(52)
    got = score(model, [second, first], [tokens[14:20], tokens[52:54]])
    assert far(got[0], want[14:20]) <= close
    for at in range(54, 70):
        (got_one,) = score(model, [first], [tokens[at : at + 1]])
        assert far(got_one, want[at : at + 1]) <= close
    first.truncate(51)
    assert far(score(model, [first], [tokens[51:57]])[0], want[51:57]) <= close
    copy = model.open()
    model.copy_prefix(first, copy, 55)
    assert far(score(model, [copy], [tokens[55:59]])[0], want[55:59]) <= close
    second.close()  # the copy moves into its slot
    got = score(model, [copy, first], [tokens[59:61], tokens[57 : 57 + STEPS + 2]])
    assert far(got[0], want[59:61]) <= close
    assert far(got[1], want[57 : 57 + STEPS + 2]) <= close
    first.close()
    assert far(score(model, [copy], [tokens[61:62]])[0], want[61:62]) <= close
    copy.close()


@pytest.mark.parametrize("architecture", RECURRENT)
def test_token_by_token_without_rules_known_here_it_is_the_same(architecture: str) -> None:
    """Layers whose rule is not known go over single tokens, their projections apart: what any layer can do."""
    model = tiny_recurrent(architecture)
    assert all(mixer.ruled is not None for mixer in model._mixers)
    plain = model.with_a_cache_of_its_own()
    plain._mixers = [replace(mixer, ruled=None) for mixer in model._mixers]
    assert any(mixer.inputs for mixer in plain._mixers) or architecture == "FalconH1"  # which scales its input before
    tokens = some_tokens(30, 2)
    found = []
    for each in (model, plain):
        sequence = each.open()
        prefill(each, [sequence], [tokens[:9]])
        score(each, [sequence], [[5, 6, 7, 8]])
        sequence.truncate(10)
        sequence.truncate(9)
        found.append(
            torch.cat([score(each, [sequence], [part])[0] for part in (tokens[9:14], tokens[14:15], tokens[15:30])])
        )
        sequence.close()
    assert far(*found) <= CLOSE.get(architecture, 1e-3)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_what_fills_a_pass_up_leaves_no_state(architecture: str) -> None:
    """Shorter rows are padded to the longest one, lone tokens among them; nothing is padded to widths that are quicker."""
    model = RecurrentModel(module(architecture))
    assert not isinstance(model, PadsWidths)
    tokens = some_tokens(30, 3)
    want = reference(model, tokens)
    sequence = model.open()
    prefill(model, [sequence], [tokens[:9]])
    for start, stop in ((9, 10), (10, 11), (11, 14), (14, 15), (15, 21), (21, 22)):
        (got,) = score(model, [sequence], [tokens[start:stop]])
        assert far(got, want[start:stop]) <= CLOSE.get(architecture, SINGLE)
    other = model.open()
    rows = torch.tensor([[tokens[22], 3, 3], [tokens[0], 3, 3]])
    out = model.score([sequence, other], rows, [1, 1], "all")
    assert out is not None
    assert far(out[0, :1], want[22:23]) <= CLOSE.get(architecture, SINGLE)
    assert far(torch.cat(score(model, [sequence, other], [tokens[23:24], tokens[1:2]])), want[[23, 1]]) <= CLOSE.get(
        architecture, SINGLE
    )


@pytest.mark.parametrize("make", [pack_linears, quantize_to_int8, quantize_to_int4])
@pytest.mark.parametrize("architecture", ["Mamba", "Jamba", "Mamba2", "Lfm2"])
def test_weights_that_layers_read_themselves_are_left_as_they_are(architecture: str, make: Any) -> None:
    """Mamba's mixers multiply with a weight of a child that they do not call."""
    if make is quantize_to_int4 and not can_quantize(4):
        pytest.skip("no kernels for 4 bits here")
    plain, made = module(architecture, dtype=torch.float32), module(architecture, dtype=torch.float32)
    make(made)
    model = RecurrentModel(made)
    tokens = some_tokens(20, 1)
    with torch.inference_mode():
        want = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    sequence = model.open()
    prefill(model, [sequence], [tokens[:9]])
    got = torch.cat([score(model, [sequence], [part])[0].clone() for part in (tokens[9:14], tokens[14:15], tokens[15:])])
    bound = {pack_linears: 1e-4, quantize_to_int8: 0.15, quantize_to_int4: 0.8}[make]
    assert float((got - want[9:]).square().mean().sqrt() / want.std()) <= bound
    sequence.close()


def test_limits_of_steps_are_the_plain_passs() -> None:
    """transformers' own single steps of Mamba 2 ignore them, so that its logits depend on how a text is cut into passes."""
    model = RecurrentModel(module("Mamba2", time_step_limit=(0.1, 0.5)))
    rows = [some_tokens(n, n) for n in (40, 23, 31)]
    sequences = [model.open() for _ in rows]
    assert ragged_difference(model, sequences, rows, [reference(model, row) for row in rows]) <= SINGLE


def test_rows_do_not_change_each_other() -> None:
    model = tiny_recurrent("Lfm2")
    tokens = some_tokens(30, 4)
    alone = model.open()
    prefill(model, [alone], [tokens[:12]])
    (want,) = score(model, [alone], [tokens[12:17]])
    other, again = model.open(), model.open()
    prefill(model, [other, again], [tokens[3:29], tokens[:12]])
    got = score(model, [alone, other, again], [tokens[17:18], [3, 4], tokens[12:17]])[2]
    assert far(got, want) <= 1e-12
    for sequence in (alone, other, again):
        sequence.close()


def test_states_are_forgotten_but_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecurrentModel(module("Qwen3_5"))
    each = sum(state.nbytes for state in model.recurrent_cache._empty.values())
    monkeypatch.setattr(recurrent_cache, "KEPT_BYTES", 4 * each)
    tokens = some_tokens(60, 5)
    want = reference(model, tokens)
    sequence = model.open()
    prefill(model, [sequence], [tokens[:20]])
    for at in range(20, 50):
        score(model, [sequence], [tokens[at : at + 1]])
    known = sorted(model.recurrent_cache._marks[0])
    assert known == [20, *range(45, 51)]  # where the prompt ends, four older ones, the last pass's
    sequence.truncate(30)
    assert far(score(model, [sequence], [tokens[30:36]])[0], want[30:36]) <= SINGLE
    assert sorted(model.recurrent_cache._marks[0]) == [*range(30, 37)]
    sequence.close()
    assert not model.recurrent_cache._marks


def test_room_for_states_is_shared_and_what_is_kept_holds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecurrentModel(module("Qwen3_5"))
    each = sum(state.nbytes for state in model.recurrent_cache._empty.values())
    monkeypatch.setattr(recurrent_cache, "KEPT_BYTES", 4 * each)
    sequences = [model.open() for _ in range(4)]
    for sequence in sequences:  # one at a time
        prefill(model, [sequence], [some_tokens(9, 1)])
        score(model, [sequence], [some_tokens(20, 2)])
        sequence.truncate(12)
    for sequence in sequences:
        for _ in range(6):
            score(model, [sequence], [[3]])
    marks = model.recurrent_cache._marks
    assert [sorted(marks[sequence.slot]) for sequence in sequences] == [[12, 16, 17, 18]] * 4
    floors = [mark for sequence in sequences if (mark := marks[sequence.slot][12]) is not None]
    held = [states for mark in floors for states in mark.run.states.values()]
    assert all(isinstance(states, list) and len(states) == 1 for states in held)  # of twenty


@pytest.mark.parametrize("architecture", ["Qwen3_5", "Mamba", "Lfm2"])
def test_room_for_states_holds_whoever_is_beside(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's lone token is kept with what the whole pass has made, tokens of other rows among it."""
    model = RecurrentModel(module(architecture, max_position_embeddings=400))
    cache = model.recurrent_cache
    each = sum(state.nbytes for state in cache._empty.values())
    monkeypatch.setattr(recurrent_cache, "KEPT_BYTES", 40 * each)
    sequences = [model.open() for _ in range(2)]
    prefill(model, sequences, [some_tokens(20, 1), some_tokens(20, 2)])
    for step in range(60):
        score(model, sequences, [[3], some_tokens(8, step)])
        sequences[1].truncate(20)
    runs = {id(mark.run): mark.run for marks in cache._marks.values() for mark in marks.values() if mark is not None}
    tensors = [one for run in runs.values() for states in run.states.values() for one in _tensors_of(states)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    last = max(run.share for run in runs.values())
    assert sum(storages.values()) <= 40 * each + 3 * last
    assert len(cache._marks[0]) > 3


def test_a_pass_that_fails_leaves_states_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecurrentModel(module("Bamba"))
    tokens = some_tokens(30, 6)
    want = reference(model, tokens)
    sequence = model.open()
    prefill(model, [sequence], [tokens[:9]])
    last = model.module.get_output_embeddings()

    def interrupted(*given: object) -> Tensor:
        del given
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(model, [sequence], [tokens[9:14]])
    monkeypatch.undo()
    assert sequence.length == 9
    assert all("forward" not in part.__dict__ for part in model.module.modules())
    assert far(score(model, [sequence], [tokens[9:14]])[0], want[9:14]) <= SINGLE
    monkeypatch.setattr(model.recurrent_cache, "commit", interrupted)  # between the pass and what is noted of it
    with pytest.raises(KeyboardInterrupt):
        score(model, [sequence], [tokens[14:17]])
    monkeypatch.undo()
    sequence.truncate(14)
    assert far(score(model, [sequence], [tokens[14:20]])[0], want[14:20]) <= SINGLE
    sequence.close()


@pytest.mark.parametrize("architecture", ["Qwen3_5", "Lfm2", "Mamba2"])
def test_a_state_that_is_not_rolled_back_is_seen_when_a_model_is_opened(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mark, "of", last_state)
    with pytest.raises(ModelError, match="other logits through the slot cache"):
        RecurrentModel(module(architecture), name="forgetful")


DRAFTERS: dict[str, Any] = {
    "prompt lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "a recurrent model": lambda: ModelDrafter(tiny_recurrent("Lfm2", 1)),
    "a model with attention": lambda: ModelDrafter(tiny("Llama")),
    "a model with a draft of its own": lambda: SpeculativeDrafter(
        tiny_recurrent("Mamba2", 1), PromptLookupDrafter(), FixedLength(2)
    ),
    "itself": lambda: ModelDrafter(tiny_recurrent("Lfm2")),
}


@pytest.mark.parametrize(("drafter", "drawn"), thinned(DRAFTERS, [False, True]))
def test_speculation_writes_plain_decodings_texts(drafter: str, drawn: bool) -> None:
    """Greedy, and drawn by position: rows of different lengths, with drafts that are rejected in part."""
    target = tiny_recurrent("Lfm2")
    sampling = SamplingSettings(temperature=1.0, top_k=20) if drawn else SamplingSettings()
    prompts = [some_tokens(n, n) for n in (7, 40, 2, 13)]

    def texts(made: Drafter | None) -> list[list[int]]:
        requests = [Request(prompt, 30, RandomStream(7, i, by_position=True)) for i, prompt in enumerate(prompts)]
        found, _ = decode(target, requests, sampling, made, None if made is None else FixedLength(4))
        return found

    assert texts(DRAFTERS[drafter]()) == texts(None)


def test_in_bfloat16_short_convolutions_have_the_same_bits_in_any_width() -> None:
    """LFM 2's kind, on processors whose products are alike: then greedy texts are plain decoding's, ties and all."""
    made = module("Lfm2", dtype=torch.bfloat16, hidden_size=64, num_attention_heads=4, intermediate_size=96)
    pack_linears(made)
    if not use_same_bits(made):
        pytest.skip("products of this processor depend on the width")
    model = RecurrentModel(made)
    assert model.same_bits
    tokens = some_tokens(60, 8)
    sequence = model.open()
    prefill(model, [sequence], [tokens[:21]])
    together = torch.cat([score(model, [sequence], [part])[0].clone() for part in (tokens[21:38], tokens[38:43])])
    sequence.truncate(21)
    singly = torch.cat([score(model, [sequence], [[token]])[0].clone() for token in tokens[21:43]])
    assert torch.equal(together, singly)
    sequence.close()
    assert not RecurrentModel(module("Qwen3_5")).same_bits


def test_what_goes_with_attention_alone_is_refused() -> None:
    model = tiny_recurrent("Qwen3_5")
    assert not model.scores_alternatives
    with pytest.raises(ModelError, match="early-exit can't draft for tiny-Qwen3_5-0: its recurrent layers keep states"):
        EarlyExitDrafter(1).bind(model)
    with pytest.raises(ParameterError, match="compile can't be used with tiny-Qwen3_5-0, which has recurrent layers"):
        model.compile()
    with pytest.raises(ModelError, match="can't be used here: it has recurrent layers"):
        TransformersModel(module("Lfm2"))


def test_what_transformers_refuses_is_no_peer_and_ranks_refuse_them(tmp_path: Path) -> None:
    model, draft = tiny_recurrent("Qwen3_5"), tiny_recurrent("Lfm2")
    pair = Pair(model, draft)
    assert set(contenders(pair, pair)) == {
        "generate",
        "outrider",
        "outrider + lookup",
        "outrider + suffix",
        "outrider + draft",
    }
    assert "generate + assistant" in contenders(Pair(tiny("Llama"), draft), Pair(tiny("Llama"), draft))
    module("Lfm2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="can't be sharded: it has recurrent layers"):
        plan_of(tmp_path, "lfm", 2)


def test_the_engine_follows_from_the_layers() -> None:
    assert engine_kind(module("Lfm2")) is RecurrentModel
    assert engine_kind(module("Llama")) is TransformersModel
    assert engine_kind(module("T5")).has_encoder


def test_layers_that_do_not_go_on_over_many_tokens_are_found() -> None:
    """Mamba's formula for many tokens begins with nothing: later parts of a long prompt are taken in steps."""
    assert not tiny_recurrent("Mamba").recurrent_cache.goes_on
    assert tiny_recurrent("Mamba2").recurrent_cache.goes_on


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("Lfm2")
    monkeypatch.delattr("transformers.cache_utils.Cache.is_recording_past")
    monkeypatch.delattr(RunStates, "is_recording_past")
    with pytest.raises(ModelError, match="need a later transformers"):
        RecurrentModel(made)
