"""The composition root of a router: builds each part from the parts that it uses, and starts those that run."""

from __future__ import annotations

import ipaddress
from contextlib import AsyncExitStack
from typing import NamedTuple

from common.bus import Bus, Notifications
from common.config import RouterConfig
from common.health import Health
from common.pages.store import PageStore
from common.registry.api_keys import KeyStore
from common.registry.quotas import Quotas
from common.registry.sessions import Sessions
from common.worker.incarnation import incarnation_name
from services.router.admission.controller import AdmissionController
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import DeliveryLatency, LanePolicy
from services.router.admission.queue import AdmissionQueue
from services.router.admission.request_runner import RequestRunner
from services.router.admission.request_store import RequestStore
from services.router.aliases import parse_aliases
from services.router.cards import Cards
from services.router.http.active_requests import ActiveRequests, OpenStreams
from services.router.http.answers import AnswerWriter
from services.router.http.app import Api, HttpServer, application
from services.router.http.chat import ChatApi
from services.router.http.collection_map import CollectionMapApi
from services.router.http.collections import CollectionsApi, ReembedApi
from services.router.http.completions import CompletionsApi
from services.router.http.cors import parse_origins
from services.router.http.descriptions import DescriptionsApi
from services.router.http.documents import DocumentsApi, DocumentWritesApi
from services.router.http.encoders import EncodersApi
from services.router.http.generations import Generations
from services.router.http.grounded import GroundedChats, GroundedQuestions
from services.router.http.job_replies import JobReplies, ParcelReplies
from services.router.http.mesh import MeshApi
from services.router.http.middleware import AccessGuard, RequestObserver
from services.router.http.models import ModelsApi
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.quick_search import QuickSearches
from services.router.http.receiver import Receiver
from services.router.http.records import TenantRecords
from services.router.http.request_events import RequestEventsApi
from services.router.http.requests import RequestsApi
from services.router.http.responses import ResponsesApi
from services.router.http.search import SearchApi
from services.router.http.session_pages import SessionPagesApi
from services.router.http.session_turns import SessionTurns
from services.router.http.sessions import SessionsApi
from services.router.http.shards import ShardsApi
from services.router.http.timeline import TimelineApi
from services.router.http.tokenizing import TokenizingApi
from services.router.http.tuning import TuningApi
from services.router.layouts import Layouts
from services.router.mesh.history import MeshHistory
from services.router.mesh.lane_depths import LaneDepths
from services.router.mesh.lane_monitor import LaneMonitor
from services.router.mesh.monitor import MeshMonitor
from services.router.mesh.planned_costs import PlannedCosts
from services.router.mesh.snapshot import MeshSnapshot
from services.router.recent_collections import RecentCollections
from services.router.responses.answer_sources import AnswerSources
from services.router.responses.results import ResultWriter
from services.router.shard_reads import ShardReads
from services.router.text.intervals import RetrievalMargin
from services.router.text.pool import TextPool
from services.router.workflows.context import WorkflowContext
from services.router.workflows.planned_jobs import PlannedJobs
from services.router.workflows.runner import WorkflowRunner

CLOSE_S = 2.0


class Core(NamedTuple):
    """The parts of a router without its HTTP side; used only in this module."""

    bus: Bus
    notifications: Notifications
    admission: AdmissionController
    runner: RequestRunner
    store: RequestStore
    orphans: OrphanReaper
    keys: KeyStore
    cards: Cards
    pool: TextPool
    depths: LaneDepths
    planned: PlannedCosts
    pages: PageStore | None
    reads: ShardReads
    layouts: Layouts
    collections: RecentCollections
    margin: RetrievalMargin


