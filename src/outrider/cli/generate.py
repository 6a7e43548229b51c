"""`outrider generate`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.beams import beam_choice, beam_options, run_beams
from outrider.cli.config import config_option, plain_asked
from outrider.cli.models import ModelChoice, model_options
from outrider.cli.sampling import (
    alternatives_option,
    invariant_option,
    law_options,
    length_option,
    parse_length,
    told_if_greedy,
)
from outrider.cli.shared_options import json_option, text_options
from outrider.cli.structured import structure_options, take_structure, told_if_cut
from outrider.cli.tensor_parallel import count_traffic, shares_of, show_shares, tensor_parallel_options
from outrider.cli.trace import TraceFile, trace_file
from outrider.errors import ParameterError
from outrider.settings.drafting import check_without_drafts
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.audio import Audio
    from outrider.bench.profile import Profile
    from outrider.compare import Comparison
    from outrider.drafters import Drafter
    from outrider.generation import Stream
    from outrider.models.base import TextModel
    from outrider.results import Result
    from outrider.sharded.costs import Share


@click.command()
@click.argument("prompt", required=False)
@click.option("--file", "-f", "path", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--audio", type=click.Path(path_type=Path), metavar="FILE.wav", help="What a model that hears is to hear.")
@click.option("--language", help="Spoken in --audio, en or german say  [default: the model judges]")
@click.option("--task", help="Of --audio: transcribe or translate  [default: transcribe]")
@model_options
@tensor_parallel_options
@config_option
@length_option
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="At most; 1 or more.")
@law_options
@click.option(
    "--lenience", type=float, default=1.0, help="Above 0. Below 1: LOSSY, accept more than the target's distribution allows."
)
@alternatives_option
@beam_options
@click.option(
    "--seed",
    type=int,
    help="For the same output again, with the same cost tables, a fixed draft length or --drafter-invariant  "
    "[default: random]",
)
@invariant_option
@text_options
@structure_options
@click.option("--plain", is_flag=True, help="Without a draft, also where one is named: the baseline.")
@click.option("--compare", is_flag=True, help="Run with and without the draft, and compare.")
@click.option("--profile", is_flag=True, help="Show where the time went, and the bandwidth that was reached.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.html", help="Write a page that shows every round.")
@click.option("--logprobs", is_flag=True, help="Log-probabilities of the tokens, with --json.")
@json_option
def generate(prompt: str | None, path: Path | None, models: ModelChoice, **given: Any) -> int:
    """Generate text after PROMPT (or --file, or standard input), as the target alone would (but for --lenience).

    An encoder-decoder reads PROMPT, or hears --audio, and writes its answer (docs/encoder-decoder.md).
    """
    given["plain"] = plain_asked(given["plain"], "draft", "num_draft_tokens", "alternatives", "lenience", "compare")
    for one, other in (("plain", "compare"), ("profile", "compare"), ("trace", "compare")):
        if given[one] and given[other]:
            raise click.UsageError(f"--{one} and --{other} exclude each other: leave one out")
    if given["logprobs"] and not given["as_json"]:
        raise click.UsageError("--logprobs belongs to --json: give both")
    recording = _audio(prompt, path, given)
    beams = beam_choice(given)
    read = recording or read_prompt(prompt, path)
    if beams is not None:
        return run_beams(beams, models, read, given)
    trace = trace_file(given.pop("trace"), given)
    structure = take_structure(given)
    _check(given)
    told_if_greedy(given["temperature"])
    if given["plain"]:
        models = replace(models, draft=())
    model = models.load_target()
    drafter = models.load_draft(model) if models.draft else None
    _check_memory(drafter)
    compare, as_json, chat = given.pop("compare"), given.pop("as_json"), given.pop("chat")
    profiled = given.pop("profile")
    given.pop("plain")
    given["processors"] = () if structure is None else structure.constraints(model)
    options = {key: value for key, value in given.items() if value is not None}
    from outrider.request.prompts import as_said

    shown = as_said(model, read, chat) if isinstance(read, str) else read
    if compare:
        return _compare(model, shown, drafter, options, as_json)
    code, result = _generate(model, shown, drafter, options, as_json, profiled, trace)
    told_if_cut(structure, model, result, "--max-new-tokens")
    return code


def _audio(prompt: str | None, path: Path | None, given: dict[str, Any]) -> Audio | None:
    """The recording that --audio names."""
    file, language, task = (given.pop(name) for name in ("audio", "language", "task"))
    if file is None:
        if language is not None or task is not None:
            raise click.UsageError("--language and --task are for --audio FILE.wav: leave them out")
        return None
    if prompt is not None or path is not None or given["chat"]:
        raise click.UsageError("--audio excludes PROMPT, --file and --chat: what is heard is the prompt")
    from outrider.audio import read_wav

    return read_wav(file, language, task)


def read_prompt(prompt: str | None, path: Path | None) -> str:
    """The prompt from the argument, the file or standard input."""
    if prompt is not None and path is not None:
        raise click.UsageError("PROMPT and --file exclude each other: leave one out")
    try:
        if path is not None and str(path) != "-":
            text = path.read_text(encoding="utf-8")
        elif path is not None or prompt is None or prompt == "-":
            if sys.stdin.isatty():
                raise click.UsageError("no prompt: give it as an argument, with --file, or on standard input")
            text = sys.stdin.read()
        else:
            text = prompt
    except OSError as error:
        raise ParameterError(f"prompt file {path} can't be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ParameterError(f"prompt {path or '(standard input)'} is not UTF-8 text") from None
    if not text:
        raise ParameterError("prompt must not be empty: give some text")
    return text


def _check(given: dict[str, Any]) -> None:
    """Refuse bad numbers before a model is loaded."""
    from outrider.request.options import parse_options

    given["num_draft_tokens"] = parse_length(given["num_draft_tokens"])
    check_count("max_new_tokens", given["max_new_tokens"])
    if given["plain"]:
        check_without_drafts(given["lenience"], given["alternatives"])
    own = ("plain", "compare", "profile", "chat", "as_json")
    parse_options(1, {key: value for key, value in given.items() if key not in own})  # type: ignore[arg-type]


def _check_memory(drafter: Drafter | None) -> None:
    """A memory that ends with this one generation would be of no use, and nobody would be told."""
    from outrider.drafters import SuffixDrafter

    parts = drafter.parts() if drafter is not None else []
    if any(isinstance(part, SuffixDrafter) and part.forgets_at_exit for part in parts):
        raise ParameterError(
            "draft suffix:memory=yes keeps texts for later generations of a process, and generate makes one: name a file, "
            "suffix:store=FILE"
        )


def _generate(
    model: TextModel,
    prompt: Any,
    draft: Drafter | None,
    options: dict[str, Any],
    as_json: bool,
    profiled: bool,
    trace: TraceFile | None,
) -> tuple[int, Result]:
    """→ exit code, what was generated"""
    import outrider

    recorded = {**options, **(trace.extras if trace is not None else {})}
    stream = outrider.stream(model, prompt, draft=draft, **recorded)
    counted = count_traffic(model, draft) if profiled else []
    with nullcontext() if trace is None else trace.written(stream, model, prompt, draft):
        code = show(stream, quiet=as_json)
        result = stream.result if options["logprobs"] else replace(stream.result, logprobs=None)
        shares = shares_of(counted)
        _conclude(result, _profile(model, draft, result) if profiled else None, as_json, shares)
    if trace is not None and sys.stdout.isatty() and not as_json:
        click.echo(f"trace: {trace.path}", err=True)
    return code, result


def _conclude(result: Result, found: Profile | None, as_json: bool, shares: list[Share]) -> None:
    """The figures after the text: one JSON object, or lines on standard error for whoever watches.

    shares: of models that several ranks compute.
    """
    from outrider.cli.output import describe, show_profile

    if as_json:
        out = result.to_dict() if found is None else {**result.to_dict(), "profile": found.to_dict()}
        if shares:
            out["tensor_parallel"] = [share.to_dict() for share in shares]
        click.echo(json.dumps(out, ensure_ascii=False))
    elif sys.stdout.isatty():
        click.echo(f"\n{describe(result.stats)}; seed {result.seed}; ended by {result.finish_reason}", err=True)
    elif result.lossy:  # said even where nobody watches
        click.echo(
            f"outrider: LOSSY: lenience {result.lenience:g}, the text need not follow the target's distribution", err=True
        )
    if found is not None and not as_json:
        show_profile(found)
        show_shares(shares)


def _profile(model: TextModel, draft: Drafter | None, result: Result) -> Profile:
    from outrider.bench.profile import profile

    return profile(result.rounds, model, draft)


def show(stream: Stream, quiet: bool = False) -> int:
    """Print the text as it comes: coloured by origin on a terminal, plain elsewhere. → exit code"""
    from rich.console import Console

    from outrider.cli.output import notes_held, print_piece

    console, written, notes = Console(), False, ExitStack()
    try:
        for piece in stream:
            if quiet:
                continue
            if not written:
                notes.enter_context(notes_held())
            written = True
            if console.is_terminal:
                print_piece(console, piece)
            else:
                sys.stdout.write(piece)
                sys.stdout.flush()
        written = not quiet  # the empty line of an empty text, too
    except KeyboardInterrupt:
        stream.close()
        click.echo(f"\noutrider: interrupted after {len(stream.result.tokens)} tokens", err=True)
        return 130
    finally:
        if written:
            sys.stdout.write("\n")
            sys.stdout.flush()
        notes.close()
    return 0


def _compare(model: TextModel, prompt: Any, draft: Any, options: dict[str, Any], as_json: bool) -> int:
    from outrider.compare import compare

    seen: list[Stream] = []

    def shown(stream: Stream) -> None:
        seen.append(stream)
        code = show(stream, quiet=as_json)
        if code:  # interrupted, and said so: half a text is not compared with a whole one
            alone()
            raise SystemExit(code)

    def alone() -> None:
        for stream in seen if as_json else ():
            click.echo(json.dumps(stream.result.to_dict(), ensure_ascii=False))

    try:
        comparison = compare(model, prompt, draft, options, shown)
    except KeyboardInterrupt:
        alone()
        raise
    if as_json:
        click.echo(json.dumps(comparison.to_dict(), ensure_ascii=False))
    else:
        click.echo(report(comparison), err=True)
    return 0


def report(comparison: Comparison) -> str:
    """The comparison in a few lines."""
    from outrider.cli.output import describe

    return "\n".join(
        [
            f"speculative: {describe(comparison.speculative.stats)}",
            f"plain:       {describe(comparison.plain.stats)}",
            f"speed-up:    {comparison.speedup:.2f}× (predicted from costs and acceptance: {comparison.predicted})",
            f"tokens:      {comparison.agreement}",
        ]
    )
