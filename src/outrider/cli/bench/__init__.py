"""`outrider bench`: measurements, each beside its baseline; tables, or with --json one object."""

from __future__ import annotations

import click

from outrider.cli.bench.alpha import alpha
from outrider.cli.bench.batch import batch
from outrider.cli.bench.beams import beams
from outrider.cli.bench.compare import peers, setups
from outrider.cli.bench.drafters import drafters
from outrider.cli.bench.lengths import lengths
from outrider.cli.bench.lenience import lenience
from outrider.cli.bench.parts import copying, precision, sampling
from outrider.cli.bench.report import report
from outrider.cli.bench.sweep import sweep
from outrider.cli.bench.tasks import tasks
from outrider.cli.bench.toyllm import toyllm


@click.group()
def bench() -> None:
    """Measurements, each beside its baseline."""


for _command in (
    sampling,
    copying,
    precision,
    peers,
    setups,
    drafters,
    lengths,
    batch,
    tasks,
    sweep,
    alpha,
    lenience,
    beams,
    toyllm,
    report,
):
    bench.add_command(_command)
