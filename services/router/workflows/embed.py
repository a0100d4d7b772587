"""The stages that embed: the parcels of one request, and the texts of a search or a write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from common.errors import Conflict
from common.ids import Family
from common.wire.registry import CollectionRecord
from common.wire.results import EmbedResult
from common.wire.workflows import ParcelsPlan, RequestResult
from services.router.admission.job_spec import NO_PROMPT, QUESTION
from services.router.admission.policy import EMBED_CLASSES
from services.router.text.bodies import RequestLimits
from services.router.text.requests import Parcel, parcels_of
from services.router.text.tokens import Spec
from services.router.workflows.workflow import Workflow


async def encoder_of(workflow: Workflow, record: CollectionRecord) -> Spec:
    """Return the spec of a collection's encoder; Conflict `encoder_mismatch` if another is served now."""
    specs = await workflow.context.cards.specs()
    return checked_encoder(record, specs)


def checked_encoder(record: CollectionRecord, specs: dict[str, Spec]) -> Spec:
    """Return the spec of a collection's encoder; Conflict `encoder_mismatch` if another is served now."""
    spec = specs.get(record.model or "")
    if spec is not None and spec.fingerprint == record.fingerprint:
        return spec
    served = spec.fingerprint[:16] if spec else "not served"
    raise Conflict(
        f"collection {record.name!r} was embedded with {record.model} ({record.fingerprint[:16]}), which is "
        f"{'now ' + served if spec else served}; search it with that encoder, or re-embed it: "
        f"spillway reembed {record.name}",
        code="encoder_mismatch",
    )


async def _families(workflow: Workflow, model: str, count: int) -> list[Family]:
    return [
        await workflow.context.cards.family(model, workflow.request, i)
        for i in range(max(1, count))
    ]


async def parcels(workflow: Workflow, plan: ParcelsPlan) -> RequestResult:
    """Run all parcels of an embeddings or rerank request; the result names their jobs."""
    families = await _families(
        workflow, plan.model, (await workflow.context.cards.card(plan.model)).partitions
    )
    given = [Parcel(*parcel) for parcel in plan.parcels]
    if plan.whole:
        families = families[:1]  # one admission admits jobs of one family only
    ids, _ = await workflow.gather("part", families, EMBED_CLASSES, given, whole=plan.whole)
    return RequestResult(jobs=ids, info={"view": msgspec.to_builtins(plan.options)})


async def embed(
    workflow: Workflow,
    stage: str,
    spec: Spec,
    lists: Sequence[list[int]],
    parcel: tuple[int, int],
    *,
    bulk: bool | None = None,
    question: bool = False,
) -> bytes:
    """Return the float32 rows of token lists, in order.

    `bulk` is as in `Workflow.gather`, `question` as in `EmbedWork`.
    """
    if not lists:
        return b""
    limits = RequestLimits(len(lists), 1 << 40, *parcel)
    families = await _families(
        workflow, spec.name, (await workflow.context.cards.card(spec.name)).partitions
    )
    cut = parcels_of(spec, lists, limits, question=question)
    _, results = await workflow.gather(
        stage, families, EMBED_CLASSES, cut, bulk=bulk, prompt=QUESTION if question else NO_PROMPT
    )
    return b"".join(cast("EmbedResult", result).vectors for result in results)
