"""What single parts cost: sampling, copying, and what quantizing does to a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from outrider.cli.generate import read_prompt
from outrider.cli.models import ModelChoice, threads_option
from outrider.cli.shared_options import json_option
from outrider.errors import ParameterError


@click.command()
@threads_option
@json_option
def sampling(as_json: bool) -> None:
    """The cost of temperature, top-k and top-p at a vocabulary of 152,000, beside a full sort."""
    from outrider.bench.machine import machine
    from outrider.bench.sampling_cost import VOCABULARY, measure

    found = measure()
    if as_json:
        cells_out = {name: {key: asdict(value) for key, value in cells.items()} for name, cells in found.items()}
        click.echo(json.dumps({"bench": "sampling", "rows": 5, "milliseconds": cells_out, **machine()}))
    else:
        click.echo(f"milliseconds for 5 rows of {VOCABULARY:,} logits: median (quartiles)")
        for name, cells in found.items():
            click.echo(f"{name:18s} " + "   ".join(f"{key} {value}" for key, value in cells.items()))


@click.command()
@click.option("--context", default=1_000_000, show_default=True, help="Tokens before the drafts.")
@click.option("--table", type=click.Path(path_type=Path), help="An n-gram table to measure, too.")
@threads_option
@json_option
def copying(context: int, table: Path | None, as_json: bool) -> None:
    """The cost of drafting without a model: copies and tables, microseconds a token."""
    if context < 1:
        raise ParameterError(f"context must be 1 or more, got {context}")
    from outrider.bench.drafting_cost import measure
    from outrider.bench.machine import machine
    from outrider.bench.statistics import Spread

    found = measure(context, table)
    if as_json:
        out = {n: {k: asdict(v) if isinstance(v, Spread) else v for k, v in cells.items()} for n, cells in found.items()}
        click.echo(json.dumps({"bench": "copying", "context": context, "microseconds": out, **machine()}))
    else:
        click.echo(f"microseconds a token after {context:,} tokens: read once; a round of 8 drafted tokens")
        for name, cells in found.items():
            click.echo(f"{name:16s} {cells['read']:8.2f}   {cells['round']}")


@click.command()
@click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]")
@click.option("--reference", default="auto", show_default=True, help="The dtype that the others are compared with.")
@click.option("--dtype", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--text", type=click.Path(path_type=Path), help="A text file  [default: ten problems of HumanEval, solved]")
@click.option("--max-tokens", default=1024, show_default=True, help="Tokens of the text.")
@threads_option
@json_option
def precision(
    target: str | None, reference: str, dtype: tuple[str, ...], text: Path | None, max_tokens: int, as_json: bool
) -> None:
    """What quantizing the weights does to the model: perplexity, greedy agreement, divergence."""
    if max_tokens < 2:
        raise ParameterError(f"max_tokens must be 2 or more, got {max_tokens}")
    from outrider.bench.machine import machine
    from outrider.bench.precision import compare_laws, default_text
    from outrider.models.base import refuse_encoder

    words = default_text() if text is None else read_prompt(None, text)
    base = ModelChoice(target, dtype=reference).load_target()
    refuse_encoder(base, "bench precision")
    if base.max_length is not None and max_tokens > base.max_length:
        if click.get_current_context().get_parameter_source("max_tokens") is ParameterSource.COMMANDLINE:
            raise ParameterError(
                f"max_tokens must be {base.max_length} or less, the positions of {base.name}, got {max_tokens}"
            )
        max_tokens = base.max_length
    tokens = [int(token) for token in base.tokenizer.encode(words)][:max_tokens]
    found = [compare_laws(base.dtype_name, base, base, tokens)]
    for name in dtype:
        found.append(compare_laws(name, base, ModelChoice(target, dtype=name).load_target(), tokens))
    if as_json:
        rows = [asdict(row) for row in found]
        about = {"bench": "precision", "target": base.name, "reference": base.dtype_name}
        click.echo(json.dumps({**about, "rows": rows, **machine()}))
        return
    click.echo(f"{base.name}, {found[0].tokens} tokens\n{'dtype':10s} perplexity  agreement  KL (nats)  Σ min")
    for row in found:
        cells = f"{row.perplexity:10.3f} {row.agreement:10.1%} {row.divergence:10.4f} {row.overlap:6.3f}"
        click.echo(f"{row.name:10s} {cells}")
