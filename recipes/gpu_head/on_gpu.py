"""A draft head for SmolLM2-135M-Instruct, trained on many of the target's own texts, by one program within a time limit.

    on_gpu.py --model FILE.gguf --start HEAD --prompts PROMPTS.npz --out FOLDER --seconds-texts 70 --seconds-train 150

It writes held-out answers, then answers to the prompts (`prompts.py`) and to questions of the target's own, and trains on
them, by the clock. In FOLDER are then, from the first evaluation on, the best head (config.json, model.safetensors, as
`outrider train head` writes it), log.jsonl, texts.npz (some of the texts) and held_out.npz. Packages: torch, numpy,
safetensors, gguf; the modules of outrider that are read here compile nothing and read none of transformers' models.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prompts import DOMAINS, ragged, read
from target import Target, attention_kernels, load_target
from texts import MODES, Text, Windows, Writing, alone, beginnings, end_to_end, joined, plain, write_all
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
try:  # transformers' module is read for its name alone
    importlib.import_module("outrider.train.trainee")
except Exception as error:  # another version of transformers
    print(f"without transformers' module: {error!r}", flush=True)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("outrider")]:
        del sys.modules[loaded]
    module = types.ModuleType("outrider.models.transformers_model")
    vars(module)["TransformersModel"] = type("TransformersModel", (nn.Module,), {})
    sys.modules[module.__name__] = module

from outrider.heads.config import HeadConfig, load_head, save_head
from outrider.heads.layers import AutoregressiveHead
from outrider.train import fused
from outrider.train.precision import products
from outrider.train.trainee import HeadTrainee

DEPTH = 3  # at which is evaluated
FIRST = 96  # tokens of an answer that are its beginning
STATES_AT_ONCE = 64  # windows
TEXTS_KEPT = 2000
CHUNK = 8192  # windows whose states are kept at once where not all of them fit
FINAL_SECONDS = 4.0  # for the last evaluation
WARM_UP = 0.03  # of the time
LAST_RATE = 0.02  # of the learning rate


class Log:
    """Lines for people and for programs."""

    def __init__(self, path: Path) -> None:
        self._file, self._begun = path.open("a", encoding="utf-8"), time.monotonic()

    def say(self, text: str, **data: Any) -> None:
        seconds = round(time.monotonic() - self._begun, 2)
        print(f"[{seconds:7.2f}] {text}", flush=True)
        self._file.write(json.dumps({"seconds": seconds, "text": text, **data}) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Batch:
    """As `HeadTrainee.forward` takes it."""

    tokens: Tensor
    states: Tensor
    normalisers: Tensor
    drafted: Tensor


def states_of(target: Target, windows: Windows, layers: Sequence[int], rows: Sequence[int] | None = None) -> Batch:
    """The target along some windows, as `train.states.states_of` gives it, on the target's device."""
    numbers = np.arange(len(windows)) if rows is None else np.asarray(rows)
    device = target.device
    tokens = torch.from_numpy(windows.tokens[numbers]).to(device)
    drafted = torch.from_numpy(windows.drafted[numbers]).to(device)
    count, length = tokens.shape
    width = target.state_size * (1 + len(layers))
    states = torch.empty(count, length, width, dtype=target.dtype, device=device)
    normalisers = torch.empty(count, length, device=device)
    for first in range(0, count, STATES_AT_ONCE):
        part = slice(first, first + STATES_AT_ONCE)
        states[part] = target.states(tokens[part], layers)
        normalisers[part] = target.normalisers(states[part])
    followed = torch.cat([drafted[:, 1:], drafted[:, -1:]], dim=1)
    return Batch(tokens, states, normalisers, followed)


def frequent_tokens(target: Target, batch: Batch, count: int, always: Sequence[int]) -> tuple[Tensor, float]:
    """The tokens to which the target gives most where something is drafted. → int64 [count], ascending; their share"""
    width = target.state_size
    states = batch.states[..., :width].reshape(-1, width)
    wanted = batch.drafted.flatten()
    mass = target.mass(states[wanted], batch.normalisers.flatten()[wanted]).cpu()
    weighted = mass.clone()
    weighted[list(always)] = mass.max() + 1
    tokens = weighted.argsort(descending=True, stable=True)[:count].sort().values
    return tokens, float(mass[tokens].sum() / mass.sum())


