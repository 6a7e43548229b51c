"""`outrider train`: makes drafts."""

from __future__ import annotations

import click

from outrider.cli.train.corpus import corpus
from outrider.cli.train.drafts import blocks, head, student
from outrider.cli.train.pair import pair
from outrider.cli.train.texts import texts


@click.group()
def train() -> None:
    """Make a draft: texts by the target itself, draft heads on its hidden state, a small student; or a small target
    and its draft from nothing (docs/training.md).
    """


for command in (corpus, texts, head, blocks, student, pair):
    train.add_command(command)
