"""What a GPU gives: passes with and without CUDA graphs, plain decoding beside the memory's bandwidth, and speed-ups at a
known alpha beside what the walltime theorem predicts (Leviathan et al. 2022, theorem 3.8).

    python recipes/gpu/measure.py OUT.jsonl [--target 1.5B] [--draft 0.5B] [--device cuda] [--parts passes,plain,speculative]

The models have random weights and say a known token (`successor`), so that alpha is what it is set to. One JSON line for
each figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from successor import SHAPES, VOCABULARY, agreeing, cycle, say, successor

from outrider.bench.machine import machine
from outrider.costs import Costs, DraftSeconds
from outrider.costs.pass_timer import PassTimer
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.drafters import Drafter, ModelDrafter
from outrider.models.passes.captured import CapturedPasses
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings
from outrider.theory import expected_tokens, measured_speedup, walltime_factor

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = (1, 2, 3, 5, 7, 11, 15)  # of drafts: with the newest token passes are as wide as those that are captured
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 256
SETTINGS = {"greedy": SamplingSettings(), "sampled": SamplingSettings(temperature=0.8, top_p=0.95)}
Rounds = list[Round]


def bandwidth(device: str, size: int) -> dict[str, float]:
    """Bytes a second, read and written by a copy, and read alone by a sum over bytes; the best of five."""
    a = torch.ones(size // 4, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    found = {}
    tasks: dict[str, tuple[int, Callable[[], object]]] = {"copy": (2 * size, lambda: b.copy_(a)), "read": (size, a.sum)}
    for name, (count, run) in tasks.items():
        run()
        taken = []
        for _ in range(5):
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            taken.append(time.perf_counter() - start)
        found[name] = count / min(taken)
    return found


def wait(device: str) -> None:
    """For all that was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def times(model: TransformersModel, repeats: int) -> dict[int, float]:
    """Median milliseconds of a pass and the choice after it, by its tokens."""
    with PassTimer(model, SIZES, CONTEXT) as timer:
        for _ in range(3):
            for size in SIZES:
                timer.time(size)
        seconds = {size: [timer.time(size) for _ in range(repeats)] for size in SIZES}
    return {size: 1000 * median(taken) for size, taken in seconds.items()}


def device_times(model: TransformersModel, repeats: int) -> dict[int, float]:
    """Milliseconds that the device needs for a pass when it never waits for the host: many replays in a row."""
    found = {}
    for size in SIZES:
        sequence = model.open(CONTEXT + size)
        sequence.advance(CONTEXT)
        tokens = torch.zeros((1, size), dtype=torch.long, device=model.device)
        for _ in range(3):
            model.score([sequence], tokens, [size])
            sequence.truncate(CONTEXT)
        graphs = model.recorded.graphs if isinstance(model.recorded, CapturedPasses) else None
        if graphs is None or not graphs._held:
            sequence.close()
            return {}
        held = next(reversed(graphs._held.values()))
        wait("cuda")
        start = time.perf_counter()
        for _ in range(repeats):
            held.graph.replay()
        wait("cuda")
        found[size] = 1000 * (time.perf_counter() - start) / repeats
        sequence.close()
    return found


def describe(model: TransformersModel) -> str:
    """How its passes of a few tokens are run."""
    lean = getattr(model.recorded, "lean", None)
    return type(model.recorded).__name__ if lean is None else "lean, captured"


class Pair:
    """A target and a draft."""

    def __init__(self, target: str, draft: str, device: str, vocabulary: int, dtype: torch.dtype) -> None:
        self.follows = cycle(vocabulary)
        modules = [successor(SHAPES[size], vocabulary, device, dtype, seed) for seed, size in enumerate((target, draft))]
        for module in modules:
            say(module, self.follows)
        self.draft_module = modules[1]
        self.target, self.draft = (
            TransformersModel(module, name=size) for module, size in zip(modules, (target, draft), strict=True)
        )

    def record(self) -> None:
        """Have passes captured from now on."""
        self.target.record()
        self.draft.record()

    def write(
        self, prompt: list[int], tokens: int, drafter: Drafter | None, length: int, sampling: SamplingSettings
    ) -> Rounds:
        """The rounds of one text, which must be the target's."""
        requests = [Request(prompt, tokens, RandomStream(0, prompt[0]))]
        (found,), (rounds,) = decode(self.target, requests, sampling, drafter, FixedLength(length))
        at, wanted = prompt[-1], []
        for _ in range(tokens):
            at = int(self.follows[at])
            wanted.append(at)
        if found != wanted:
            wrong = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
            raise SystemExit(f"the text is not the target's from token {wrong} on: length {length}, {sampling}")
        return rounds


def phases(rounds: Rounds) -> dict[str, float]:
    """Milliseconds a round, by phase."""
    out: dict[str, float] = {}
    for record in rounds:
        for name, value in record.seconds.items():
            out[name] = out.get(name, 0.0) + 1000 * value / len(rounds)
    return out


