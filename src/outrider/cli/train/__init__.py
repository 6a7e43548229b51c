"""`outrider train`: makes drafts."""

from __future__ import annotations

import click

from outrider.cli.train.texts import texts


@click.group()
def train() -> None:
    """Make a draft: texts by the target itself, draft heads on its hidden state, a small student (docs/training.md)."""


for command in (texts,):
    train.add_command(command)
