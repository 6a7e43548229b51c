"""Prompts that begin alike: the same texts, and beginnings read once."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.drafters import EarlyExitDrafter, HeadDrafter, ModelDrafter, SelfDrafter, SuffixDrafter
from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.models.cache.prefix_cache import BLOCK, PrefixCache, give_prefix_cache, prefix_cache_of
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import _shared, keep, prefill
from tests.helpers.heads import write_head
from tests.helpers.tiny_models import module, tiny, tiny_encoder_decoder, tiny_recurrent

MIB = 2**20


def text_of(count: int, seed: int = 0) -> list[int]:
    """Token ids."""
    chosen = random.Random(seed)
    return [chosen.randrange(5, 300) for _ in range(count)]


@pytest.fixture(scope="module")
def draft(draft_folder: Path) -> TextModel:
    return outrider.load(draft_folder, dtype="float64")


@pytest.fixture(scope="module")
def head(target: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), "layered", target.vocab_size)


def drafter_of(name: str, draft: TextModel, head: Path) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "suffix": SuffixDrafter,
        "model": lambda: ModelDrafter(draft),
        "head": lambda: HeadDrafter(head),
        "first layers": lambda: EarlyExitDrafter(1),
        "itself": SelfDrafter,
    }
    return made[name]()


@contextmanager
def reading(*models: Any) -> Iterator[list[int]]:
    """How many tokens of prompts each pass reads; not those with which an engine tries something beside."""
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for model in models:

            def counting(
                rows: Any, tokens: Any, lengths: list[int], logits: str = "all", score: Any = model.score_few
            ) -> Any:
                read.extend([sum(lengths)] if logits == "none" and rows[0].model in models else [])
                return score(rows, tokens, lengths, logits)

            patch.setattr(model, "score_few", counting)
        yield read


SHARED = text_of(100)
PROMPTS = [[*SHARED, *text_of(20, 1)], [*SHARED, *text_of(40, 2)], SHARED, text_of(50, 3), SHARED[:70]]


@pytest.mark.parametrize("name", ["none", "suffix", "model", "head", "first layers", "itself"])
def test_texts_are_the_same_and_beginnings_are_read_once(target: TextModel, draft: TextModel, head: Path, name: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 24, "logprobs": True, "ignore_eos": True}

    def answered(limit: int) -> tuple[list[outrider.Result], int]:
        given = drafter_of(name, draft, head)
        with (
            outrider.ContinuousBatch(target, draft=given, num_draft_tokens=3, batch_size=2, prefix_cache=limit) as batch,
            reading(target) as read,
        ):
            results = [batch.submit(prompt, seed=i, **options).result() for i, prompt in enumerate(PROMPTS)]
            further = [one.tokens for one in results]
            for i, (prompt, new) in enumerate(zip(PROMPTS, further, strict=True)):  # the next turn
                results.append(batch.submit([*prompt, *new, 7, 8], seed=i, **options).result())
        assert prefix_cache_of(target) is None  # nothing is kept once it is closed
        return results, sum(read)

    want, all_read = answered(0)
    found, read = answered(64)
    for one, other in zip(found, want, strict=True):
        assert one.tokens == other.tokens
        assert [made.counts for made in one.rounds] == [made.counts for made in other.rounds]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    whole = BLOCK * (100 // BLOCK)
    first = [0, whole, whole, 0, BLOCK * (70 // BLOCK)]
    second = [BLOCK * ((len(prompt) + 24 - 1) // BLOCK) for prompt in PROMPTS]
    assert [one.cached_tokens for one in found] == [*first, *second]
    assert not any(one.cached_tokens for one in want)
    if name == "itself":  # which reads each prompt a second time
        assert read < all_read / 3
        return
    assert all_read == sum(len(prompt) - 1 for prompt in PROMPTS) * 2 + 26 * len(PROMPTS)
    assert read == all_read - sum(first) - sum(second)


@pytest.mark.parametrize("name", ["none", "model", "head"])
def test_prompts_that_come_together_are_read_once(target: TextModel, draft: TextModel, head: Path, name: str) -> None:
    prompt = text_of(1000, 4)
    given = drafter_of(name, draft, head)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 4}
    want = [outrider.generate(target, prompt, draft=None, seed=seed, **options).tokens for seed in range(4)]
    with (
        outrider.ContinuousBatch(target, draft=given, num_draft_tokens=2, batch_size=4, prefix_cache=64) as batch,
        reading(target, draft) as read,
    ):
        answers = [batch.submit(prompt, seed=seed, **options) for seed in range(4)]
        found = [answer.result() for answer in answers]
    if given is None:  # else other numbers are drawn
        assert [one.tokens for one in found] == want
    assert sum(read) <= (1 + (name == "model")) * (999 + 3 * BLOCK)
    first, *others = sorted(one.cached_tokens for one in found)
    most = BLOCK * (999 // BLOCK)
    assert first == 0
    assert all(most - BLOCK < count <= most for count in others)  # one may have begun with some by itself


@pytest.mark.parametrize("limit", [0, 64])
def test_a_list_of_prompts_in_one_pass_is_read_once(target: TextModel, limit: int) -> None:
    """Without a cache that outlives it, too."""
    assert isinstance(target, TransformersModel)
    give_prefix_cache(target, limit * MIB)
    try:
        rows = [target.open(700) for _ in range(3)]
        prompts = [text_of(600, 5), text_of(600, 5), [*text_of(200, 5), *text_of(90, 6)]]
        with reading(target) as read:
            prefill(target, rows, prompts)
        assert [row.length for row in rows] == [600, 600, 290]
        assert [row.taken for row in rows] == [0, 576, 192]
        assert sum(read) == 600 + 24 + 98
        for row in rows:
            row.close()
    finally:
        give_prefix_cache(target, 0)


def test_what_was_used_longest_ago_goes_first(target: TextModel) -> None:
    """The tree keeps to its limit, and nothing is left in it without what comes before it."""
    assert isinstance(target, TransformersModel)
    row = target.open(400)
    prefill(target, [row], [text_of(BLOCK)])
    size = sum(tensor.nbytes for tensor in target.block_of(row, 0))
    row.close()
    target.prefix_cache = cache = PrefixCache(6 * size)
    try:
        texts = {name: [*text_of(BLOCK, 9), *text_of(2 * BLOCK, name)] for name in range(1, 4)}
        for name in (1, 2, 1, 3):
            row = target.open(400)
            prefill(target, [row], [texts[name]])
            row.close()
            assert cache.bytes <= cache.limit
            assert cache.bytes == size * len(cache._used)
        known = {name: sum(1 for _ in cache._path(target, text)) for name, text in texts.items()}
        assert known == {1: 3, 2: 2, 3: 3}  # the end of 2 went
        assert all(block.of[block.tokens] is block for block in cache._used)
    finally:
        target.prefix_cache = None


def test_memory_is_given_back_at_once(target: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the collector comes by, which counts objects and not their bytes."""
    assert isinstance(target, TransformersModel)
    made: list[weakref.ref[torch.Tensor]] = []
    block_of = target.block_of

    def noting(*given: Any) -> list[torch.Tensor]:
        held = block_of(*given)
        made.extend(map(weakref.ref, held))
        return held

    monkeypatch.setattr(target, "block_of", noting)
    gc.disable()
    try:
        for limit in (64, 0):  # 0: of a list's own
            give_prefix_cache(target, limit * MIB)
            rows = [target.open(200) for _ in range(2)]
            prefill(target, rows, [text_of(150)] * 2)
            for row in rows:
                row.close()
            give_prefix_cache(target, 0)
            assert made
            assert not any(one() is not None for one in made)
            made.clear()
    finally:
        gc.enable()
        give_prefix_cache(target, 0)


