"""Which processor this is: kinds that Python gives one name are told apart, as costs are kept by them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.costs import kept
from outrider.support import processor
from tests.helpers.toys import table

CORE = "cpu family\t: 25\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\nstepping\t: 1\n\nprocessor\t: 1\nmodel\t\t: 9\n"


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    processor._cpuinfo.cache_clear()
    yield
    processor._cpuinfo.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, text: str | None) -> tuple[str, tuple[str, ...], str]:
    """What is said of a machine whose /proc/cpuinfo holds this, None: that has none. → name, kind, key of a cost table"""

    def read(*_: Any, **__: Any) -> io.StringIO:
        if text is None:
            raise FileNotFoundError
        return io.StringIO(text)

    processor._cpuinfo.cache_clear()
    monkeypatch.setattr(processor, "open", read, raising=False)
    model = table(1, 5)
    monkeypatch.setattr(type(model), "fingerprint", "always the same", raising=False)
    return processor.processor(), processor.processor_kind(), kept._key(model)


def test_kinds_of_one_name_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, again = (on(monkeypatch, CORE.format(model=model)) for model in (1, 17, 1))
    assert one[0] == other[0] == "AMD EPYC"
    assert one[1] != other[1]
    assert one[2] != other[2]
    assert one == again


def test_elsewhere_it_is_what_python_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "arm")
    name, kind, _ = on(monkeypatch, None)
    assert name == kind[0] == "arm"
