"""Results as JSON: what `--json` prints, and docs/reference/json.md describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

_adapter = cache(TypeAdapter)


def facts_of(result: object) -> dict[str, Any]:
    """`result`, a pydantic model or a dataclass, as plain JSON under the names that its type gives; null for numbers
    that are none, which JSON has no word for."""
    kind: Any = type(result)
    facts: dict[str, Any] = plain(_adapter(kind).dump_python(result, mode="json", by_alias=True))
    return facts


def plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