def test_a_limit_that_holds_nothing_reads_all(target: TextModel) -> None:
    assert isinstance(target, TransformersModel)
    target.prefix_cache = PrefixCache(10)
    try:
        rows = [target.open(200) for _ in range(3)]
        prefill(target, rows, [text_of(150)] * 3)
        assert [(row.length, row.taken) for row in rows] == [(150, 0)] * 3
        for row in rows:
            row.close()
        assert target.prefix_cache.bytes == 0
    finally:
        target.prefix_cache = None


def test_tokens_are_compared_and_not_only_their_number(target: TextModel) -> None:
    """The same block after another beginning is another one."""
    assert isinstance(target, TransformersModel)
    give_prefix_cache(target, 64 * MIB)
    try:
        one, other, block = text_of(BLOCK, 1), text_of(BLOCK, 2), text_of(BLOCK, 3)
        with_cache: list[tuple[int, torch.Tensor]] = []
        for prompt in ([*one, *block, 5], [*other, *block, 5], [*one, *block, 5]):
            row = target.open(100)
            prefill(target, [row], [prompt])
            with_cache.append((row.taken, target._cache.layers[-1].keys[row.slot, :, : 2 * BLOCK].clone()))
            row.close()
        assert [taken for taken, _ in with_cache] == [0, 0, 2 * BLOCK]
        assert torch.equal(with_cache[0][1], with_cache[2][1])
        assert not torch.allclose(with_cache[0][1][:, BLOCK:], with_cache[1][1][:, BLOCK:])
    finally:
        give_prefix_cache(target, 0)


