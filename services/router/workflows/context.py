"""The parts of a router that workflows use."""

from __future__ import annotations

from typing import NamedTuple

from common.bus import Bus, Notifications
from services.router.admission.controller import AdmissionController
from services.router.cards import Cards
from services.router.layouts import Layouts
from services.router.text.intervals import RetrievalMargin
from services.router.text.pool import TextPool


class WorkflowContext(NamedTuple):
    """The parts of a router that workflows use; a write is done when `search_ack` replicas have synced the write.

    `margin` is learned from the retrievals during generations.
    """

    admission: AdmissionController
    bus: Bus
    notifications: Notifications
    cards: Cards
    pool: TextPool
    search_ack: int
    layouts: Layouts
    margin: RetrievalMargin
