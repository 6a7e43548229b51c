"""`outrider train pair`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from outrider.cli.files import check_new_folder, new_folder
from outrider.cli.shared_options import json_option


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder of both.")
@click.option(
    "--data", multiple=True, required=True, metavar="SOURCE[@TOKENS]", help="Text file, folder, .jsonl or dataset:NAME."
)
@click.option("--layers", default=12, show_default=True, help="Of the target.")
@click.option("--width", default=768, show_default=True, help="Of the target, a multiple of 64.")
@click.option("--draft-layers", default=2, show_default=True)
@click.option("--draft-width", default=256, show_default=True)
@click.option("--vocabulary", default=8192, show_default=True, help="Byte pairs learnt from the data, 257 … 65536.")
@click.option("--length", default=128, show_default=True, help="Tokens of a window and of the longest text.")
@click.option("--steps", default=20_000, show_default=True, help="Of each model.")
@click.option("--batch-size", default=32, show_default=True, help="Windows a step and device.")
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--every", default=500, show_default=True, help="Steps between held-out losses and checkpoints.")
@click.option("--hours", type=float, help="Stop each model after that long; go on with --resume.")
@click.option("--seed", default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoints.")
@json_option
def pair(output: Path, data: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """A GPT-like target and its draft from nothing, with unigrams and bigrams: Leviathan's small set-up (section 4.2).

    The defaults are the paper's 97 and 6 million parameters. A document begins a text, so LM1B wants a sentence a document:
    JSON lines of {"text": sentence}, or a data set with a row each.
    """
    from outrider.support.text_files import passed_over
    from outrider.train.corpus import left_out, parse_source
    from outrider.train.pair import PairSettings, Shape, make_pair
    from outrider.train.run import RunSettings, processes

    check_new_folder(output)
    names = ("steps", "batch_size", "learning_rate", "every", "hours", "seed", "resume")
    run = RunSettings(**{name: given[name] for name in names})
    target, draft = (Shape(given[f"{part}layers"], given[f"{part}width"]) for part in ("", "draft_"))
    sources = tuple(parse_source(text) for text in data)
    if passed := sum(left_out(source.name) for source in sources):
        click.echo(passed_over(passed), err=True)
    with new_folder(output):
        made = make_pair(PairSettings(sources, target, draft, given["vocabulary"], given["length"]), run, output)
    if not processes().is_main_process:
        return
    found = {
        name: {
            "parameters": one.parameters,
            "held_out_nats": one.loss,
            "steps": one.report.steps,
            "seconds": round(one.report.seconds),
        }
        for name, one in made.items()
    }
    if as_json:
        click.echo(json.dumps({**found, "output": str(output)}))
        return
    for name, one in found.items():
        click.echo(
            f"{name}: {one['parameters'] / 1e6:.1f} million parameters, {one['held_out_nats']:.3f} nats a token on held-out "
            f"text, {one['steps']} steps"
        )
    table = f"ngram:table={output}/ngrams"
    click.echo(
        f"alpha of each: outrider bench alpha --target {output}/target --task lm1b --temperature 0 --temperature 1 "
        f"--draft {output}/draft --draft {table},order=2 --draft {table},order=1"
    )
