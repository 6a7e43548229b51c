"""What a process must know to compute prompts as any other process would: models, draft, lengths, options, cost tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import outrider
from outrider.costs import CostBook, costs_by
from outrider.decode import Decoder
from outrider.draft_length import DraftLength, OptimalLength
from outrider.drafters import ChoiceDrafter, Drafter
from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.request.choices import make_length
from outrider.request.from_specs import LoadModel, load_draft_model, make_from_spec
from outrider.request.invariance import tell_of_rounding
from outrider.request.own_rules import with_own_rules
from outrider.request.prompts import as_said
from outrider.sampling import SamplingSettings


@dataclass(frozen=True)
class Setup:
    """What the command line says; it travels to other processes.

    draft: specifications as `--draft` takes them, none for plain decoding. num_draft_tokens: a number, `OptimalLength`, or
    None: adapted to costs and acceptance. chat: whether text goes through the chat template, None: if there is one.
    defaults: the options of lines that say nothing else, a seed among them. device: of the models, "auto" as in `load`.
    rounds: whether records tell every round, as [tokens, drafted, accepted]. compile: the models (`load`), for one row.
    prefix_cache: MiB of what prompts begin with that each model keeps (`Lanes`).
    """

    target: str | None = None
    draft: tuple[str, ...] = ("auto",)
    num_draft_tokens: int | OptimalLength | None = None
    batch_size: int = 8
    chat: bool | None = None
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"seed": 0})
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"
    rounds: bool = False
    compile: bool = False
    prefix_cache: int = 0

    def load(self, tables: Mapping[str, Any] | None = None) -> Ready:
        """Load the models. tables: cost tables of an earlier part of the run (`Ready.tables`); measured for want of them."""
        target = outrider.load(self.target, dtype=self.dtype, device=self.device, engine=self.engine, compile=self.compile)
        return self.use(target, tables)

    def use(self, target: TextModel, tables: Mapping[str, Any] | None = None) -> Ready:
        """The same with a target that is loaded already."""
        if target.tokenizer is None:
            raise ParameterError(f"target {target.name} has no tokenizer: a batch of prompts needs one")
        given = tables or {}
        book = CostBook.from_dict(self.batch_size, given)
        name, began = book.name_of(target), given.get("target")
        if began not in (None, name):
            raise ParameterError(f"target is {name} here, but the run began with {began}: say --dtype and --engine")
        drafter = self.drafter(target)
        if self.defaults.get("drafter_invariant") and self.defaults.get("temperature") and drafter is not None:
            tell_of_rounding(target)
        with costs_by(book):
            length = self._length(target, drafter)
        # What no prompt could be served with is said once, before the first.
        whole = with_own_rules(target, SamplingSettings(), [range(1)], 1)
        beside = {name: self.defaults[name] for name in ("alternatives", "lenience") if name in self.defaults}
        Decoder(target, (), whole, drafter, length, **beside)
        return Ready(target, drafter, length, book, self.defaults, self.chat, self.rounds, self.prefix_cache)

    def _length(self, target: TextModel, drafter: Drafter | None) -> DraftLength:
        if drafter is not None:
            drafter.bind(target)
        return make_length(self.num_draft_tokens, target, drafter, self.batch_size)

    def load_draft(self, name: str, own: dict[str, Any]) -> TextModel:
        """A draft's model, with options of its own."""
        return load_draft_model(name, own, self.dtype, self.device, self.engine, self.compile)

    def drafter(self, target: TextModel, load: LoadModel | None = None) -> Drafter | None:
        """The drafter for this target, or None. load: how its models are loaded, if not anew."""
        made = [make_from_spec(spec, load or self.load_draft, target) for spec in self.draft]
        for one in made:
            if one.remembers:
                raise ParameterError(
                    f"draft {one.name} can't keep texts in a batch: what a prompt gives would depend on which others were "
                    "finished before it; leave memory and store out"
                )
        return None if not made else made[0] if len(made) == 1 else ChoiceDrafter(made)


@dataclass(frozen=True)
class Ready:
    """Loaded models, and how they are used. book: what their passes cost, for passes of as many rows as the batch has."""

    target: TextModel
    drafter: Drafter | None
    length: DraftLength
    book: CostBook
    defaults: Mapping[str, Any]
    chat: bool | None = None
    rounds: bool = False
    prefix_cache: int = 0

    @property
    def tables(self) -> dict[str, Any]:
        """The target and the cost tables, for the other parts of the run."""
        return {"target": self.book.name_of(self.target), **self.book.to_dict()}

    def as_prompt(self, prompt: Any) -> Any:
        """Text as a chat message where that is wanted; all else as it is."""
        return as_said(self.target, prompt, self.chat) if isinstance(prompt, str) else prompt
