"""`outrider theory scale`: the walltime of a target and a draft on many devices, from bytes, operations and all-reduces."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.shared_options import add_options, json_option
from outrider.errors import ParameterError
from outrider.theory import chinchilla

if TYPE_CHECKING:
    from outrider.theory.scale import Machine, Network, Pair

LENGTHS = range(8)
MOST = 1e18


def _network(name: str, parameters: float, layers: int, width: int) -> list[Any]:
    return [
        click.option(f"--{name}-parameters", type=float, default=parameters, show_default=True),
        click.option(f"--{name}-layers", type=int, default=layers, show_default=True),
        click.option(f"--{name}-width", type=int, default=width, show_default=True),
        click.option(f"--{name}-cache-width", type=int, help="Keys of a token in a layer  [default: the width]"),
    ]


_OPTIONS = [
    *_network("target", *chinchilla.TARGET),
    *_network("draft", *chinchilla.DRAFT),
    click.option("--bytes-per-weight", type=float, default=2.0, show_default=True),
    click.option("--devices", type=int, default=16, show_default=True),
    click.option("--bandwidth", type=float, default=1200.0, show_default=True, help="GB/s of a device's memory."),
    click.option("--tflops", type=float, default=275.0, show_default=True, help="Of a device."),
    click.option("--memory", type=float, default=34.4, show_default=True, help="GB of a device."),
    click.option("--link", type=float, default=300.0, show_default=True, help="GB/s between devices."),
    click.option("--all-reduce-us", type=float, help="Latency of one  [default: from Chen's two times, by hops of a ring]"),
    click.option("--fixed-ms", type=float, help="Of each pass, whatever it holds  [default: from Chen's two times]"),
    click.option("--context", type=int, default=0, show_default=True, help="Tokens before."),
    click.option("--batch", "batches", default="1,4,16,64,128,256,512,1024", show_default=True, metavar="B,…"),
    click.option("--alpha", "alphas", type=float, multiple=True, help="[default: that of Chen's HumanEval and XSum]"),
    json_option,
]


def _with_options(command: Any) -> Any:
    return add_options(command, _OPTIONS)


@click.command()
@_with_options
def scale(as_json: bool, batches: str, alphas: tuple[float, ...], **given: Any) -> None:
    """Milliseconds a token of target and draft, time by draft length, best length by batch: Chen's set-up, or yours.

    With nothing else given: 70B and 4B parameters on 16 TPU v4, beside what Chen et al. 2023 printed (docs/scale.md).
    """
    from outrider.theory.chens_setup import chens_machine, chens_networks, printed_and_ours
    from outrider.theory.scale import Pair

    target, draft = (_make_network(name, given) for name in ("target", "draft"))
    machine = _make_machine(given)
    if given["context"] < 0:
        raise ParameterError(f"context must be 0 or more, got {given['context']}")
    pair, rates = Pair(target, draft, machine, context=given["context"]), _rates(alphas)
    sizes = _sizes(batches)
    chens = not alphas and replace(pair, context=0) == Pair(*chens_networks(), chens_machine())
    report = {"machine": asdict(machine), "parts": _parts(pair), "lengths": _lengths(pair, rates)}
    report |= {"batches": _batches(pair, rates, sizes)}
    report |= {"checks": [asdict(one) for one in printed_and_ours(pair)] if chens else []}
    if as_json:
        click.echo(json.dumps({"theory": "scale", "context": pair.context, "alphas": rates, **report}))
    else:
        _print(pair, rates, report)


def _make_network(name: str, given: dict[str, Any]) -> Network:
    from outrider.theory.scale import Network

    for key in (f"{name}_parameters", f"{name}_width", "bytes_per_weight"):
        if not given[key] < MOST:
            raise ParameterError(f"{key} must be below {MOST:g}, got {given[key]:g}")

    parameters, layers, width, cache = (given[f"{name}_{part}"] for part in ("parameters", "layers", "width", "cache_width"))
    return Network(parameters, layers, width, given["bytes_per_weight"], cache)


def _make_machine(given: dict[str, Any]) -> Machine:
    from outrider.theory.chens_setup import chens_machine
    from outrider.theory.scale import Machine

    fitted = chens_machine()
    devices, reduce, fixed = given["devices"], given["all_reduce_us"], given["fixed_ms"]
    if reduce is not None and not 0 <= reduce < math.inf:
        raise ParameterError(f"all_reduce_us must be 0 or more, got {reduce:g}")
    hop = fitted.hop_seconds if reduce is None else reduce / 1e6 / max(1, 2 * (devices - 1))
    return Machine(
        devices=devices,
        bandwidth=given["bandwidth"] * 1e9,
        speed=given["tflops"] * 1e12,
        memory=given["memory"] * 1e9,
        hop_seconds=hop,
        link=given["link"] * 1e9,
        fixed_seconds=fitted.fixed_seconds if fixed is None else fixed / 1000,
    )


def _rates(alphas: tuple[float, ...]) -> dict[str, float]:
    from outrider.theory.chinchilla import TOKENS_PER_LOOP, alpha_of

    if any(not 0.0 <= alpha <= 1.0 for alpha in alphas):
        raise ParameterError(f"alpha must be in [0, 1], got {min(alphas)} … {max(alphas)}")
    if alphas:
        return {f"alpha {alpha:g}": alpha for alpha in alphas}
    return {name: alpha_of(name) for name in TOKENS_PER_LOOP}


def _sizes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ParameterError(f"batch must be whole numbers of 1 or more, separated by commas, got {text!r}")
    return found


def _parts(pair: Pair) -> dict[str, dict[str, float]]:
    """Milliseconds of a token's parts."""
    from outrider.theory.scale import forward

    made = {}
    for name, network in (("target", pair.target), ("draft", pair.draft)):
        one = forward(network, pair.machine, 1, 1, pair.context)
        made[name] = {part: 1000 * seconds for part, seconds in (*asdict(one).items(), ("total", one.seconds))}
    return made


