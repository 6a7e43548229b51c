"""Options about the law that tokens are drawn from, and about draft lengths, the same for every command that has them."""

from __future__ import annotations

import click

from outrider.cli.shared_options import Command, add_options
from outrider.errors import ParameterError
from outrider.settings.drafting import OptimalLength, check_length


def _biases(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[int, float]:
    """ID=VALUE, … → {id: value}"""
    del context, parameter
    found: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            number, bias = int(token), float(value)
        except ValueError:
            raise ParameterError(f"logit_bias must be ID=VALUE, a token id and a number or -inf, got {text!r}") from None
        if number in found:
            raise ParameterError(f"logit_bias must give each token once, got two for {number}: leave one out")
        found[number] = bias
    return found


_TRUNCATION = (
    click.option("--top-k", type=int, default=0, help="Of the most probable tokens alone; 0: of all."),
    click.option("--top-p", type=float, default=1.0, help="Nucleus: this share of the probability, above 0; 1: all of it."),
    click.option("--min-p", type=float, default=0.0, help="This share of the best token's probability at least, 0 … 1."),
)
_LAW = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 or more; 0: greedy."),
    *_TRUNCATION,
    click.option("--repetition-penalty", type=float, default=1.0, help="Above 0; 1: none."),
    click.option("--presence-penalty", type=float, default=0.0, help="-2 … 2 as a rule; 0: none."),
    click.option("--frequency-penalty", type=float, default=0.0, help="-2 … 2 as a rule; 0: none."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=_biases,
        help="Added to a token's logit, -inf excludes it; may be given several times.",
    ),
)


def truncation_options(command: Command) -> Command:
    """Add --top-k, --top-p and --min-p; the command gets top_k, top_p and min_p."""
    return add_options(command, _TRUNCATION)


def law_options(command: Command) -> Command:
    """Add --temperature, the same, the three penalties and --logit-bias."""
    return add_options(command, _LAW)


length_option = click.option(
    "--num-draft-tokens",
    metavar="N|auto|optimal:ALPHA",
    default="auto",
    show_default=True,
    help="Draft length 0 … 64; auto: adapted to what pays; optimal:ALPHA: best at this acceptance rate.",
)


alternatives_option = click.option(
    "--alternatives",
    type=int,
    metavar="N",
    help="Tokens to score in each drafted one's place, 0 … 16  [default: where they pay, at adaptive lengths]",
)


invariant_option = click.option(
    "--drafter-invariant",
    is_flag=True,
    help="The same seed gives the same text whatever drafts: plain decoding's, but for rounding. Drafts fit a little less.",
)


def told_if_greedy(temperature: float) -> None:
    """Say that what was given on the command line to cut the law does nothing where the best token is taken."""
    context = click.get_current_context()
    names = ("top_k", "top_p", "min_p")
    given = [name for name in names if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if temperature == 0.0 and given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        click.echo(
            f"outrider: {options} changes nothing at temperature 0, the best token: give --temperature 1, say", err=True
        )


def parse_length(text: str) -> int | OptimalLength | None:
    """N, auto (None) or optimal:ALPHA."""
    if text == "auto":
        return None
    kind, _, alpha = text.partition(":")
    try:
        number = float(alpha) if kind == "optimal" else int(text)
    except ValueError:
        raise ParameterError(f"num_draft_tokens must be a number, auto or optimal:ALPHA, got {text!r}") from None
    if kind == "optimal":
        return OptimalLength(number)
    check_length(int(number))
    return int(number)
