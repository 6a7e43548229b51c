"""Which processor this is."""

from __future__ import annotations

import platform
from functools import cache


def processor() -> str:
    """Its name, for people; several kinds may share one."""
    return _cpuinfo().get("model name") or platform.processor()


def processor_kind() -> tuple[str, ...]:
    """What tells this kind of processor from others. On Linux `platform.processor` is empty or names an architecture."""
    held = _cpuinfo()
    return (processor(), platform.machine(), *(held.get(key, "") for key in ("cpu family", "model", "stepping")))


@cache
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first core."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().split("\n\n", 1)[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}
