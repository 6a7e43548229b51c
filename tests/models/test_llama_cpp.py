"""The llama.cpp engine on the default model's own file: roll-back, ragged passes, growth, and engines mixed.

Skipped where llama-cpp-python is not installed, since it compiles for some minutes: `make test-gguf` installs it.
"""

from __future__ import annotations

import gc
import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

import outrider
from outrider.audit.greedy import first_divergence
from outrider.errors import ContextLengthError, ModelError, ParameterError
from outrider.models.base import has_same_bits
from outrider.models.llama_cpp.engine import FIRST_CELLS, SPARE, LlamaCppModel, have_same_bits
from outrider.models.llama_cpp.library import OUTPUTS, Context
from outrider.models.loading import load_llama_cpp
from outrider.models.names import default_model
from outrider.models.weights.gguf import gguf_tokenizer
from outrider.models.weights.gguf_tensors import GgufTensor
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows
from tests.helpers.real_models import smollm2

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
PROMPT = (
    "def add(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total\n\n\ndef add("
)


@cache
def model() -> LlamaCppModel:
    return LlamaCppModel(default_model(), gguf_tokenizer(default_model()))


def some_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(20, 40_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def score(sequences: list[object], rows: list[list[int]]) -> list[Tensor]:
    tokens, lengths = pad_rows(rows, model().device)
    out = model().score(sequences, tokens, lengths, "all")  # type: ignore[arg-type]
    assert out is not None
    return [out[i, :n].clone() for i, n in enumerate(lengths)]


def test_the_law_is_nearly_that_of_the_unrounded_model() -> None:
    ids = model().tokenizer.encode(PROMPT)
    assert ids == smollm2().tokenizer.encode(PROMPT)
    sequence, plain = model().open(), smollm2().open()
    wanted = smollm2().score([plain], *pad_rows([ids], model().device), "all")
    assert wanted is not None
    assert float(torch.minimum(score([sequence], [ids])[0].softmax(-1), wanted[0].softmax(-1)).sum(-1).median()) > 0.9
    sequence.close()
    plain.close()


def test_ragged_passes_and_rollbacks_give_what_one_pass_gives() -> None:
    rows = [some_tokens(n, n) for n in (60, 45, 30)]
    wanted = []
    for row in rows:
        alone = model().open()
        wanted.append(score([alone], [row])[0])
        alone.close()
    sequences = [model().open() for _ in rows]
    read = (40, 21, 7)
    prefill(model(), sequences, [row[:n] for row, n in zip(rows, read, strict=True)])
    score(list(sequences), [[500, 600, 700], [800], some_tokens(30, 1)])  # rejected
    for sequence, length in zip(sequences, read, strict=True):
        sequence.truncate(length)
    for start, width in ((0, 3), (3, 1), (4, 6)):
        parts = [row[n + start : n + start + width] for row, n in zip(rows, read, strict=True)]
        for got, want, n in zip(score(list(sequences), parts), wanted, read, strict=True):
            assert torch.equal(got, want[n + start : n + start + width])
    parted = score([sequences[2], sequences[0]], [rows[2][17:22], rows[0][50:53]])
    assert torch.equal(parted[0], wanted[2][17:22])
    assert torch.equal(parted[1], wanted[0][50:53])
    last = model().score(sequences[:2], *pad_rows([rows[0][53:55], rows[1][31:32]], model().device), "last")
    assert last is not None
    assert torch.equal(last[0], wanted[0][54:55])
    assert torch.equal(last[1], wanted[1][31:32])
    for sequence in sequences:
        sequence.close()


def test_a_wrong_rollback_would_be_seen() -> None:
    row = some_tokens(40, 3)
    sequence = model().open()
    wanted = score([sequence], [row])[0]
    sequence.truncate(20)
    score([sequence], [[500]])  # one token that should not be there
    assert not torch.equal(score([sequence], [row[20:]])[0], wanted[20:])
    sequence.close()


def test_more_outputs_than_a_pass_takes_and_a_cache_that_grows() -> None:
    row = some_tokens(OUTPUTS + 30, 5)
    own = LlamaCppModel(default_model(), None)
    first, second = own.open(), own.open()
    out = own.score([first], torch.tensor([row]), [len(row)], "all")
    assert out is not None
    before = out.clone()
    own.score([second], torch.tensor([some_tokens(FIRST_CELLS, 6)]), [FIRST_CELLS], "none")  # first is moved along
    first.truncate(OUTPUTS)
    again = own.score([first], torch.tensor([row[OUTPUTS:]]), [30], "all")
    assert again is not None
    assert torch.equal(again[0], before[0, OUTPUTS:])


@pytest.mark.parametrize("context", [100, 255, 300, 600])
def test_the_width_of_a_pass_does_not_change_the_bits(context: int) -> None:
    """Attention has other kernels for a lone token after 256 and for 64 tokens, unless it is kept from them."""
    assert has_same_bits(model())
    row = some_tokens(context + 70, 9)
    sequence = model().open()
    model().score([sequence], torch.tensor([row[:context]]), [context], "none")
    wanted = score([sequence], [row[context:]])[0]
    for width in (1, 2, 3, 8, 63, 64):
        sequence.truncate(context)
        assert torch.equal(score([sequence], [row[context : context + width]])[0], wanted[:width]), width
    sequence.close()
    parts = model().open()
    for i in range(0, context, 50):
        model().score([parts], torch.tensor([row[i : min(i + 50, context)]]), [min(50, context - i)], "none")
    assert torch.equal(score([parts], [row[context : context + 3]])[0], wanted[:3])
    parts.close()


def test_a_pass_made_wider_gives_the_same_bits_and_leaves_nothing_behind() -> None:
    """Where four tokens are quicker than three, three are scored as four (`costs`)."""
    row = some_tokens(40, 10)
    sequence, asked = model().open(), []
    model().score([sequence], torch.tensor([row[:30]]), [30], "none")
    wanted = score([sequence], [row[30:36]])[0]
    sequence.truncate(30)

    def wider(count: int, context: int) -> int:
        asked.append((count, context))
        return {1: 2, 3: 8}.get(count, count)

    model().pad_widths(wider)
    try:
        got = [score([sequence], [part])[0] for part in (row[30:33], row[33:34], row[34:36])]
    finally:
        model().pad_widths(lambda count, context: count)
    assert asked == [(3, 30), (1, 33), (2, 34)]
    assert torch.equal(torch.cat(got), wanted)
    assert sequence.length == 36
    sequence.close()


def test_a_sequence_opened_beside_one_that_holds_tokens_changes_nothing() -> None:
    row = some_tokens(30, 2)
    first = model().open()
    wanted = score([first], [row])[0]
    first.truncate(20)
    others = [model().open() for _ in range(5)]
    score(list(others), [some_tokens(9, i) for i in range(5)])
    assert torch.equal(score([first], [row[20:]])[0], wanted[20:])
    for sequence in [first, *others]:
        sequence.close()


def test_an_interrupted_growth_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = some_tokens(40, 2)
    sequence = model().open()
    wanted = score([sequence], [row])[0]
    sequence.truncate(30)

    def interrupted(self: Context, source: Context) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Context, "take_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model().score([sequence], torch.ones(1, FIRST_CELLS, dtype=torch.long), [FIRST_CELLS], "none")
    assert torch.equal(score([sequence], [row[30:]])[0], wanted[30:])
    sequence.close()


def test_weights_are_freed_after_the_contexts_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    freed: list[str] = []
    free_model, free_context = llama_cpp.llama_model_free, llama_cpp.llama_free

    def count_model(pointer: object) -> None:
        freed.append("model")
        free_model(pointer)

    def count_context(pointer: object) -> None:
        freed.append("context")
        free_context(pointer)

    monkeypatch.setattr(llama_cpp, "llama_model_free", count_model)
    monkeypatch.setattr(llama_cpp, "llama_free", count_context)
    own = LlamaCppModel(default_model(), None)
    sequence = own.open()
    own.score([sequence], torch.tensor([[1, 2, 3]]), [3], "none")
    del own, sequence
    gc.collect()
    assert freed == ["context", "model"]


def test_speculation_writes_what_plain_decoding_writes_with_drafts_of_any_engine() -> None:
    plain = outrider.generate(model(), PROMPT, max_new_tokens=64)
    for draft, least in (("prompt-lookup", 0.05), (smollm2(), 0.6)):
        result = outrider.generate(model(), PROMPT, max_new_tokens=64, draft=draft, num_draft_tokens=4)
        assert result.tokens == plain.tokens
        assert result.stats.acceptance_rate is not None
        assert result.stats.acceptance_rate > least


def test_it_drafts_for_another_engine() -> None:
    plain = outrider.generate(smollm2(), PROMPT, max_new_tokens=48)
    result = outrider.generate(smollm2(), PROMPT, max_new_tokens=48, draft=model(), num_draft_tokens=4)
    parted = first_divergence(smollm2(), smollm2().tokenizer.encode(PROMPT), plain.tokens, result.tokens)
    assert parted is None or parted.near_tie, str(parted)
    assert result.stats.acceptance_rate is not None
    assert result.stats.acceptance_rate > 0.6


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_it_drafts_for_openvino_and_openvino_for_it() -> None:
    other = outrider.load(dtype="int8", engine="openvino")
    for target, draft in ((model(), other), (other, model())):
        plain = outrider.generate(target, PROMPT, max_new_tokens=48)
        result = outrider.generate(target, PROMPT, max_new_tokens=48, draft=draft, num_draft_tokens=4)
        assert result.tokens == plain.tokens
        assert result.stats.acceptance_rate is not None
        assert result.stats.acceptance_rate > 0.6


def test_a_row_of_a_batch_is_what_it_is_alone_and_its_cells_are_given_back() -> None:
    prompts = [PROMPT, "Hello", "One, two,"]
    rows = outrider.generate(model(), prompts, max_new_tokens=12, draft="prompt-lookup")
    for prompt, row in zip(prompts, rows, strict=True):
        assert outrider.generate(model(), prompt, max_new_tokens=12).tokens == row.tokens
    assert len(model()._spare) <= SPARE


def test_bad_calls_are_refused_in_words(tmp_path: Path, target_folder: Path) -> None:
    sequence = model().open()
    with pytest.raises(ParameterError, match="tokens must be in 0"):
        model().score([sequence], torch.tensor([[model().vocab_size]]), [1])
    with pytest.raises(ParameterError, match="different ones"):
        model().score([sequence, sequence], torch.tensor([[1], [2]]), [1, 1])
    with pytest.raises(ContextLengthError, match=f"{model().max_length} positions"):
        model().score([sequence], torch.ones(1, model().max_length + 1, dtype=torch.long), [model().max_length + 1])
    sequence.close()
    with pytest.raises(ParameterError, match="open sequences"):
        model().score([sequence], torch.tensor([[1]]), [1])
    with pytest.raises(ParameterError, match="dtype must be auto"):
        load_llama_cpp(default_model(), dtype="int8")
    with pytest.raises(ModelError, match=r"reads \.gguf files"):
        load_llama_cpp(target_folder)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model().read_bytes()[: 1 << 20])
    with pytest.raises(ModelError, match="broken"):
        load_llama_cpp(broken)


def test_a_head_of_another_type_is_not_promised_the_same_bits() -> None:
    """As files have that are called Q4_0."""
    norm = GgufTensor("norm", (576,), GGMLQuantizationType.F32, 0)
    layer = GgufTensor("q", (8, 8), GGMLQuantizationType.Q4_0, 0)
    assert have_same_bits([norm, layer])
    assert not have_same_bits([norm, layer, GgufTensor("output.weight", (8, 8), GGMLQuantizationType.Q6_K, 0)])


def test_the_file_says_what_it_is() -> None:
    assert model().dtype_name == "Q4_1"
    assert model().tokenizer.eos_token_id in model().end_tokens
    assert model().same_bits
    assert model().weight_bytes == pytest.approx(default_model().stat().st_size, rel=0.05)  # its head is its embeddings