def _lengths(pair: Pair, rates: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "loop_ms": 1000 * pair.loop_seconds(length),
            "speedup": {name: pair.speedup(alpha, length) for name, alpha in rates.items()},
        }
        for length in LENGTHS
    ]


def _batches(pair: Pair, rates: dict[str, float], sizes: list[int]) -> dict[str, Any]:
    from outrider.theory.scale import stops_paying

    rows = []
    for size in sizes:
        here = replace(pair, rows=size)
        best = {name: here.best_gamma(alpha) for name, alpha in rates.items()}
        gain = {name: here.speedup(alpha, best[name]) for name, alpha in rates.items()}
        rows.append(
            {"batch": size, "best": best, "speedup": gain, "target_ms": 1000 * here.target_seconds, "fits": here.fits}
        )
    return {"rows": rows, "stops": {name: stops_paying(pair, alpha) for name, alpha in rates.items()}}


def _print(pair: Pair, rates: dict[str, float], report: dict[str, Any]) -> None:
    from outrider.theory.scale import MOST_ROWS, balance

    machine = pair.machine
    latency = 1e6 * machine.all_reduce_seconds(0)
    click.echo(
        f"{machine.devices} devices, {latency:.1f} us an all-reduce, {1000 * machine.fixed_seconds:.2f} ms fixed a pass"
    )
    click.echo("\nms a token     weights   cache  operations  all-reduces  fixed   total")
    for name, part in report["parts"].items():
        cells = f"{part['weights']:8.3f} {part['cache']:7.3f}  {part['operations']:10.4f}  {part['all_reduces']:11.3f}"
        click.echo(f"{name:12s}  {cells}  {part['fixed']:5.2f}  {part['total']:6.2f}")
    if report["checks"]:
        click.echo("\nprinted by Chen et al. 2023                   printed                  here")
        for one in report["checks"]:
            click.echo(
                f"  {one['what']:42s}  {one['printed']:23s} {one['ours']:6.2f}{'  (fitted)' if one['fitted'] else ''}"
            )
    names = "  ".join(f"{name:>10s}" for name in rates)
    click.echo(f"\nspeed-up at   {'':8s}{names}   (alpha {', '.join(f'{alpha:.3f}' for alpha in rates.values())})")
    for row in report["lengths"]:
        cells = "  ".join(f"{row['speedup'][name]:9.2f}×" for name in rates)
        click.echo(f"  K = {row['length']}  {row['loop_ms']:8.2f} ms  {cells}")
    click.echo(
        f"\nbest K by batch, context {pair.context}; reading the weights balances {balance(pair.target, machine):.0f} tokens"
    )
    for row in report["batches"]["rows"]:
        cells = "  ".join(f"{row['best'][name]:2d} ({row['speedup'][name]:.2f}×)" for name in rates)
        fits = "" if row["fits"] else "   does not fit into the memory"
        click.echo(f"  batch {row['batch']:5d}  {row['target_ms']:8.2f} ms  {cells}{fits}")
    for name, stops in report["batches"]["stops"].items():
        click.echo(
            f"  {name}: {f'still pays at batch {MOST_ROWS}' if stops is None else f'no draft pays from batch {stops} on'}"
        )
