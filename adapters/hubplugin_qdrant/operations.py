"""An operation is a generator that yields what the plain client's methods return, and is sent their results.

It is written once and driven by both clients, as httpx drives an `auth_flow`: by the sync client, for which those are
the results themselves, and by the async one, which awaits them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

Operation: TypeAlias = Generator[Any, Any, Any]

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a client's method, by name."""