def test_what_lacks_states_is_not_taken_up(head: Path) -> None:
    """Blocks of a time when nobody read hidden states."""
    target = tiny("Llama")
    give_prefix_cache(target, 64 * MIB)
    prompt = [token % 40 for token in text_of(80)]
    row = target.open(100)
    prefill(target, [row], [prompt])
    row.close()
    target.keep_states((1,))
    row = target.open(100)
    prefill(target, [row], [prompt])
    assert row.taken == 0
    assert target.states(row, 0, 80, (1,)).abs().min(dim=1).values.max() > 0
    row.close()


def test_no_memory_means_that_nothing_is_kept(target: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(target, TransformersModel)

    def lacks(*_: Any) -> Any:
        raise RuntimeError("not enough memory")

    give_prefix_cache(target, 64 * MIB)
    try:
        row = target.open(200)
        prefill(target, [row], [text_of(70)])
        monkeypatch.setattr(target, "block_of", lacks)
        prefill(target, [row], [text_of(150)])
        assert row.length == 150
        cache = prefix_cache_of(target)
        assert cache is not None
        assert (cache.bytes, len(cache._used)) == (0, 0)
        row.close()
    finally:
        give_prefix_cache(target, 0)


def test_failed_passes_leave_nothing_behind(target: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with outrider.ContinuousBatch(target, draft=None, prefix_cache=64) as batch:
        prompt = text_of(90)
        assert batch.submit(prompt, max_new_tokens=3).result().cached_tokens == 0
        with monkeypatch.context() as patch:
            patch.setattr("outrider.decode.together.verify_together", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                batch.submit(prompt, max_new_tokens=3).result()
        assert batch.submit(prompt, max_new_tokens=3).result().cached_tokens == 0
        assert batch.submit(prompt, max_new_tokens=3).result().cached_tokens == 64


def test_a_row_without_a_distribution_is_not_kept(target: TextModel) -> None:
    def nothing(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits if tokens.shape[-1] < 70 + 40 else torch.full_like(logits, float("nan"))

    with outrider.ContinuousBatch(target, draft=None, prefix_cache=64) as batch:
        asked = batch.submit(text_of(70), max_new_tokens=60, ignore_eos=True, processors=[nothing])
        with pytest.raises(outrider.errors.NumericalError):
            asked.result()
        cache = target.prefix_cache  # type: ignore[attr-defined]
        assert cache is not None
        assert len(cache._used) == 2  # of the prompt


def test_what_other_threads_read_is_kept_apart(target: TextModel) -> None:
    """They may have a hook of their own, of which nothing may be left in what the batch's clients are answered."""
    assert isinstance(target, TransformersModel)
    prompt = text_of(90)
    want = outrider.generate(target, prompt, draft=None, max_new_tokens=8, logprobs=True)
    with outrider.ContinuousBatch(target, draft=None, prefix_cache=64) as batch:
        batch.submit([5, 6, 7], max_new_tokens=2).result()
        layer = target.module.model.layers[0]
        with layer.register_forward_hook(
            lambda _, given, out: out + 1.0 if torch.is_tensor(out) else (out[0] + 1.0, *out[1:])
        ):
            other = outrider.generate(target, prompt, draft=None, max_new_tokens=8, logprobs=True)
        found = batch.submit(prompt, max_new_tokens=8, logprobs=True).result()
        assert found.cached_tokens == other.cached_tokens == 0
        assert batch.submit(prompt, max_new_tokens=8).result().cached_tokens == 64
    assert other.logprobs != pytest.approx(want.logprobs, abs=1e-3)
    assert found.tokens == want.tokens
    assert found.logprobs == pytest.approx(want.logprobs, abs=1e-9)


def test_an_error_of_keeping_leaves_no_sequence_open(target: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(target, TransformersModel)

    def fails(*_: Any) -> None:
        raise KeyError("no such block")

    with outrider.ContinuousBatch(target, draft=None, prefix_cache=64) as batch:
        asked = batch.submit(text_of(70), max_new_tokens=400, ignore_eos=True)
        next(iter(asked))
        monkeypatch.setattr(PrefixCache, "keep", fails)
        with pytest.raises(KeyError):
            asked.result()
    assert not target._open


def test_what_cannot_be_taken_up_is_read(target: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(target, TransformersModel)

    def lacks(*_: Any) -> None:
        raise RuntimeError("not enough memory")

    want = outrider.generate(target, text_of(90), draft=None, max_new_tokens=8)
    with outrider.ContinuousBatch(target, draft=None, prefix_cache=64) as batch:
        assert batch.submit(text_of(90), max_new_tokens=8).result().tokens == want.tokens
        monkeypatch.setattr(target._cache, "put", lacks)
        found = batch.submit(text_of(90), max_new_tokens=8).result()
        assert (found.tokens, found.cached_tokens) == (want.tokens, 0)


def test_states_that_nobody_kept_are_not_handed_on() -> None:
    """Of a text that was under way when they were asked for."""
    model = TransformersModel(module("Llama"), name="fresh")
    prompt = [token % 40 for token in text_of(80)]
    give_prefix_cache(model, 64 * MIB)
    old = model.open(96)
    prefill(model, [old], [prompt])
    model.keep_states((1,))
    keep(model, old, prompt)
    row = model.open(96)
    prefill(model, [row], [prompt])
    assert row.taken == 0
    other = model.open(96)
    prefill(model, [other], [prompt])
    assert other.taken == 64
    assert torch.equal(model.states(other, 0, 64, (1,)), model.states(row, 0, 64, (1,)))


def test_of_a_list_only_what_is_shared_is_kept() -> None:
    one, other = text_of(90, 1), text_of(90, 2)
    prompts = [[*one, 1, 2], [*one, 3], other, [*other[:50], 7], [*one[:40], 9], text_of(70, 3)]
    assert _shared(prompts) == [90, 90, 50, 50, 40, 0]
    assert _shared([one, other]) == [0, 0]


def test_engines_that_cannot_keep_any_do_not(flat_costs: Any) -> None:
    for model in (tiny_recurrent("Mamba"), tiny_encoder_decoder("T5")):
        give_prefix_cache(model, 64 * MIB)
        assert prefix_cache_of(model) is None
    other = outrider.models.table.TableModel
    assert prefix_cache_of(other) is None


def test_bad_sizes(target: TextModel) -> None:
    with pytest.raises(ParameterError, match="prefix_cache must be a whole number"):
        outrider.ContinuousBatch(target, draft=None, prefix_cache=-1)


def test_only_what_a_sequence_holds_is_kept(target: TextModel) -> None:
    """Tokens that were drawn and not scored yet are none of it."""
    assert isinstance(target, TransformersModel)
    give_prefix_cache(target, 64 * MIB)
    try:
        row = target.open(100)
        prefill(target, [row], [text_of(63)])
        keep(target, row, text_of(64))
        cache = prefix_cache_of(target)
        assert cache is not None
        assert len(cache._used) == 1
        row.close()
    finally:
        give_prefix_cache(target, 0)
