"""The workflow of each kind of plan; a stage's job ids let any router repeat the stage."""

from __future__ import annotations

from common.wire.workflows import (
    DeletePlan,
    GroundPlan,
    ParcelsPlan,
    Plan,
    RequestResult,
    SearchPlan,
    WritePlan,
)
from services.router.workflows.embed import parcels
from services.router.workflows.grounded import ground
from services.router.workflows.reembed import reembed
from services.router.workflows.search import search
from services.router.workflows.workflow import Workflow
from services.router.workflows.write import delete, write


async def perform(workflow: Workflow, plan: Plan) -> RequestResult:
    """Run the workflow of a plan; raises the error that its client gets."""
    if isinstance(plan, ParcelsPlan):
        return await parcels(workflow, plan)
    if isinstance(plan, SearchPlan):
        return await search(workflow, plan)
    if isinstance(plan, WritePlan):
        return await write(workflow, plan)
    if isinstance(plan, DeletePlan):
        return await delete(workflow, plan)
    if isinstance(plan, GroundPlan):
        return await ground(workflow, plan)
    return await reembed(workflow, plan)
