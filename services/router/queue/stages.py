"""What is done for each kind of request of several jobs; a stage's job ids let it be repeated."""

from __future__ import annotations

from common.messages import RequestResult
from services.router.queue.embedding import parcels
from services.router.queue.grounding import ground
from services.router.queue.plans import (
    DeletePlan,
    GroundPlan,
    ParcelsPlan,
    Plan,
    SearchPlan,
    WritePlan,
)
from services.router.queue.reembedding import reembed
from services.router.queue.run import Run
from services.router.queue.searching import search
from services.router.queue.writing import delete, write


async def perform(run: Run, plan: Plan) -> RequestResult:
    """Carry a plan out; raises the error its client is to see."""
    if isinstance(plan, ParcelsPlan):
        return await parcels(run, plan)
    if isinstance(plan, SearchPlan):
        return await search(run, plan)
    if isinstance(plan, WritePlan):
        return await write(run, plan)
    if isinstance(plan, DeletePlan):
        return await delete(run, plan)
    if isinstance(plan, GroundPlan):
        return await ground(run, plan)
    return await reembed(run, plan)
