"""Training with transformers' `Trainer`: steps, checkpoints, resume, several devices by their launchers.

What is added to it: alpha (of a language model, its loss) on held-out text, domain by domain, at every evaluation, and an
end by the clock.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from outrider.errors import Interrupted, ModelError, ParameterError
from outrider.support.checks import check_count
from outrider.train.checkpoints import check_settings, keep_settings, last_checkpoint
from outrider.train.precision import products

Windows = Dataset[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class RunSettings:
    """steps: of the optimiser, 0 for a draft as it begins. batch_size: windows a step and device. every: steps between
    evaluations and checkpoints.

    hours: stop (with a checkpoint) after that long, None for never. resume: go on from the newest checkpoint.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 5e-4
    every: int = 200
    hours: float | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 0)
        for name in ("batch_size", "every"):
            check_count(name, getattr(self, name))
        for name in ("learning_rate", "hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ParameterError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Report:
    """What a run came to. held_out: by domain, what `measure` gives: {"alpha": [by depth], …, "positions": n}."""

    steps: int
    finished: bool
    seconds: float
    held_out: dict[str, dict[str, Any]]


class Ends(TrainerCallback):  # type: ignore[misc]
    """Stops all processes after the same step, with a checkpoint, by the clock of the first or when that is interrupted: one
    that stopped alone would leave the others waiting for its gradients.
    """

    def __init__(self, hours: float | None) -> None:
        self._end = None if hours is None else time.monotonic() + 3600 * hours
        self.interrupted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del state
        over = self.interrupted or (self._end is not None and time.monotonic() > self._end)
        if _as_the_first(over, args.device):
            control.should_save = control.should_training_stop = True

    @contextmanager
    def by_interrupt(self) -> Iterator[None]:
        """While training: the first interrupt ends it after the step at hand, the second one at once.

        Not where interrupts are ignored, as in the background of a script.
        """
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN or current_thread() is not main_thread():  # other threads can't be told of signals
            yield
            return

        def stop(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)
            told = "outrider: stopping after this step, with a checkpoint; once more stops at once\n"
            with suppress(RuntimeError):  # where the interrupt came in the middle of such a line
                sys.stderr.write(told)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _as_the_first(decision: bool, device: torch.device) -> bool:
    """What the first process decided; all of them must ask."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return decision
    shared = torch.tensor(int(decision), device=device)
    torch.distributed.broadcast(shared, src=0)
    return bool(shared)


class _Progress(TrainerCallback):  # type: ignore[misc]
    """A bar and the figures on standard error; Trainer's own would print on standard output."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True))
        self._task = self._bar.add_task("Training", total=None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.is_world_process_zero:
            self._bar.update(self._task, total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        del args, control
        if state.is_world_process_zero and logs:
            shown = {k.removeprefix("eval_"): v for k, v in logs.items() if k == "loss" or "_alpha_" in k or "_nats_" in k}
            figures = "  ".join(f"{name} {float(value):.3f}" for name, value in shown.items())
            if figures:
                self._bar.console.print(f"step {state.global_step}: {figures}", highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the terminal as it was, whatever happened."""
        self._bar.stop()


class _Trainer(Trainer):  # type: ignore[misc]
    """Evaluates by `measure`. measured: the last results, and the step they were measured after."""

    held_out: Mapping[str, Windows]
    measured: tuple[int, dict[str, dict[str, Any]]] | None = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        return (out["loss"], out) if return_outputs else out["loss"]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        results = {name: measure(self.model, windows, self.args.train_batch_size) for name, windows in self.held_out.items()}
        flat: dict[str, float] = {}
        for name, result in results.items():
            rates = {what: rate for what, rate in result.items() if what != "positions"}
            flat |= {
                f"eval_{name}_{what}_{i}": round(one, 4) for what, rate in rates.items() for i, one in enumerate(rate, 1)
            }
        self.log(flat)
        self.measured = int(self.state.global_step), results
        return flat

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights that are one (a head tied to the embeddings) are written once: read back, either is both."""
        given = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, _once(given))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A checkpoint has every weight once; transformers would only warn of others, and train on without them."""
        weights = self.model.state_dict()
        wrong = set(load_result.unexpected_keys) | (set(load_result.missing_keys) & set(_once(weights)))
        if wrong:
            raise ModelError(f"checkpoint can't be gone on with: it is not of this draft ({min(wrong)}): train anew")


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the second names of tensors that share their memory."""
    first: dict[tuple[int, torch.Size], str] = {}
    for name, value in weights.items():
        first.setdefault((value.data_ptr(), value.shape), name)
    names = set(first.values())
    return {name: value for name, value in weights.items() if name in names or not value.numel()}


def processes() -> Any:
    """What a launcher (accelerate, torchrun) has started: `is_main_process`, `main_process_first()`."""
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


@torch.no_grad()
def measure(trainee: nn.Module, windows: Windows, batch_size: int) -> dict[str, Any]:
    """What a trainee counts on held-out text, a position, by depth; and the positions of the first depth.

    Of drafts: alpha, the mean of sum min(target, draft) at temperature 1, and match, how often both would say the same at 0.
    Teacher-forced: at depth s the s - 1 tokens before are the text's own. Of a language model: nats.
    """
    was_training = trainee.training
    trainee.eval()
    sums: list[dict[str, float]] = []
    device = next(trainee.parameters()).device
    for batch in DataLoader(windows, batch_size=batch_size):
        with products("highest"):
            counts = trainee(**{name: value.to(device) for name, value in batch.items()})["counts"]
        sums = sums or [dict.fromkeys(count, 0.0) for count in counts]
        for total, count in zip(sums, counts, strict=True):
            for name, value in count.items():
                total[name] += float(value)
    trainee.train(was_training)
    rates = {name: [total[name] / max(1.0, total["positions"]) for total in sums] for name in sums[0] if name != "positions"}
    return {**rates, "positions": int(sums[0]["positions"])}


def _begin(folder: Path, settings: RunSettings, about: Mapping[str, object]) -> str | None:
    """The checkpoint to go on from, if the run is the one that it is of."""
    last = last_checkpoint(folder, settings.resume)
    kept = {name: getattr(settings, name) for name in ("batch_size", "learning_rate", "seed")}
    mine = {**about, **kept, "processes": processes().num_processes}
    if last:
        check_settings(folder, mine)
    elif processes().is_main_process:
        keep_settings(folder, mine)
    return last


def _steps_of(checkpoint: str) -> int:
    """Steps that a checkpoint was made after."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return int(state["global_step"])


def _arguments(folder: Path, held_out: bool, settings: RunSettings, last: str | None) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, max(1, settings.steps // 20)),
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_beta2=0.95,
        logging_steps=min(50, settings.every),
        logging_first_step=True,
        eval_strategy="steps" if held_out else "no",
        eval_steps=settings.every,
        eval_on_start=held_out and last is None,
        save_steps=settings.every,
        save_total_limit=2,
        seed=settings.seed,
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=False,
        use_cpu=not torch.cuda.is_available(),
    )


def train(
    trainee: nn.Module,
    windows: Windows,
    held_out: Mapping[str, Windows],
    folder: Path,
    settings: RunSettings,
    about: Mapping[str, object],
) -> Report:
    """Train, keeping checkpoints in `folder`, and what they were made of: `about`, and the settings that matter.

    Raises `ParameterError` if it holds checkpoints that are not to be resumed, or none that can be.
    """
    last = _begin(folder, settings, about)
    if last is not None and _steps_of(last) > settings.steps:
        raise ParameterError(f"steps must be {_steps_of(last)} or more, as many as the checkpoint has, got {settings.steps}")
    if settings.steps == 0:
        trainee.to(processes().device)
        return Report(0, True, 0.0, {name: measure(trainee, part, settings.batch_size) for name, part in held_out.items()})
    logging.getLogger("transformers.trainer").setLevel(logging.WARNING)
    arguments = _arguments(folder, bool(held_out), settings, last)
    ends = Ends(settings.hours)
    trainer = _Trainer(model=trainee, args=arguments, train_dataset=windows, eval_dataset=dict(held_out), callbacks=[ends])
    trainer.held_out = held_out
    progress = _Progress()
    for shown in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(shown)
    trainer.add_callback(progress)
    started = time.monotonic()
    try:
        with products("medium"):
            if last is not None and _steps_of(last) == settings.steps:
                trainer._load_from_checkpoint(last)  # `train` would take one step more
                steps = _steps_of(last)
            else:
                with ends.by_interrupt():
                    trainer.train(resume_from_checkpoint=last)
                steps = int(trainer.state.global_step)
    finally:
        progress.stop()
    if ends.interrupted and steps < settings.steps:
        raise Interrupted(f"step {steps} of {settings.steps} is kept: the same command with --resume goes on")
    if trainer.measured is not None and trainer.measured[0] == steps:
        results = trainer.measured[1]
    else:
        results = {name: measure(trainee, part, settings.batch_size) for name, part in held_out.items()}
    return Report(steps, steps >= settings.steps, time.monotonic() - started, results)