class RouterProcess(NamedTuple):
    """The parts of a router that its process starts, drains and stops."""

    admission: AdmissionController
    workflows: WorkflowRunner
    active: ActiveRequests
    streams: OpenStreams
    server: HttpServer
    history: MeshHistory
    monitor: MeshMonitor
    keys: KeyStore
    keys_on: bool


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keys_needed(config: RouterConfig) -> bool:
    """Return whether requests need a key: always, never, or unless the router is on loopback."""
    return config.keys == "on" or (config.keys == "auto" and not is_loopback(config.host))


async def assemble(
    config: RouterConfig, bus: Bus, health: Health, stack: AsyncExitStack
) -> RouterProcess:
    """Build a router's parts and start its notifications and text processes; `stack` stops them."""
    core = await _core(config, bus, stack)
    context = WorkflowContext(
        core.admission,
        bus,
        core.notifications,
        core.cards,
        core.pool,
        config.search_ack,
        core.layouts,
        core.margin,
    )
    workflows = WorkflowRunner(context, core.store, config.partitions)
    core.runner.on_flagged = lambda: workflows.server.step_now(every=True)
    active, streams, history = ActiveRequests(), OpenStreams(), MeshHistory(bus, core.cards)
    keys_on = keys_needed(config)
    observer = RequestObserver(active, bus.clock)
    guard = AccessGuard(core.admission, core.keys, keys_on=keys_on, checks=config.keys != "off")
    apis = http_apis(config, core, streams, history, keys_on=keys_on)
    origins = parse_origins(config.cors_origins)
    app = application(apis, health, observer, guard, config.max_body_bytes, origins)
    quick = QuickSearches(
        Receiver(config, bus.clock),
        core.collections,
        ParcelLimits(config, core.depths, core.cards),
        core.admission,
        guard,
        observer,
        bus.writes,
        core.reads,
        core.layouts,
        bus.clock,
    )
    return RouterProcess(
        core.admission,
        workflows,
        active,
        streams,
        HttpServer(app, config, quick),
        history,
        _monitor(config, core, health),
        core.keys,
        keys_on,
    )


def _monitor(config: RouterConfig, core: Core, health: Health) -> MeshMonitor:
    lanes = LaneMonitor(core.bus, core.admission, core.depths, core.planned, config.partitions)
    return MeshMonitor(
        core.bus, health, core.cards, core.pool, core.depths, lanes, core.store, core.orphans
    )


async def _core(config: RouterConfig, bus: Bus, stack: AsyncExitStack) -> Core:
    name, latency = incarnation_name("router"), DeliveryLatency()
    notifications = Notifications(bus.connection, name, latency.heard.add, bus.supervisor)
    await notifications.start()
    stack.push_async_callback(notifications.stop)
    stack.push_async_callback(bus.supervisor.settle, CLOSE_S)
    cards = Cards(
        bus,
        config.data_dir,
        embed=config.default_model,
        rerank=config.rerank_model,
        aliases=parse_aliases(config.model_aliases),
    )
    pool = TextPool(config.text_processes)
    await pool.start()
    stack.callback(pool.stop)
    keys, quotas = KeyStore(bus), Quotas(bus)
    store, orphans = RequestStore(bus), OrphanReaper(bus, name)
    policy, queue = LanePolicy(config.admission, latency), AdmissionQueue(notifications)
    admission = AdmissionController(bus, notifications, quotas, policy, queue, store, orphans)
    runner = RequestRunner(bus, notifications, quotas, admission, store, orphans)
    reads = ShardReads(bus)
    stack.push_async_callback(reads.close)
    pages = PageStore.of(config, bus.clock)
    if pages is not None:
        stack.push_async_callback(pages.close)
    return Core(
        bus,
        notifications,
        admission,
        runner,
        store,
        orphans,
        keys,
        cards,
        pool,
        LaneDepths(),
        PlannedCosts(config.planned_costs),
        pages,
        reads,
        Layouts(bus),
        RecentCollections(bus),
        RetrievalMargin(),
    )


