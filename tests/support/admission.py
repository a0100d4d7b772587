"""A router's admission, and the context of its workflows, without encoders or HTTP."""

from __future__ import annotations

from common.bus import Bus, Notifications
from common.registry.quotas import Quotas
from services.router.admission.controller import AdmissionController
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import DeliveryLatency, LanePolicy
from services.router.admission.queue import AdmissionQueue
from services.router.admission.request_store import RequestStore
from services.router.layouts import Layouts
from services.router.workflows.context import WorkflowContext


def admission_of(bus: Bus, journal: Notifications, queue: AdmissionQueue) -> AdmissionController:
    """Return the admission of the router of a journal and a queue."""
    policy = LanePolicy("windve-tokens", DeliveryLatency())
    store, orphans = RequestStore(bus), OrphanReaper(bus, journal.router)
    return AdmissionController(bus, journal, Quotas(bus), policy, queue, store, orphans)


def context_of(bus: Bus, journal: Notifications, admission: AdmissionController) -> WorkflowContext:
    """Return the context of workflows that need neither models nor texts."""
    return WorkflowContext(admission, bus, journal, None, None, 1, Layouts(bus), None)  # type: ignore[arg-type]