def timed(run: Callable[[int], Rounds], seed: int) -> tuple[float, Rounds]:
    """Seconds of wall-clock."""
    start = time.perf_counter()
    rounds = run(seed)
    return time.perf_counter() - start, rounds


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--draft", default="0.5B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alphas", type=float, nargs="*", default=ALPHAS)
    parser.add_argument("--lengths", type=int, nargs="*", default=(5,), help="of drafts, beside the best one")
    parser.add_argument("--parts", default="passes,plain,speculative")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)

    def tell(**what: object) -> None:
        line = json.dumps({"target": given.target, "draft": given.draft, **what})
        print(line, flush=True)
        with given.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    start = time.perf_counter()
    pair = Pair(given.target, given.draft, given.device, given.vocabulary, getattr(torch, given.dtype))
    target, draft = pair.target, pair.draft
    on_gpu = given.device.startswith("cuda")
    rates = bandwidth(given.device, 1 << 32 if on_gpu else 1 << 27)
    read = target.weight_bytes
    tell(what="machine", **machine(), seconds_to_make=time.perf_counter() - start, bandwidth=rates)
    tell(what="weights", target_bytes=read, draft_bytes=draft.weight_bytes, limit_ms=1000 * read / max(rates.values()))
    parts = set(given.parts.split(","))
    if "passes" in parts:
        for name, model in (("target", target), ("draft", draft)):
            tell(what="passes", model=name, graphs=False, ms=times(model, 10))
    start = time.perf_counter()
    pair.record()
    for model in (target, draft):
        model.open().close()
    graphs = [describe(model) for model in (target, draft)]
    tell(what="recorded", seconds=time.perf_counter() - start, how=graphs)
    table = {name: times(model, 20) for name, model in (("target", target), ("draft", draft))}
    for name, model in (("target", target), ("draft", draft)):
        tell(what="passes", model=name, graphs=True, ms=table[name], device_ms=device_times(model, 50) if on_gpu else {})
    costs = Costs({size: ms / 1000 for size, ms in table["target"].items()}, context=CONTEXT)
    step = table["draft"][1] / 1000
    if "profile" in parts:
        profile(pair, given)
    speak(pair, parts, given, costs, step, tell)


def profile(pair: Pair, given: argparse.Namespace) -> None:
    """Tables of what host and device do in some rounds, beside the output."""
    from torch.profiler import ProfilerActivity, profile

    say(pair.draft_module, agreeing(pair.follows, 0.8))
    drafter = ModelDrafter(pair.draft, step_seconds=0.001)
    for name, setting, draft, length in (
        ("plain", "greedy", None, 0), ("speculative", "greedy", drafter, 5), ("sampled", "sampled", drafter, 5)
    ):  # fmt: skip
        for _ in range(2):
            pair.write([1, 2, 3], 40, draft, length, SETTINGS[setting])
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            rounds = pair.write([1, 2, 3], 24, draft, length, SETTINGS[setting])
        table = found.key_averages()
        orders = ("self_cpu_time_total", "self_cuda_time_total")
        text = "\n".join(table.table(sort_by=order, row_limit=45, max_name_column_width=70) for order in orders)
        given.output.with_suffix(f".{name}.txt").write_text(f"{len(rounds)} rounds\n{text}\n", encoding="utf-8")


def speak(
    pair: Pair, parts: set[str], given: argparse.Namespace, costs: Costs, step: float, tell: Callable[..., None]
) -> None:
    """Texts, plain and with drafts."""
    tokens, read = given.tokens, pair.target.weight_bytes
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(given.vocabulary, (16, 64), generator=generator).tolist()
    for setting, sampling in SETTINGS.items():
        one_plain = partial(write, pair, prompts, tokens, sampling, None, 0)
        one_plain(0)
        plain: list[float] = []
        if "plain" in parts:
            for seed in range(given.repeats):
                taken, rounds = timed(one_plain, seed)
                plain.append(taken)
            tell(
                what="plain", setting=setting, seconds=plain[:], tokens=tokens, per_second=tokens / median(plain),
                bytes_per_second=read * tokens / median(plain), phases=phases(rounds),
                predicted_seconds=plain_seconds(rounds, costs, 64),
            )  # fmt: skip
        for alpha in given.alphas if "speculative" in parts else ():
            say(pair.draft_module, agreeing(pair.follows, alpha))
            # The length that the theorem calls best for this alpha and these costs, of those that are captured.
            rate = {n: expected_tokens(alpha, n) / (costs.verify(1 + n) + n * step) for n in LENGTHS}
            best = max(rate, key=lambda n: rate[n])
            for length in dict.fromkeys((best, *given.lengths)):
                drafter = ModelDrafter(pair.draft, step_seconds=step)
                one = partial(write, pair, prompts, tokens, sampling, drafter, length)
                one(0)
                took, alone, results = [], [], []
                for seed in range(given.repeats):  # in turn
                    taken, rounds = timed(one, seed)
                    took.append(taken)
                    results.append(rounds)
                    alone.append(timed(one_plain, seed)[0])
                tested = sum(record.tested for each in results for record in each)
                accepted = sum(record.accepted for each in results for record in each)
                drafting = {drafter.name: DraftSeconds(token=step)}
                by_rounds = sum(predicted_seconds(each, costs, drafting, 64) for each in results)
                without = sum(plain_seconds(each, costs, 64) for each in results)
                table = {n: costs.verify(n) for n in (1, 1 + length)}
                tell(
                    what="speculative", setting=setting, alpha=alpha, alpha_measured=accepted / tested, length=length,
                    is_best=length == best, per_second=tokens / median(took), plain_per_second=tokens / median(alone),
                    speedup=median(alone) / median(took),
                    by_the_theorem=walltime_factor(alpha, length, step / costs.verify(1)),
                    by_the_table=measured_speedup(alpha, length, step, table), by_the_rounds=without / by_rounds,
                    phases=phases(results[-1]), rounds=len(results[-1]),
                )  # fmt: skip


def write(
    pair: Pair,
    prompts: list[list[int]],
    tokens: int,
    sampling: SamplingSettings,
    drafter: Drafter | None,
    length: int,
    seed: int,
) -> Rounds:
    """See `Pair.write`."""
    return pair.write(prompts[seed], tokens, drafter, length, sampling)


if __name__ == "__main__":
    main()
