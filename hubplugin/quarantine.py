"""Targets that must not be found, whatever a correction gives them, and who decided so, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from hubplugin.errors import StoreError

LONGEST = 200
"""Characters of a reason or a name that are kept."""


def _dated(text: str) -> str:
    """`text`; raises ValueError unless it is a date as ISO 8601 has it."""
    datetime.fromisoformat(text)
    return text


class Event(BaseModel):
    """One decision: `who` put the target `id` into quarantine, or let it out, `when` (UTC, ISO 8601) and `why`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["add", "remove"]
    id: int | str
    when: Annotated[str, AfterValidator(_dated)]
    who: str
    why: str

    def __str__(self) -> str:
        done = "added" if self.what == "add" else "removed"
        return f"{self.id!r} {done} {self.when} by {self.who}: {self.why}"


class Quarantine(BaseModel):
    """All decisions about the targets of one store, the oldest first. Nothing is ever deleted from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    events: tuple[Event, ...] = ()

    @property
    def last(self) -> dict[int | str, Event]:
        """The decision that holds for each target that is in quarantine."""
        found = {event.id: event for event in self.events}
        return {target: event for target, event in found.items() if event.what == "add"}

    def changed(self, what: Literal["add", "remove"], ids: Sequence[int | str], who: str, why: str) -> Quarantine:
        """With the same decision about each of `ids`."""
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        who, why = (_one_line(text) for text in (who, why))
        added = (Event(what=what, id=each, when=when, who=who, why=why) for each in ids)
        return self.model_copy(update={"events": (*self.events, *added)})


def parse(content: str | bytes, where: str) -> Quarantine:
    """The list in `content`, JSON. Raises StoreError, which calls its place `where`, if it is damaged."""
    try:
        return Quarantine.model_validate_json(content)
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        place = f"at {first!r}" if first else "and is no JSON"
        raise StoreError(f"the quarantine list in {where} is damaged {place}; put it right by hand") from None


def _one_line(text: str) -> str:
    """A text that is safe to print."""
    return "".join(part if part.isprintable() else " " for part in text)[:LONGEST].strip()
