"""`outrider bench`."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measurements, each beside its baseline."""