class HeldOut:
    """Batches of held-out text by name. The first three are cut as those of the shipped head's card."""

    def __init__(self, target: Target, texts: dict[str, list[Text]], layers: Sequence[int], end: int, size: int) -> None:
        self.batches: dict[str, list[Batch]] = {}
        self._size = size
        for name, every in texts.items():
            self._add(target, name, end_to_end(every, 256, 6144), layers)
            self._add(target, f"{name}, first {FIRST}", alone(every, FIRST, end), layers)

    def _add(self, target: Target, name: str, windows: Windows, layers: Sequence[int]) -> None:
        starts = range(0, len(windows), self._size)
        rows = [range(first, min(first + self._size, len(windows))) for first in starts]
        self.batches[name] = [states_of(target, windows, layers, list(some)) for some in rows]

    @torch.no_grad()
    def measure(self, trainee: HeadTrainee) -> dict[str, dict[str, Any]]:
        """Alpha and equal choices by depth, as `train.run.measure` counts them."""
        before, trainee.depth = trainee.depth, DEPTH
        found: dict[str, dict[str, Any]] = {}
        with products("highest"):
            for name, batches in self.batches.items():
                sums = torch.zeros(DEPTH, 3, dtype=torch.float64)
                for batch in batches:
                    counts = trainee(**vars(batch))["counts"]
                    sums += torch.tensor([[float(one[what]) for what in ("alpha", "match", "positions")] for one in counts])
                rates = (sums[:, :2] / sums[:, 2:].clamp(min=1)).T.tolist()
                found[name] = {"alpha": rates[0], "match": rates[1], "positions": int(sums[0, 2])}
        trainee.depth = before
        return found


def shown(results: dict[str, dict[str, Any]], sums: bool = True) -> str:
    """In a line or a few."""
    lines = [f"{name} {' '.join(f'{alpha:.3f}' for alpha in one['alpha'])}" for name, one in results.items()]
    return f"alpha {score(results):.4f}: " * sums + "; ".join(lines)


def score(results: dict[str, dict[str, Any]]) -> float:
    """By which the best head is chosen: the mean over texts of E[accepted tokens] of 3, over 3."""
    return float(np.mean([np.cumprod(one["alpha"]).sum() / DEPTH for one in results.values()]))


def held_out_texts(
    target: Target, stored: dict[str, np.ndarray], new: int, count: int, end: int, seed: int
) -> dict[str, list[Text]]:
    """Answers to the held-out prompts at temperature 1, and greedy ones, by domain."""
    generator = torch.Generator(target.device).manual_seed(seed + 1000)
    asked = [(name, one) for name in ("chat", "code", "prose") for one in read(stored, f"held_out_{name}")[:count]]
    found: dict[str, list[Text]] = {}
    for mode, kind in ((0, ""), (1, " greedy")):
        answers = target.write([one for _, one in asked], new, MODES[mode], end, generator, math.inf)
        for (name, one), answer in zip(asked, answers, strict=True):
            text = Text(np.concatenate([one, answer]), len(one), DOMAINS.index(name), mode)
            found.setdefault(name + kind, []).append(text)
    return found


@dataclass(frozen=True)
class Training:
    """seconds: for all of it, evaluations included. depths: of the chains, each for the share of the time beside it."""

    seconds: float
    batch_size: int
    learning_rate: float
    depths: tuple[tuple[int, float], ...]
    every: float
    decay: float
    reuse: int
    windows_in_memory: int
    seed: int

    def depth(self, progress: float) -> int:
        """At that share of the time."""
        ends = np.cumsum([share for _, share in self.depths])
        return self.depths[min(int(np.searchsorted(ends, progress, side="right")), len(self.depths) - 1)][0]

    def rate(self, progress: float) -> float:
        """Of learning: a short rise, and a cosine."""
        if progress < WARM_UP:
            return self.learning_rate * max(progress / WARM_UP, 0.01)
        fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP)))
        return self.learning_rate * (LAST_RATE + (1 - LAST_RATE) * fall)