def http_apis(
    config: RouterConfig, core: Core, streams: OpenStreams, history: MeshHistory, *, keys_on: bool
) -> list[Api]:
    """Return the handlers of every route but health and dashboard."""
    bus, cards, admission = core.bus, core.cards, core.admission
    receiver = Receiver(config, bus.clock)
    records = TenantRecords(bus, core.store, core.collections)
    limits, planned = ParcelLimits(config, core.depths, cards), PlannedJobs(config.partitions)
    writer = ResultWriter(bus, core.pool)
    replies = JobReplies(core.runner, admission.policy.hops, writer, bus.clock)
    sources = AnswerSources(bus, core.notifications, cards)
    answers = AnswerWriter(core.runner, sources, streams, bus.clock)
    parcels = ParcelReplies(cards, admission, planned, replies)
    snapshot = MeshSnapshot(bus, cards, config.partitions)
    sessions = SessionsApi(receiver, records, bus, cards, replies, config.session_ttl_s)
    return [
        *_generation_apis(config, core, receiver, limits, planned, sources, answers, sessions),
        EncodersApi(receiver, limits, cards, core.pool, parcels),
        TokenizingApi(receiver, limits, cards, core.pool),
        *_collection_apis(config, core, receiver, records, limits, planned, replies),
        ModelsApi(cards, config),
        sessions,
        SessionPagesApi(receiver, records, Sessions(bus), core.pages),
        RequestsApi(records, bus, core.runner, core.store, sources, answers, writer),
        RequestEventsApi(bus, core.notifications, admission, core.store, sources, answers),
        TimelineApi(records, bus, cards),
        MeshApi(bus, cards, snapshot, history, admission, core.planned, keys_on=keys_on),
        DescriptionsApi(config),
    ]


def _generation_apis(
    config: RouterConfig,
    core: Core,
    receiver: Receiver,
    limits: ParcelLimits,
    planned: PlannedJobs,
    sources: AnswerSources,
    answers: AnswerWriter,
    sessions: SessionsApi,
) -> list[Api]:
    bus, cards, pool = core.bus, core.cards, core.pool
    turns = SessionTurns(bus, core.notifications, cards)
    generations = Generations(core.admission, core.runner, core.depths, sources, answers)
    questions = GroundedQuestions(
        bus,
        cards,
        pool,
        turns,
        limits,
        core.depths,
        core.admission,
        generations,
        planned,
        core.margin,
    )
    grounded = GroundedChats(
        questions, generations, core.runner, core.notifications, sources, answers
    )
    return [
        ChatApi(receiver, cards, pool, turns, generations, grounded),
        CompletionsApi(receiver, cards, pool, generations, config.max_tokens),
        ResponsesApi(receiver, cards, pool, bus, generations, sessions, config.session_ttl_s),
    ]


def _collection_apis(
    config: RouterConfig,
    core: Core,
    receiver: Receiver,
    records: TenantRecords,
    limits: ParcelLimits,
    planned: PlannedJobs,
    replies: JobReplies,
) -> list[Api]:
    bus, cards, pool, admission = core.bus, core.cards, core.pool, core.admission
    writes, timeout_s = bus.writes, config.max_timeout_s
    return [
        SearchApi(  # first: routes are tried in this order, and none is asked for as often
            receiver,
            records,
            limits,
            core.depths,
            cards,
            pool,
            admission,
            planned,
            replies,
            writes,
            core.reads,
            core.layouts,
        ),
        CollectionsApi(receiver, records, bus, cards, admission, replies, core.layouts),
        ReembedApi(receiver, records, limits, cards, planned, replies, bus.clock, timeout_s),
        ShardsApi(receiver, records, bus),
        TuningApi(receiver, records, bus),
        CollectionMapApi(receiver, records, replies, writes, core.layouts),
        DocumentsApi(receiver, records, pool, replies, writes, core.layouts),
        DocumentWritesApi(
            receiver, records, limits, cards, pool, admission, planned, replies, writes
        ),
    ]
