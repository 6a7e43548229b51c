"""`outrider theory`: the closed forms of the papers, without running a model."""

from __future__ import annotations

import click

from outrider.cli.theory.explain import explain
from outrider.cli.theory.figures import figures
from outrider.cli.theory.scale import scale
from outrider.cli.theory.tables import tables


@click.group()
def theory() -> None:
    """What the papers' formulas say, without running a model."""


for _command in (explain, tables, figures, scale):
    theory.add_command(_command)
