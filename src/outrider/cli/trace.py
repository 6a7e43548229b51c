"""`outrider generate --trace FILE.html`: the page is written however the generation ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.drafters import Drafter
    from outrider.generation import Stream
    from outrider.models.base import TextModel

ALWAYS = ("temperature", "num_draft_tokens", "max_new_tokens")
NOT_LISTED = ("prompt", "path", "target", "draft", "trace", "as_json", "plain", "profile", "logprobs", "seed")


@dataclass(frozen=True)
class TraceFile:
    """Where the page goes, and the settings that it lists."""

    path: Path
    settings: dict[str, object]

    @property
    def extras(self) -> dict[str, bool]:
        """What `generate` must record for it."""
        from outrider.report.trace_header import EXTRAS

        return dict.fromkeys(EXTRAS, True)

    @contextmanager
    def written(self, stream: Stream, model: TextModel, prompt: Any, draft: Drafter | None) -> Iterator[None]:
        """Write the page when the block ends, with what there is by then, whatever ended it."""
        from outrider.costs import measured_costs
        from outrider.report.trace import write_trace

        costs = measured_costs(model)  # the table that the draft lengths follow, before the run may refute it
        try:
            yield
        finally:
            write_trace(self.path, stream.result, model, prompt, draft=draft, settings=self.settings, costs=costs)


def trace_file(path: Path | None, given: dict[str, Any]) -> TraceFile | None:
    """What --trace asks for. Raises where no file can be written, before anything is loaded for it."""
    if path is None:
        return None
    from outrider.report.trace_file import check_path

    check_path(path)
    if path.suffix != ".html":
        raise ParameterError(f"trace must end in .html, got {path}")
    return TraceFile(path, _settings(given))


def _settings(given: dict[str, Any]) -> dict[str, object]:
    """The options that shape the output: the main ones, and the others as far as they were given."""
    context = click.get_current_context()

    def is_listed(name: str) -> bool:
        return name in ALWAYS or context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    listed = {name: value for name, value in {**context.params, **given}.items() if is_listed(name)}
    if "chat" in listed:
        listed["prompt format"] = "chat template" if listed.pop("chat") else "raw text"
    return {name: value for name, value in sorted(listed.items()) if name not in NOT_LISTED}
