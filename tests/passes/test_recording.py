"""What is recorded of a model, kept and read again; and what is left out: other bits, decisions by values, hooks."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import LlamaMLP

import outrider
from outrider.drafters import HeadDrafter
from outrider.models import made_of
from outrider.models.base import LAST
from outrider.models.passes import recorded, recording
from outrider.models.passes.graph import trace_pass
from outrider.models.passes.graph_text import graph_text
from outrider.models.passes.tracing import Traced
from outrider.models.transformers_model import TransformersModel
from tests.helpers.heads import write_head
from tests.helpers.marks import slow
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import KINDS, made, pair, scored
from tests.helpers.tiny_models import record_now


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without recordings."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    return tmp_path / "empty"


@pytest.mark.slow
def test_the_next_start_traces_nothing_and_a_damaged_file_is_made_again(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, quick = pair("Llama")
    (kept,) = (empty / "recorded").iterdir()
    text = kept.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "trace_pass", lambda *args: pytest.fail("traced again"))
        record_now(quick)
    assert quick.recorded is not None
    for damage in (text[: len(text) // 2], "", "graph("):
        kept.write_text(damage)
        record_now(quick)
        assert kept.read_text() == text
        row = some_tokens(20, 1)
        assert torch.equal(scored(ordinary, row, 5, (3,))[0], scored(quick, row, 5, (3,))[0])


@pytest.mark.parametrize("several", [False, slow(True)], ids=["one row", "several"])
def test_what_was_kept_is_not_used_once_the_models_code_has_changed(
    several: bool, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a library that replaces methods of transformers' classes, under the same names."""
    before = made("Llama")
    record_now(before)
    assert before.recorded is not None
    assert before.recorded.of(2 if several else 1, 2) is not None
    count = 2 if several else 1

    def logits_of(model: TransformersModel) -> Tensor:
        return torch.stack(score(model, [model.open() for _ in range(count)], [some_tokens(9, 1)] * count))

    former = logits_of(before)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x).tanh() * self.up_proj(x)))
    ordinary, quick = pair("Llama")
    wanted = logits_of(ordinary)
    assert torch.equal(logits_of(quick), wanted)
    assert torch.equal(logits_of(before), wanted)  # in the process that they are replaced in, too
    assert not torch.equal(former, wanted)


def test_what_is_done_to_a_recorded_model_shows_in_the_next_sequence(cache: Path) -> None:
    """Another weight, a weight written to, a hook, another module: as of adapters and whoever steers activations."""
    ordinary, quick = pair("Llama")
    tokens = some_tokens(9, 1)
    before = score(ordinary, [ordinary.open()], [tokens])[0]

    def differs() -> bool:
        """From what it gave before; it is what the ordinary model gives in any case."""
        nonlocal before
        wanted, got = (score(model, [model.open()], [tokens])[0] for model in (ordinary, quick))
        assert torch.equal(wanted, got)
        last, before = before, got
        return not torch.equal(last, got)

    def is_recorded() -> bool:
        return quick.recorded is not None

    assert not differs()
    for model in (ordinary, quick):
        norm = model.module.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * 1.5, requires_grad=False)
    assert differs()
    assert is_recorded()
    for model in (ordinary, quick):
        model.module.model.layers[0].input_layernorm.weight.data *= 2
    assert differs()
    hooks = [
        m.module.model.layers[1].mlp.register_forward_hook(lambda part, given, out: out * 0.5) for m in (ordinary, quick)
    ]
    assert differs()
    assert not is_recorded()
    for hook in hooks:
        hook.remove()
    record_now(quick)
    assert differs()
    for model in (ordinary, quick):
        model.module.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    assert differs()
    assert is_recorded()


@pytest.mark.parametrize("architecture", ["Llama", slow("Gemma3"), slow("GPT2"), slow("Qwen3")])
def test_passes_leave_a_model_as_it_was_recorded(architecture: str, cache: Path) -> None:
    """Otherwise every text would begin with recording."""
    _, quick = pair(architecture)
    held = quick.recorded
    assert held is not None
    for count in (1, 3):
        score(quick, [quick.open() for _ in range(count)], [some_tokens(9, 1)] * count)
    assert held.fits()
    assert quick.recorded is held


