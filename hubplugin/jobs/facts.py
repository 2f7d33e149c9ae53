"""What reports and JSON say of values that hold more than facts: models, corrections, what was tried.

The results of jobs are told as they are, field by field: `hubplugin.report.facts_of` makes JSON of them, and
docs/reference/json.md is made from their types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import AliasPath, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from hubplugin.learning import Lesson
from hubplugin.measures.significance import Side
from hubplugin.model import OffsetModel
from hubplugin.report import Tile, share_tile, shares_tile
from hubplugin.report.sections import NEVER, RECALL, WORST
from hubplugin.store import Correction
from hubplugin.trial import Trial


class Facts(BaseModel):
    """Made from a value that has these attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


@dataclass(frozen=True)
class ToldAs:
    """Of a field: its JSON is that of the facts `of` its value."""

    of: type[Facts]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler.generate_schema(self.of)
        told = core_schema.plain_serializer_function_ser_schema(self.of.model_validate, return_schema=schema)
        return core_schema.any_schema(serialization=told)


Parameters: TypeAlias = dict[str, int | float | str | None]


class ModelFacts(Facts):
    """A fitted model: its method, and the fingerprints that name it and its banks."""

    method: str
    parameters: Parameters
    fingerprint: str
    bank_fingerprint: str


class CorrectionFacts(Facts):
    """A model in a store. active: false of one that is half-written; searches are raw then. made: when its writing
    began, null where that is not known."""

    active: bool
    made: str | None
    method: str = Field(validation_alias=AliasPath("model", "method"))
    parameters: Parameters = Field(validation_alias=AliasPath("model", "parameters"))
    fingerprint: str = Field(validation_alias=AliasPath("model", "fingerprint"))
    bank_fingerprint: str = Field(validation_alias=AliasPath("model", "bank_fingerprint"))


class CandidateFacts(Facts):
    """A configuration on held-out bank queries: skewness of the 10-occurrence, its cost in similarity, R@1 from 0 to 1
    and the geometric mean rank of the queries' own targets, null without known answers."""

    method: str
    parameters: Parameters
    skewness: float | None
    cost: float | None
    recall_at_1: float | None = Field(validation_alias="recall")
    mean_rank: float | None = Field(validation_alias="rank")


class TrialFacts(Facts):
    """What the guard saw on held-out queries, without and with the correction. measurable: whether hubness or R@1 of
    either kind changes beyond chance. would_help: whether nothing is objected and R@1 rises beyond chance; null where
    answers are not known. notes: what is worth knowing, such as that the bank is small. bank: of what kind it is. gain:
    of R@1, and its standard error; null without known answers. asked: R@1 of other wordings of what a log asks for;
    null where its answers are not known, or few are asked again."""

    measurable: bool
    objections: list[str]
    notes: list[str]
    bank: str
    held_out_queries: int
    uncorrected: CandidateFacts
    corrected: CandidateFacts
    gain: float | None
    gain_error: float | None
    asked: Side | None
    would_help: bool | None

    @model_validator(mode="before")
    @classmethod
    def _of(cls, trial: Trial) -> dict[str, Any]:
        own = {name: getattr(trial, name) for name in ("measurable", "objections", "notes", "gain", "asked")}
        kind = None if trial.bank is None else trial.bank.kind
        both = {"uncorrected": trial.raw, "corrected": trial}
        figures = {"held_out_queries": trial.queries, "gain_error": trial.error, "would_help": trial.helps}
        return own | both | figures | {"bank": kind}


class LessonFacts(Facts):
    """What known answers would teach beside the default's offsets. strength: of the map of the query, 0 where it would
    not be learned; whitened: whether queries would be whitened before it. asked, other: R@1 of held-out queries without
    and with the map, of other wordings of what was asked before, null where there are few, and of what was not."""

    strength: float
    whitened: bool
    asked: Side | None
    other: Side

    @model_validator(mode="before")
    @classmethod
    def _of(cls, lesson: Lesson) -> dict[str, Any]:
        how = {"strength": lesson.how.strength, "whitened": lesson.how.whitening is not None}
        return how | {"asked": lesson.asked, "other": lesson.other}


ToldModel: TypeAlias = Annotated[OffsetModel, ToldAs(ModelFacts)]
ToldCorrection: TypeAlias = Annotated[Correction, ToldAs(CorrectionFacts)]
ToldFigures: TypeAlias = Annotated[Trial, ToldAs(CandidateFacts)]
ToldTrial: TypeAlias = Annotated[Trial, ToldAs(TrialFacts)]
ToldLesson: TypeAlias = Annotated[Lesson, ToldAs(LessonFacts)]


def tiles_of(trial: Trial) -> list[Tile]:
    """What the guard saw on held-out queries of the bank."""
    before, asked = trial.raw, trial.asked
    assert before is not None
    held_out = f"expected with the correction, on {trial.queries:,} held-out bank queries"
    unknown = "the bank is no log with known answers, or asks for few targets in several wordings"
    return [
        share_tile(
            RECALL, before.recall, trial.recall, more_is_better=True, change=trial.change, note=held_out,
            unknown="--answers says what queries ask for",
        ),
        share_tile(WORST, before.largest, trial.largest, more_is_better=False, note=held_out),
        share_tile(NEVER, before.never, trial.never, more_is_better=False, note=held_out),
        shares_tile("R@1 of what was asked before", {"other wordings": asked}, unknown),
    ]  # fmt: skip