class Feed:
    """Batches of windows in random order. The states of all windows are kept if they fit; else those of a chunk, which is
    gone through `reuse` times before the next one's turn.
    """

    def __init__(self, target: Target, windows: Windows, layers: Sequence[int], settings: Training) -> None:
        self._target, self._windows, self._layers, self._settings = target, windows, layers, settings
        self._random = np.random.default_rng(settings.seed)
        self.kept = len(windows) <= settings.windows_in_memory
        self.size = settings.batch_size  # smaller if the memory is not enough
        self.states_seconds = 0.0
        self.tours = 0

    def _chunks(self) -> Iterator[Batch]:
        size = (
            len(self._windows) if self.kept else min(CHUNK, max(1, self._settings.windows_in_memory // 2))
        )  # the one before is still there
        whole: Batch | None = None
        while True:
            order = self._random.permutation(len(self._windows))
            self.tours += 1
            for first in range(0, len(order), size):
                if whole is None or not self.kept:
                    whole = None  # its memory, before the next one's
                    begun = time.monotonic()
                    whole = states_of(self._target, self._windows, self._layers, order[first : first + size].tolist())
                    if self._target.device.type == "cuda":
                        torch.cuda.synchronize(self._target.device)
                    self.states_seconds += time.monotonic() - begun
                yield whole

    def batches(self) -> Iterator[Batch]:
        """Without an end."""
        device = self._target.device
        for chunk in self._chunks():
            for _ in range(self._settings.reuse):
                order = torch.from_numpy(self._random.permutation(len(chunk.tokens))).to(device)
                first = 0
                while first == 0 or first + self.size <= len(order):
                    rows = order[first : first + self.size]
                    first += self.size
                    yield Batch(*(part.index_select(0, rows) for part in vars(chunk).values()))


class Trainer:
    """Trains a head by the clock, and keeps the best one."""

    def __init__(self, trainee: HeadTrainee, feed: Feed, held_out: HeldOut, settings: Training, log: Log) -> None:
        self._trainee, self._feed, self._held_out, self._settings, self._log = trainee, feed, held_out, settings, log
        self._weights: list[Tensor] = list(trainee.network.parameters())
        self._mean = [one.detach().clone() for one in self._weights]
        self._good = [one.detach().clone() for one in self._weights]
        self._optimiser = self._fresh()
        self._best = -1.0

    def _fresh(self) -> torch.optim.AdamW:
        fast = self._weights[0].is_cuda
        return torch.optim.AdamW(
            self._weights, lr=self._settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True if fast else None
        )

    def run(self, save: Any) -> None:
        """save(): write the weights that the network has now."""
        log, settings = self._log, self._settings
        begun = time.monotonic()
        self.evaluate(save, 0)
        limit = settings.seconds - FINAL_SECONDS
        evaluated, last, steps, before = time.monotonic(), time.monotonic(), 0, 0
        lost = torch.zeros((), device=self._weights[0].device)
        for batch in self._feed.batches():
            elapsed = time.monotonic() - begun
            if elapsed >= limit:
                break
            if time.monotonic() - evaluated > settings.every and limit - elapsed > settings.every / 3:
                self.evaluate(save, steps)
                evaluated = last = time.monotonic()
                before = steps
                lost.zero_()
            try:
                lost += self._step(batch, elapsed / limit, steps)
            except torch.OutOfMemoryError:
                self._feed.size = max(1, self._feed.size // 2)
                self._optimiser.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                log.say(f"step {steps}: out of memory, {self._feed.size} windows a step from now on")
                continue
            steps += 1
            if steps in (1, 10, 50) or steps % 100 == 0:  # reading the loss waits for the device, so the clock is right
                loss = float(lost) / max(1, steps - before)
                now = time.monotonic()
                log.say(
                    f"step {steps}, depth {self._trainee.depth}: loss {loss:.4f}, "
                    f"{1000 * (now - last) / (steps - before):.1f} ms a step, {self._feed.tours} tours, "
                    f"{self._feed.states_seconds:.1f} s for states in all",
                    loss=loss, rate=self._optimiser.param_groups[0]["lr"],
                )  # fmt: skip
                last, before = now, steps
                lost.zero_()
        self.evaluate(save, steps)
        log.say(
            f"trained {steps} steps in {time.monotonic() - begun:.1f} s, {self._feed.tours} tours of the windows",
            steps=steps,
        )

    def _step(self, batch: Batch, progress: float, steps: int) -> Tensor:
        self._trainee.depth = self._settings.depth(progress)
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.rate(progress)
        loss: Tensor = self._trainee(**vars(batch))["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self._mean, self._weights, 1 - min(self._settings.decay, (1 + steps) / (10 + steps)))
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, save: Any, steps: int) -> None:
        """Of the mean weights, as they are saved; the best ones are kept."""
        if not all(bool(one.isfinite().all()) for one in (*self._mean, *self._weights)):
            self._log.say(f"step {steps}: weights are not finite, going back")
            for kept, mean, weight in zip(self._good, self._mean, self._weights, strict=True):
                mean.copy_(kept)
                weight.copy_(kept)
            self._optimiser = self._fresh()
            return
        for good, mean in zip(self._good, self._mean, strict=True):
            good.copy_(mean)
        own = [one.clone() for one in self._weights]
        for weight, mean in zip(self._weights, self._mean, strict=True):
            weight.copy_(mean.bfloat16())
        begun = time.monotonic()
        results = self._held_out.measure(self._trainee)
        better = score(results) > self._best
        if better:
            self._best = score(results)
            save()
        for weight, was in zip(self._weights, own, strict=True):
            weight.copy_(was)
        took = time.monotonic() - begun
        self._log.say(
            f"step {steps}{' (saved)' * better}, {took:.1f} s: {shown(results)}",
            steps=steps,
            held_out=results,
            score=score(results),
        )


def keep_texts(path: Path, texts: Sequence[Text]) -> None:
    """Some texts, to go on with elsewhere: ragged `tokens`, and `asked`, `domain`, `mode` of each."""
    about = {name: np.array([getattr(text, name) for text in texts]) for name in ("asked", "domain", "mode")}
    np.savez_compressed(path, **ragged("tokens", [text.tokens.tolist() for text in texts]), **about)  # type: ignore[arg-type]


def training_windows(texts: list[Text], stored: dict[str, np.ndarray], length: int, seed: int) -> Windows:
    """Of the texts in random order, and of the corpus."""
    order = np.random.default_rng(seed).permutation(len(texts))
    parts = [beginnings([texts[i] for i in order], length)]
    parts += [plain(read(stored, kind), length) for kind in ("code", "docs")]
    return joined(parts)


def main() -> None:
    """Everything."""
    options = _options()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "log.jsonl")
    log.say(
        f"torch {torch.__version__}, {torch.cuda.get_device_name(device) if on_gpu else device}", options=_plain(options)
    )
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    fused.AT_ONCE = (1 << 28) if on_gpu else (1 << 20)
    stored = dict(np.load(options.prompts))
    end = int(stored["end"])
    target = load_target(options.model, device, torch.bfloat16 if on_gpu else torch.float32)
    log.say(f"target loaded: {target.shape}")
    with attention_kernels(device):
        _work(options, target, stored, end, log)


def _work(options: argparse.Namespace, target: Target, stored: dict[str, np.ndarray], end: int, log: Log) -> None:
    device, on_gpu = target.device, target.device.type == "cuda"
    config, tokens, weights = load_head(options.start)
    network = AutoregressiveHead(config)
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    network.to(device)
    apart = held_out_texts(target, stored, options.held_out_tokens, options.held_out_prompts, end, options.seed)
    keep_texts(options.out / "held_out.npz", [text for every in apart.values() for text in every])
    log.say(
        f"held-out texts written: {sum(len(text.tokens) - text.asked for every in apart.values() for text in every)} tokens"
    )
    held_out = HeldOut(target, apart, config.layers, end, options.batch_size)
    shipped = held_out.measure(_trainee(network, target, tokens))
    log.say(f"the head that is begun from: {shown(shipped)}", held_out=shipped)
    card = json.loads((options.start / "card.json").read_text(encoding="utf-8"))["held_out"]
    for name in sorted(card.keys() & shipped.keys()):
        log.say(f"  {name}: card {card[name]['alpha']}, here {[round(alpha, 3) for alpha in shipped[name]['alpha']]}")

    prompts, domains = read(stored, "train"), stored["domains"]
    some = np.random.default_rng(options.seed).permutation(len(prompts))[: options.prompts_used]
    writing = Writing(options.rows, options.new_tokens, options.seconds_texts, options.questions, end, options.seed)
    around = (stored["before"].astype(np.int64), stored["after"].astype(np.int64))
    begun = time.monotonic()
    texts = write_all(target, [prompts[i] for i in some], domains[some], around, writing, log.say)
    written = sum(len(text.tokens) - text.asked for text in texts)
    seconds = time.monotonic() - begun
    log.say(
        f"{len(texts)} texts, {written} tokens in {seconds:.1f} s: {len(texts) / seconds:.0f} texts and "
        f"{written / seconds:.0f} tokens a second; memory {_memory(device)}", texts=len(texts), tokens=written,
    )  # fmt: skip
    if on_gpu:
        torch.cuda.empty_cache()
    random = np.random.default_rng(options.seed)
    keep_texts(options.out / "texts.npz", [texts[i] for i in random.permutation(len(texts))[:TEXTS_KEPT]])
    windows = training_windows(texts, stored, options.length, options.seed)
    share = windows.drafted.mean()
    log.say(f"{len(windows)} windows of {options.length} tokens, {100 * share:.0f} % of them to be drafted")

    some = random.permutation(len(windows))[: options.mass_windows]
    anew, covered = frequent_tokens(
        target, states_of(target, windows, config.layers, some.tolist()), config.num_tokens, stored["special"].tolist()
    )
    common = len(np.intersect1d(anew.numpy(), tokens.numpy()))
    log.say(f"{config.num_tokens} tokens have {100 * covered:.2f} % of the mass; {common} were drafted before")
    if not options.keep_tokens:
        tokens = anew
    config = replace(config, num_tokens=len(tokens))
    settings = Training(
        seconds=options.seconds_train,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        depths=tuple((int(depth), float(part)) for depth, part in (one.split(":") for one in options.depths.split(","))),
        every=options.every,
        decay=options.decay,
        reuse=options.reuse,
        windows_in_memory=_fitting(device, options, target, config),
        seed=options.seed,
    )
    feed = Feed(target, windows, config.layers, settings)
    log.say(f"states of {settings.windows_in_memory} windows fit the memory; kept: {feed.kept}")
    trainee = _trainee(network, target, tokens)

    def save() -> None:
        kept = {name: value.detach().cpu() for name, value in network.state_dict().items()}
        save_head(options.out, config, tokens, kept, torch.bfloat16)

    Trainer(trainee, feed, held_out, settings, log).run(save)
    log.say(f"done; memory {_memory(device)}")


def _trainee(network: AutoregressiveHead, target: Any, tokens: Tensor) -> HeadTrainee:
    """In evaluation mode always, where prompts are not counted: neither are they drafted. A head has no other modes."""
    with torch.inference_mode(False):
        return HeadTrainee(network, target, tokens, "mix", DEPTH).to(target.device).eval()


def _fitting(device: torch.device, options: argparse.Namespace, target: Target, config: HeadConfig) -> int:
    """Windows whose states may be kept, beside a step's own memory."""
    if device.type != "cuda":
        return int(options.windows_in_memory)
    torch.cuda.empty_cache()  # so that it counts as free
    free = torch.cuda.mem_get_info(device)[0]
    step = 8 * 4 * options.batch_size * options.length * config.num_tokens + (6 << 30)
    window = options.length * (target.state_size * (1 + len(config.layers)) * target.dtype.itemsize + 16)
    return min(int(options.windows_in_memory), max(512, int((0.9 * free - step) / window)))


def _memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB at most" if device.type == "cuda" else "of the host"


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "start", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds-texts", type=float, default=70)
    parser.add_argument("--seconds-train", type=float, default=150)
    parser.add_argument("--rows", type=int, default=4096, help="texts written side by side at most")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--questions", type=int, default=24576, help="that the target asks itself")
    parser.add_argument("--prompts-used", type=int, default=10**9)
    parser.add_argument("--held-out-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--held-out-prompts", type=int, default=20, help="of a domain")
    parser.add_argument("--length", type=int, default=320, help="tokens of a window")
    parser.add_argument("--mass-windows", type=int, default=4096, help="along which the drafted tokens are chosen")
    parser.add_argument("--keep-tokens", action="store_true", help="draft those that the head drafts already")
    parser.add_argument("--batch-size", type=int, default=32, help="windows a step")
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--depths", default="1:0.5,3:0.5", help="DEPTH:SHARE OF THE TIME,…")
    parser.add_argument("--every", type=float, default=30, help="seconds between evaluations")
    parser.add_argument("--decay", type=float, default=0.998, help="of the mean of the weights, a step")
    parser.add_argument("--reuse", type=int, default=2, help="tours of a chunk of states before the next")
    parser.add_argument("--windows-in-memory", type=int, default=10**9, help="whose states are kept at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