@pytest.mark.slow
def test_other_models_have_other_recordings(empty: Path) -> None:
    for kind in KINDS:
        record_now(made("Llama", kind))
    record_now(made("Llama", intermediate_size=64))
    assert len(list((empty / "recorded").iterdir())) == len(KINDS) + 1


def test_other_bits_are_never_used(empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Planted: a recording with another operation near its end."""

    def planted(graph: Any) -> str:
        text = graph_text(graph)
        at = text.rindex("aten::silu(")
        return text[:at] + "aten::tanh(" + text[at + len("aten::silu(") :]

    model = made("Llama")
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr(recording, "graph_text", planted)
        record_now(model)
    assert model.recorded is None
    assert "its recorded passes give other bits" in caplog.text
    assert model.score([model.open()], torch.tensor([[5, 6, 7]]), [3]) is not None
    record_now(model)  # what was found is kept
    assert model.recorded is None


def test_other_states_are_never_used(empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Planted: the states of one layer handed out as those of another."""

    def planted(model: TransformersModel, width: int | None, layers: Sequence[int], several: bool) -> Any:
        return trace_pass(model, width, [layer if layer == LAST else 1 for layer in layers], several)

    model = made("Llama", num_hidden_layers=3)
    model.keep_states([2])
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr(recorded, "trace_pass", planted)
        record_now(model)
    assert model.recorded is None
    assert "its recorded passes give other bits" in caplog.text


def test_decisions_by_values_or_sizes_are_not_recorded(empty: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mixtral's experts ask which tokens are theirs; and a model whose code asks how long the context is."""
    model = made("Mixtral")
    with caplog.at_level(logging.DEBUG):
        record_now(model)
    assert model.recorded is None

    by_length: Any = made("Llama")
    norm = by_length.module.model.norm

    class ByLength(type(norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out if self.longest < 100 else out * 2

    plain = by_length.pass_arguments

    def arguments(tokens: Tensor, positions: Tensor, longest: int, *others: Any) -> dict[str, Any]:
        norm.longest = longest
        return plain(tokens, positions, longest, *others)  # type: ignore[no-any-return]

    norm.__class__ = ByLength
    by_length.pass_arguments = arguments
    with caplog.at_level(logging.DEBUG):
        record_now(by_length)
    assert by_length.recorded is None
    assert "its pass depends on sizes" in caplog.text


def test_modules_with_hooks_or_methods_of_their_own_are_not_recorded(empty: Path) -> None:
    """Nor is what was kept of one without them used: a recorded pass calls none."""
    record_now(made("Llama"))
    (kept,) = (empty / "recorded").iterdir()
    text = kept.read_text()
    hooked, patched = made("Llama"), made("Llama")
    hook = hooked.module.model.norm.register_forward_hook(lambda module, given, out: out * 2)
    norm: Any = patched.module.model.norm
    norm.forward = norm.forward
    for model in (hooked, patched):
        record_now(model)
        assert model.recorded is None
    assert kept.read_text() == text
    hook.remove()
    record_now(hooked)
    assert hooked.recorded is not None


def test_recording_within_inference_mode(cache: Path) -> None:
    with torch.inference_mode():
        model = made("Llama")
        record_now(model)
    assert model.recorded is not None


def test_what_cannot_be_kept_is_recorded_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    model = made("Llama")
    record_now(model)
    assert model.recorded is not None


def used_once(head: Path) -> weakref.ref[Tensor]:
    """A weight of a model that was recorded, used with a head, and left."""
    model = made("Llama")
    record_now(model)
    drafter = HeadDrafter(head, step_seconds=0.1)
    drafter.bind(model)
    sequences = [model.open(), model.open()]
    score(model, sequences, [[5], [6]])
    for sequence in sequences:
        sequence.close()
    return weakref.ref(model.module.model.norm.weight)


@pytest.mark.slow
def test_a_recorded_model_is_freed_at_once(cache: Path, tmp_path: Path) -> None:
    """Its gigabytes must not wait for a collection of cycles. (Tracing leaves some, so the second one counts.)"""
    head = write_head(tmp_path / "head", "autoregressive")
    used_once(head)
    gc.collect()
    gc.disable()
    try:
        assert used_once(head)() is None
    finally:
        gc.enable()


def test_costs_of_recorded_and_ordinary_passes_are_not_mixed_up(cache: Path) -> None:
    ordinary, quick = pair("Llama")
    assert ordinary.fingerprint != quick.fingerprint
    assert ordinary.dtype_name == quick.dtype_name


def test_loaded_models_are_recorded_unless_their_module_is_wanted(target_folder: Path, cache: Path) -> None:
    quick: Any = outrider.load(target_folder, dtype="float32")
    ordinary: Any = outrider.load(target_folder, dtype="float32", pack=False)
    assert quick.recorded is not None
    assert ordinary.recorded is None


def test_a_model_of_the_same_kind_elsewhere_is_not_traced_again(
    target_folder: Path, draft_folder: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was moved, or made anew from the same configuration."""
    record_now(outrider.load(target_folder, dtype="float32"))  # type: ignore[arg-type]
    monkeypatch.setattr(recorded, "trace_pass", lambda *args: pytest.fail("traced again"))
    ordinary: Any = outrider.load(draft_folder, dtype="float32", pack=False)
    quick: Any = outrider.load(draft_folder, dtype="float32")
    assert quick.recorded is not None
    row = some_tokens(20, 1)
    assert float((scored(ordinary, row, 5, (3,))[0] - scored(quick, row, 5, (3,))[0]).abs().max()) < 1e-5


def test_nothing_is_traced_before_it_is_known_which_states_are_wanted(
    target_folder: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of: list[Sequence[int]] = []

    def trace(model: TransformersModel, width: int | None, layers: Sequence[int], several: bool) -> Traced:
        made_of.append(layers)
        return trace_pass(model, width, layers, several)

    monkeypatch.setattr(recorded, "trace_pass", trace)
    model: Any = outrider.load(target_folder, dtype="float32")
    assert made_of == []
    model.keep_states()
    model.open().close()
    assert made_of == [(LAST,)]
    assert model.recorded.layers == (LAST,)


def test_autocast_neither_records_nor_spoils_what_is_kept(target_folder: Path, empty: Path) -> None:
    record_now(outrider.load(target_folder, dtype="bfloat16"))  # type: ignore[arg-type]
    (kept,) = (empty / "recorded").iterdir()
    text = kept.read_text()
    model: Any = outrider.load(target_folder, dtype="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.open().close()
        assert model.recorded is None
    assert kept.read_text() == text
    model.open().close()
    assert model.recorded is not None


def test_other_kernels_for_a_while_are_not_recorded(target_folder: Path, empty: Path) -> None:
    model: Any = outrider.load(target_folder, dtype="float32")
    with sdpa_kernel(SDPBackend.MATH):
        inside = model.recorded
    assert inside is None
    assert model.recorded is not None
    assert len(list((empty / "recorded").iterdir())) == 1


def test_an_interrupt_puts_it_off_once_more(target_folder: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*about: object) -> Traced:
        raise KeyboardInterrupt

    model: Any = outrider.load(target_folder, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "trace_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.open()
    model.open().close()
    assert model.recorded is not None


@pytest.mark.parametrize(
    "file",
    [
        "tracing.py",
        "kernels/fusing/layers.py",
        "../kernels/rows.h",
        "../kernels/models.py",
        "../heads/layers.py",
        "../heads/published/networks.py",
    ],
)
def test_a_recording_is_found_by_all_of_our_files_that_make_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(outrider.models.__file__).parent
    for part in ("models", "heads", "kernels"):
        shutil.copytree(source.parent / part, tmp_path / part, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    monkeypatch.setattr(outrider.models, "__file__", str(tmp_path / "models" / "__init__.py"))
    before = made_of.own_files.__wrapped__()
    with (tmp_path / "models" / file).open("a") as changed:
        changed.write("\n")
    made_of.file_digest.cache_clear()
    assert made_of.own_files.__wrapped__() != before
