"""Compiled passes: the logits of ordinary ones at any width and position, read again by the next start, refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.cli.main import run
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import PromptLookupDrafter
from outrider.errors import ParameterError
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.first_layers import first_layers
from outrider.models.loading import load_transformers
from outrider.models.passes import compiled
from outrider.models.passes.compiled import CompiledPasses, check_compilable, compile_passes, rounded_up
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int8
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from outrider.tune.configuration import Configuration, read_configuration
from tests.helpers.heads import write_head
from tests.helpers.ragged import reference, score, some_tokens
from tests.helpers.requests import GREEDY
from tests.helpers.tiny_models import VOCABULARY, module, tiny_encoder_decoder

pytestmark = pytest.mark.slow
WIDTHS = (1, 4)
SINGLE = 1e-4
LONG = 4 * MIN_CAPACITY


def packed_llama() -> TransformersModel:
    made = module("Llama", dtype=torch.float32, max_position_embeddings=LONG)
    assert pack_linears(made) > 6
    return TransformersModel(made, name="tiny-packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for all tests here, and every width used however long it takes."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("compiled")
        patch.setenv("OUTRIDER_CACHE", str(path))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        patch.setattr(compiled, "GAIN", float("inf"))
        yield path


@pytest.fixture(scope="module")
def passes(folder: Path) -> CompiledPasses:
    """Of a model that is thrown away: what is kept of them is read by every test."""
    made = compile_passes(packed_llama(), WIDTHS)
    assert made is not None
    return made


@pytest.fixture
def model(passes: CompiledPasses) -> TransformersModel:
    made = packed_llama()
    made.compiled = compile_passes(made, WIDTHS)
    assert made.compiled is not None
    return made


def test_the_second_start_compiles_nothing(
    passes: CompiledPasses, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(compiled, "trace_pass", never)
    again = compile_passes(packed_llama(), WIDTHS)
    assert again is not None
    assert again.widths == passes.widths == WIDTHS
    assert capsys.readouterr().err == ""


def test_compiling_says_what_it_does_and_a_damaged_file_is_made_again(
    passes: CompiledPasses, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = compiled._folder(packed_llama()) / "1.bin"
    kept.write_bytes(kept.read_bytes()[:100])
    model = packed_llama()
    model.compiled = compile_passes(model, (1,))
    said = capsys.readouterr().err
    assert said == "outrider: compiling tiny-packed for passes of 1 token (1 of 1) …\n"
    assert len(kept.read_bytes()) > 100
    row = some_tokens(8, 0)
    sequence = model.open()
    got = [score(model, [sequence], [[token]])[0][0] for token in row]
    assert torch.allclose(torch.stack(got), reference(model, row), atol=SINGLE)


def test_every_width_gives_the_logits_of_the_plain_pass(model: TransformersModel) -> None:
    row = some_tokens(64, 1)
    wanted = reference(model, row)
    sequence = model.open()
    at = 0
    for width in (1, 2, 3, 4, 5, 8, 1, 4, 1, 13, 2):  # some are padded, some too wide to be compiled
        (got,) = score(model, [sequence], [row[at : at + width]])
        assert got.shape == (width, VOCABULARY)
        assert torch.allclose(got, wanted[at : at + width], atol=SINGLE)
        at += width
    assert model.compiled is not None
    assert [model.compiled.width(width) for width in (1, 2, 4, 5)] == [1, 4, 4, None]


def test_compiled_passes_are_really_used(model: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = CompiledPasses.run

    def counting(self: CompiledPasses, slot: int, tokens: Tensor, positions: Tensor, longest: int) -> Any:
        seen.append(tokens.shape[1])
        return plain(self, slot, tokens, positions, longest)

    monkeypatch.setattr(CompiledPasses, "run", counting)
    one, other = model.open(), model.open()
    score(model, [one], [[5]])
    score(model, [other], [[5, 6, 7]])
    score(model, [one, other], [[5], [6]])  # rows side by side are not
    score(model, [one], [[5] * 9])
    assert seen == [1, 4]


def test_rows_keep_apart_and_roll_back(model: TransformersModel) -> None:
    rows = [some_tokens(40, 2), some_tokens(30, 3)]
    wanted = [reference(model, row) for row in rows]
    sequences = [model.open() for _ in rows]
    prefill(model, sequences, [rows[0][:20], rows[1][:9]])
    for width in (1, 4, 2):
        for i in (1, 0):
            sequence, row = sequences[i], rows[i]
            start = sequence.length
            score(model, [sequence], [[11, 12, 13, 14][:width]])  # wrong ones, taken back
            sequence.truncate(start)
            (got,) = score(model, [sequence], [row[start : start + width]])
            assert torch.allclose(got, wanted[i][start : start + width], atol=SINGLE)
    sequences[0].close()  # the other one takes its slot
    start = sequences[1].length
    (got,) = score(model, [sequences[1]], [rows[1][start : start + 3]])
    assert torch.allclose(got, wanted[1][start : start + 3], atol=SINGLE)
    for after in (score(model, sequences[1:], [rows[1][start + 3 : start + 4]])[0], model.open()):
        assert after is not None


def test_the_cache_grows_under_compiled_passes(model: TransformersModel) -> None:
    row = some_tokens(2 * MIN_CAPACITY + 20, 4)
    wanted = reference(model, row)
    for start in (MIN_CAPACITY - 6, 2 * MIN_CAPACITY - 3):
        sequence = model.open(start)
        prefill(model, [sequence], [row[:start]])
        for width in (1, 4, 1, 3, 1):
            at = sequence.length
            (got,) = score(model, [sequence], [row[at : at + width]])
            assert torch.allclose(got, wanted[at : at + width], atol=SINGLE)
        sequence.close()


def test_what_was_read_by_ordinary_passes_is_seen_by_compiled_ones_and_the_other_way_round(model: TransformersModel) -> None:
    row = some_tokens(40, 5)
    wanted = reference(model, row)
    sequence = model.open()
    for width in (12, 1, 4, 12, 4, 7):
        at = sequence.length
        (got,) = score(model, [sequence], [row[at : at + width]])
        assert torch.allclose(got, wanted[at : at + width], atol=SINGLE)


def test_states_for_heads_are_kept(model: TransformersModel) -> None:
    row = some_tokens(20, 6)
    model.keep_states()
    with torch.inference_mode():
        wanted = model.module.model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]
    sequence = model.open()
    for width in (10, 1, 4, 2):
        score(model, [sequence], [row[sequence.length : sequence.length + width]])
    assert torch.allclose(model.states(sequence, 0, 17), wanted[:17], atol=SINGLE)


def test_only_the_last_logits_are_given_where_only_they_are_wanted(model: TransformersModel) -> None:
    row = some_tokens(9, 7)
    sequence = model.open()
    assert model.score([sequence], torch.tensor([row[:2]]), [2], "none") is None
    out = model.score([sequence], torch.tensor([row[2:5]]), [3], "last")
    assert out is not None
    assert out.shape == (1, 1, VOCABULARY)
    assert torch.allclose(out[0, 0], reference(model, row[:5])[-1], atol=SINGLE)


@pytest.mark.parametrize("architecture", ["Gemma3", "GPT2"])
def test_windows_and_learned_positions_to_the_end_of_the_context(architecture: str, folder: Path) -> None:
    """Gemma 3: sliding windows, a mask a type. GPT-2: a table of positions, and padding lies past its end."""
    model = TransformersModel(module(architecture, dtype=torch.float32))
    model.compiled = compile_passes(model, (4,))
    assert model.compiled is not None
    row = some_tokens(96, 8)
    wanted = reference(model, row)
    sequence = model.open()
    prefill(model, [sequence], [row[:90]])
    for width in (2, 1, 2, 1):
        at = sequence.length
        (got,) = score(model, [sequence], [row[at : at + width]])
        assert torch.allclose(got, wanted[at : at + width], atol=SINGLE)
    assert sequence.length == 96


def test_greedy_speculation_gives_the_tokens_of_plain_decoding(model: TransformersModel) -> None:
    for number in range(3):
        request = Request(some_tokens(12, number) * 2, 100, RandomStream(0, number))
        ordinary = decode(packed_llama(), [request], GREEDY)[0]
        plain = decode(model, [request], GREEDY)[0]
        drafted, rounds = decode(model, [request], GREEDY, PromptLookupDrafter(), FixedLength(3))
        assert drafted == plain == ordinary
        assert any(r.accepted for r in rounds[0])
        assert any(r.accepted < r.drafted for r in rounds[0])


def test_a_model_that_cannot_be_traced_runs_without_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamic positions take a decision by the values of a tensor."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = TransformersModel(module("Llama", dtype=torch.float32, rope_parameters=rope), name="tiny-dynamic")
    held = [dict(part.__dict__) for part in model.module.modules()]
    with caplog.at_level(logging.WARNING):
        assert compile_passes(model, (1,)) is None
    (said,) = caplog.messages
    assert said.startswith("tiny-dynamic can't be compiled (")
    assert said.endswith("it runs without")
    for part, before in zip(model.module.modules(), held, strict=True):
        assert part.__dict__.keys() == before.keys()
    (got,) = score(model, [model.open()], [[5, 6, 7]])
    assert torch.allclose(got, reference(model, [5, 6, 7]), atol=SINGLE)


def test_only_widths_that_gain_are_used_and_the_decision_is_kept(
    passes: CompiledPasses, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = compiled._folder(packed_llama()) / "gains.json"
    before = kept.read_text()
    monkeypatch.setattr(compiled, "GAIN", 0.97)
    try:
        kept.write_text(json.dumps({"1": 1.2, "4": 0.6}))
        made = compile_passes(packed_llama(), WIDTHS)
        assert made is not None
        assert made.widths == (4,)
        assert [made.width(tokens) for tokens in (1, 2, 4, 5)] == [None, 4, 4, None]  # not 4 for 1
        kept.write_text(json.dumps({"1": 1.2, "4": 0.98}))
        with caplog.at_level(logging.WARNING):
            assert compile_passes(packed_llama(), WIDTHS) is None
        assert "no quicker here (1.20 (1 token), 0.98 (4 tokens) times as long)" in caplog.text
    finally:
        kept.write_text(before)


def test_gains_are_measured_once(passes: CompiledPasses, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = compiled._folder(packed_llama()) / "gains.json"
    found = json.loads(kept.read_text())
    assert set(found) == {"1", "4"}
    assert all(0.01 < gain < 100 for gain in found.values())
    monkeypatch.setattr(compiled, "gain", lambda *args: pytest.fail("measured again"))
    assert compile_passes(packed_llama(), WIDTHS) is not None


def test_gains_that_cannot_be_written_are_a_warning(
    passes: CompiledPasses, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = compiled._folder(packed_llama()) / "gains.json"
    before = kept.read_text()
    kept.unlink()
    kept.mkdir()
    try:
        made = compile_passes(packed_llama(), WIDTHS)
        assert made is not None
        assert made.widths == WIDTHS
        assert "what compiled passes gain can't be kept: " in caplog.text
    finally:
        kept.rmdir()
        kept.write_text(before)


def test_a_pass_with_wrong_logits_is_never_used(
    passes: CompiledPasses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_read", lambda path: lambda *args: (torch.zeros(1, len(args[3]), VOCABULARY), None))
    monkeypatch.setattr(Path, "unlink", lambda *args, **options: None)
    with caplog.at_level(logging.WARNING):
        assert compile_passes(packed_llama(), WIDTHS) is None
    assert "gives other logits" in caplog.text


def test_the_early_layers_of_a_compiled_model_are_not_compiled(model: TransformersModel) -> None:
    view = first_layers(model, 1)
    assert view.compiled is None
    assert model.compiled is not None
    short = view.score([view.open()], torch.tensor([[5, 6]]), [2])
    assert short is not None
    whole = TransformersModel(module("Llama", dtype=torch.float32, max_position_embeddings=LONG))
    wanted = first_layers(whole, 1).score([whole.open()], torch.tensor([[5, 6]]), [2])
    assert wanted is not None
    assert torch.allclose(short, wanted, atol=SINGLE)


def test_costs_of_compiled_and_ordinary_passes_are_not_mixed_up(model: TransformersModel) -> None:
    plain = packed_llama()
    assert model.fingerprint != plain.fingerprint
    assert (model.dtype_name, plain.dtype_name) == ("float32 compiled", "float32")


def test_columns_are_rounded_up() -> None:
    assert [rounded_up(longest) for longest in (1, 32, 33, 256)] == [32, 32, 64, 256]


@pytest.mark.skipif(not can_quantize(), reason="this build of torch has no 8-bit kernels")
def test_models_that_promise_bits_are_refused() -> None:
    quantized = module("Llama", dtype=torch.float32)
    quantize_to_int8(quantized)
    with pytest.raises(ParameterError, match="with dtype int8, whose logits have the same bits in any pass"):
        check_compilable(TransformersModel(quantized))


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(ParameterError, match="compile is for decoder-only models, tiny-T5-0 is an encoder-decoder"):
        tiny_encoder_decoder("T5").compile()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x", "--compile", "--dtype", "int8"],
        ["generate", "x", "--compile", "--engine", "openvino"],
        ["batch", "in.jsonl", "-o", "out.jsonl", "--compile"],
        ["audit", "--compile"],
    ],
)
def test_what_is_never_compiled_is_refused_in_one_line(
    words: list[str], target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--target", str(target_folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("outrider: compile is for")
    assert said.count("\n") == 1


@pytest.mark.parametrize("draft", ["head", "suffix + head:path={head}"])
def test_a_head_that_reads_further_layers_is_refused_before_anything_is_compiled(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that comes with the package reads three; one in a folder of its own."""
    head = write_head(tmp_path / "head", "layered")
    monkeypatch.setattr(outrider, "load", lambda *given, **options: pytest.fail("a model is loaded"))
    assert run(["generate", "x", "--compile", "--draft", draft.format(head=head)]) == 2
    said = capsys.readouterr().err
    layers = "2, 15, 27" if draft == "head" else "1"
    assert f"compile can't be used with a draft that reads states of layers {layers}: " in said
    assert said.count("\n") == 1


def test_a_tuned_configuration_says_that_it_was_measured_compiled(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(Configuration("x", None, 0, compile=True).to_toml())
    assert read_configuration(path)["compile"] is True
    path.write_text(Configuration("x", None, 0).to_toml())
    assert "compile" not in read_configuration(path)


def test_drafts_with_a_cut_head_are_compiled(folder: Path, target_folder: Path) -> None:
    model = load_transformers(target_folder, dtype="float32", device="cpu", num_tokens=100)
    sequences = model.open(), model.open()
    (wanted,) = score(model, [sequences[0]], [[5]])
    model.compiled = compile_passes(model, (1,))
    assert model.compiled is not None
    (got,) = score(model, [sequences[1]], [[5]])
    assert bool((got[:, 100:] == -torch.inf).all())
    assert torch.allclose(got[:, :100], wanted[:, :100], atol=SINGLE)
