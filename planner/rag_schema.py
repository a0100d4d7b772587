"""RAGSchema: the stages of a retrieval-augmented pipeline and what each works on (RAGO, section 3.3 of the thesis).

A schema says nothing of machines: an inventory says what there is, and a profile how long a stage takes on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import yaml

StageName = Literal[
    "db_encode", "rewrite_prefix", "rewrite_decode", "embed", "retrieval", "rerank", "prefix", "decode"
]  # fmt: skip
STAGES: tuple[StageName, ...] = get_args(StageName)  # in the order of figure 3.2
GENERATING = frozenset({"rewrite_decode", "decode"})  # token by token
START = "start"  # what the first stage follows
T = TypeVar("T")
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class PlanInputError(ValueError):
    """A schema or an inventory that no plan can be made of: what is wrong, where, and what is expected."""


class InferenceStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage that runs a model over `tokens` of each request; a generating stage writes them after `context` others.

    The sizes are those of the roofline model, and 0 where a measured profile stands in for it: parameters, layers and
    width (0: as Llama 3 has them at this size), bytes of a weight and of the keys and values of a token. `efficiency`
    is the share of the peak FLOP/s that its products reach.
    """

    after: StageName | Literal["", "start"] = ""
    params: _Size = 0
    tokens: _Tokens = 0
    context: _Tokens = 0
    layers: _Tokens = 0
    width: _Tokens = 0
    kv_bytes: _Size = 0
    weight_bytes: Annotated[float, msgspec.Meta(gt=0, le=8)] = 2.0
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class RetrievalStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A search of `vectors` of so many bytes, of which each query reads the share `scan`.

    A request asks `queries` at once, `rounds` times: once before its first token, else at random places of its answer.
    """

    after: StageName | Literal["", "start"] = ""
    vectors: _Size = 0
    vector_bytes: _Size = 0
    scan: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    queries: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    rounds: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


RagStage = InferenceStage | RetrievalStage


class RAGSchema(msgspec.Struct, frozen=True):
    """A pipeline: its stages in the order in which a request passes them, `decode` last."""

    stages: dict[str, RagStage]
    name: str = ""

    def inference(self, name: str) -> InferenceStage:
        """Return a stage that runs a model; KeyError if it is none of the schema."""
        stage = self.stages[name]
        if not isinstance(stage, InferenceStage):
            raise KeyError(name)
        return stage

    @property
    def retrieval(self) -> RetrievalStage | None:
        """The search, if the pipeline has one."""
        stage = self.stages.get("retrieval")
        return stage if isinstance(stage, RetrievalStage) else None

    @property
    def iterations(self) -> int:
        """How often a request retrieves again while it generates."""
        return self.retrieval.rounds - 1 if self.retrieval else 0

    @property
    def placed(self) -> tuple[str, ...]:
        """The stages on chips before `decode`, in order: those that may be collocated."""
        return tuple(name for name in self.stages if name not in {"retrieval", "decode"})

    def spans(self, group: tuple[str, ...]) -> bool:
        """True if the search lies between two stages of a group, which then waits for it."""
        if "retrieval" not in self.stages:
            return False
        order = list(self.stages)
        place = order.index("retrieval")
        return order.index(group[0]) < place < order.index(group[-1])


class _SchemaFile(msgspec.Struct, forbid_unknown_fields=True):
    stages: dict[str, dict[str, Any]]
    name: str = ""


def read_schema(data: bytes, where: str) -> RAGSchema:
    """Return the schema of a file's YAML or JSON text; PlanInputError says where, what and what is expected."""
    raw = read_struct(data, where, _SchemaFile)
    stages: dict[str, RagStage] = {}
    for name, fields in raw.stages.items():
        if name not in STAGES:
            raise PlanInputError(
                f"{where}: stages.{name} is no stage; expected one of {', '.join(STAGES)}"
            )
        kind: type[RagStage] = RetrievalStage if name == "retrieval" else InferenceStage
        try:
            stages[name] = msgspec.convert(fields, kind, strict=False)
        except msgspec.ValidationError as error:
            raise PlanInputError(
                f"{where}: stages.{name}: {error}; expected {_fields(kind)}"
            ) from None
    found = RAGSchema({name: stages[name] for name in _order(stages, where)}, raw.name)
    if found.iterations and not found.inference("decode").tokens:
        raise PlanInputError(
            f"{where}: stages.decode.tokens is missing; expected the tokens of an answer, since retrieval.rounds is "
            f"{found.iterations + 1}"
        )
    return found


def read_struct(data: bytes, where: str, kind: type[T]) -> T:
    """Return a file's YAML or JSON text as this type; PlanInputError says where, what and what is expected."""
    try:
        return msgspec.convert(yaml.safe_load(data), kind, strict=False)
    except (msgspec.ValidationError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())[:200]
        raise PlanInputError(f"{where}: {said}; expected {_fields(kind)}") from None


def _fields(kind: type) -> str:
    return "a mapping of " + ", ".join(each.name for each in msgspec.structs.fields(kind))


def _order(stages: Mapping[str, RagStage], where: str) -> list[str]:
    """Return the stages as they follow one another; a stage that does not say after which follows figure 3.2."""
    for name in ("prefix", "decode"):
        if name not in stages:
            raise PlanInputError(f"{where}: stages.{name} is missing; expected it in every schema")
    before = dict(_before(stages, where))
    order: list[str] = []
    follower = {earlier: name for name, earlier in before.items()}
    at = follower.get(START)
    while at is not None and at not in order:
        order.append(at)
        at = follower.get(at)
    if left := [name for name in stages if name not in order]:
        circle = " after ".join([*_circle(left[0], before)])
        raise PlanInputError(
            f"{where}: stages have a cycle: {circle}; expected an order in which each comes after one before it"
        )
    if order[-1] != "decode":
        raise PlanInputError(
            f"{where}: stages.{order[-1]} comes after decode; expected decode at the end"
        )
    return order


def _before(stages: Mapping[str, RagStage], where: str) -> Iterator[tuple[str, str]]:
    """Yield (stage, the stage it follows or START)."""
    usual = [name for name in STAGES if name in stages]
    seen: dict[str, str] = {}
    for place, name in enumerate(usual):
        earlier = stages[name].after or (usual[place - 1] if place else START)
        if earlier != START and earlier not in stages:
            raise PlanInputError(
                f"{where}: stages.{name}.after is {earlier}, which is no stage of this schema; expected one of "
                f"{', '.join(each for each in usual if each != name)}"
            )
        if earlier in seen:
            raise PlanInputError(
                f"{where}: stages.{name} and stages.{seen[earlier]} both come "
                f"{'first' if earlier == START else f'after {earlier}'}; expected stages one after another"
            )
        seen[earlier] = name
        yield name, earlier


def _circle(name: str, before: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of a cycle that a stage leads to, the first once more at its end."""
    seen: list[str] = []
    while name not in seen:
        seen.append(name)
        name = before[name]
    yield from seen[seen.index(name) :]
    yield name
