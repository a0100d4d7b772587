"""Configuration: one frozen struct per service, from `SPILLWAY_*` variables, an optional TOML file and arguments.

Order of precedence: command line, environment, file, default. An unknown name or a bad value stops the start with a
sentence that names the variable, the value and the expected form. The environment is read once, in `__main__`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from common.errors import ConfigError
from common.types.pages import Eviction, PageForm, PagePublish

PREFIX = "SPILLWAY_"
_FILE_BYTES = 1 << 20
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=1 << 50)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Threads = Annotated[int, Meta(ge=0, le=1024)]
# The number of overflow workers; auto: one on a machine with an accelerator, else none.
Workers = Literal["auto"] | Annotated[int, Meta(ge=0, le=256)]
Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
# Bytes; auto: a share of the free memory.
Share = Literal["auto"] | Count
Admission = Literal["windve-tokens", "windve", "accelerator-only", "round-robin"]
# Part of paths and of keys in Redis.
InstanceName = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?\Z")]
# The predicted figures of a plan's schedule, then the front from which it was chosen.
_RATE = r"[0-9][0-9.e+-]{0,23}"
_POINT = rf"{_RATE}:{_RATE}:[1-9][0-9]{{0,6}}:{_RATE}:[a-z0-9_+: ]{{0,200}}"
PlannedFront = Annotated[
    str,
    Meta(
        pattern=rf"^((chip|core);{_POINT}(,{_POINT}){{0,32}})?\Z",
        description="chip; or core; and points with commas, each ttft_s:qps:chips:tpot_s:placement",
    ),
]


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every service."""

    data_dir: str = ".spillway"
    redis_url: str = ""
    redis_cluster: bool = False
    durability: Literal["process", "machine", "replicated"] = "process"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    health_host: str = "127.0.0.1"
    health_port: Port = 0
    drain_s: Seconds = 30.0
    partitions: Annotated[int, Meta(ge=1, le=256)] = 1
    # Families of searches and writes; 0: one on one Redis, 16 on a Cluster.
    search_partitions: Annotated[int, Meta(ge=0, le=256)] = 0


class PagesConfig(Common, frozen=True):
    """The server for KV pages ("" is the instance's own, "none" for no such tier) and its budget."""

    pages_url: str = ""
    pages_cluster: bool = False
    pages_bytes: Positive = 256 * 1024 * 1024
    pages_ttl_s: Positive = 24 * 3600


class RouterConfig(PagesConfig, frozen=True):
    """The router: where it listens, whom it serves, and its limits; KV pages it exports and imports only."""

    host: str = "127.0.0.1"
    port: Port = 8080
    keys: Literal["auto", "on", "off"] = "auto"
    tls_cert: str = ""
    tls_key: str = ""
    max_body_bytes: Positive = 32 * 1024 * 1024
    body_timeout_s: Seconds = 30.0
    max_texts: Positive = 2048
    max_tokens: Positive = 300_000
    max_connections: Positive = 4096
    request_timeout_s: Seconds = 60.0
    max_timeout_s: Seconds = 600.0
    text_processes: Annotated[int, Meta(ge=1, le=64)] = 1
    default_model: str = ""
    rerank_model: str = ""
    admission: Admission = "windve-tokens"
    search_ack: Positive = 1
    session_ttl_s: Positive = 7 * 24 * 3600
    # Other names of models: alias=model, separated by commas.
    model_aliases: str = ""
    # Origins of web pages that may call the API from a browser, separated by commas; *: any origin.
    cors_origins: str = ""
    # Whether texts longer than an embedding model's context are cut, in requests that do not say.
    truncate: bool = False
    public_metrics: bool = False
    public_openapi: bool = False
    # Seconds of batches that the deployment's plan assumes: kind:items:tokens=seconds, separated by commas.
    planned_costs: str = ""
    # The predicted figures of the plan's schedule, and the front from which it was chosen; the dashboard draws them.
    planned_front: PlannedFront = ""


class WorkerConfig(PagesConfig, frozen=True):
    """A gpu_worker or cpu_worker: which model, on which device, within which deadline."""

    embed_model: str = ""
    rerank_model: str = ""
    embed_slo_s: Seconds = 2.0
    device: Literal["auto", "cpu", "cuda", "sim"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    threads: Threads = 0
    cores: str = ""
    role: Literal["overflow", "host"] = "overflow"
    partition: Count = 0
    admission: Admission = "windve-tokens"
    alpha: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    alpha_tokens: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    beta: Annotated[float, Meta(ge=0, le=3600)] = 0.005
    sigma: Annotated[float, Meta(ge=0, le=1)] = 0.0
    slowdown: Annotated[int, Meta(ge=1, le=100)] = 1
    chat_model: str = ""
    chat_dtype: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    chat_slo_s: Seconds = 120.0
    itl_s: Seconds = 0.1
    exact: bool = False
    prompt_lookup: bool = True
    kv_bytes: Count = 0
    host_kv_bytes: Share = "auto"
    passage_kv_bytes: Count = 256 << 20
    host_attention: Literal["off", "auto", "simple", "symmetric", "full", "swap"] = "off"
    host_split: bool = False
    host_cores: str = ""
    # The address at which a gpu_worker and its helper (role host) meet: the path of a Unix socket, relative to the data
    # directory, or tcp://HOST:PORT, where both prove that they know the secret; "": no helper.
    host_socket: str = ""
    host_secret: str = ""
    eviction: Eviction = "spillway"
    page_publish: PagePublish = "selective"
    page_form: PageForm = "exact"
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 512
    max_running: Annotated[int, Meta(ge=1, le=65536)] = 64


class StoreConfig(PagesConfig, frozen=True):
    """kv_store: how often expired sessions are swept from the indexes, and its disk for pages (0: none)."""

    sweep_s: Seconds = 30.0
    disk_bytes: Count = 1024 * 1024 * 1024


class SearchConfig(Common, frozen=True):
    """vector_search: how it indexes, and how fast it should answer."""

    search_slo_s: Seconds = 1.0
    search_threads: Threads = 0
    exact_below: Count = 10_000
    snapshot_bytes: Positive = 64 * 1024 * 1024
    audit_s: Seconds = 30.0
    replica: InstanceName = ""
    # The address at which routers reach this process for searches; "none": by Redis only. Port 0 is any free port.
    reads_host: str = "127.0.0.1"
    reads_port: Port = 0


class SupervisorConfig(PagesConfig, frozen=True):
    """`spillway up`: which processes run, and where the embedded server listens."""

    redis_port: Port = 0
    redis_server: str = ""
    redis_maxmemory: str = "1gb"
    overflow_workers: Workers = "auto"
    sample: bool = True
    start_timeout_s: Seconds = 300.0


SERVICES: tuple[type[Common], ...] = (
    RouterConfig,
    WorkerConfig,
    SearchConfig,
    StoreConfig,
    SupervisorConfig,
)
# Read by the Makefile, the SDK and the CLI, not by a service.
OTHER_NAMES = frozenset(
    {"TORCH_INDEX", "URL", "API_KEY", "CONFIG", "SOAK", "SEED", "PROFILE", "TEST_SERVERS"}
)
C = TypeVar("C", bound=Common)


def known_names() -> frozenset[str]:
    """Return every variable that some part of the product reads, without the prefix."""
    fields = {field.upper() for service in SERVICES for field in service.__struct_fields__}
    return frozenset(fields | OTHER_NAMES)


def _value(cls: type[Common], field: str, value: Any, source: str) -> Any:
    kind = {f.name: f.type for f in msgspec.structs.fields(cls)}[field]
    if isinstance(value, str):
        value = value.strip()
        if kind is bool and value.lower() in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
            return value.lower() in {"1", "true", "yes", "on"}
        if not value.isprintable():
            shown = "not shown" if field == "host_secret" else _shown(value)
            raise ConfigError(f"{source} is {shown}: expected text without control characters")
    try:
        found = msgspec.convert(value, kind, strict=not isinstance(value, str))
    except (msgspec.ValidationError, ValueError) as error:
        words, about = _words(kind), _about(kind)
        expected = f"expected one of {', '.join(words)}" if words else _clip(str(error))
        expected = f"expected {about}" if about else expected
        raise ConfigError(f"{source} is {_shown(value)}: {expected}") from error
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{source} is {_shown(value)}: expected a finite number")
    return found


def _words(kind: Any) -> list[str]:
    """Return the words of a Literal, and the range of numbers that a kind allows besides; [] for other kinds."""
    arms = get_args(kind) if get_origin(kind) is Union else (kind,)
    words = [str(word) for arm in arms if get_origin(arm) is Literal for word in get_args(arm)]
    ranges = [
        f"{meta.ge} to {meta.le}" for arm in arms for meta in getattr(arm, "__metadata__", ())
    ]
    return [*words, *ranges] if words else []


def _about(kind: Any) -> str:
    """Return a kind's description of its values; "" without one."""
    return next(
        (each.description for each in getattr(kind, "__metadata__", ()) if each.description), ""
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


def _file_values(path: str) -> dict[str, Any]:
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device may never end
            raise ConfigError(f"config file {path}: expected a regular file")
        with Path(path).open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
        if len(content) > _FILE_BYTES:
            raise ConfigError(f"config file {path}: expected at most {_FILE_BYTES} bytes")
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"config file {path}: {_clip(reason)}; expected TOML") from error


def _clip(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def load(
    cls: type[C],
    env: Mapping[str, str],
    *,
    file: str | None = None,
    args: Mapping[str, Any] | None = None,
) -> C:
    """Build one service's config; ConfigError names a wrong value and the expected form.

    The file may name a setting as a field, a variable or a flag: `port`, `SPILLWAY_PORT`, `data_dir`, `data-dir`.
    Entries of `args` that are None count as absent.
    """
    known, fields, values = known_names(), set(cls.__struct_fields__), {}
    path = file or env.get(f"{PREFIX}CONFIG")
    for name, (written, value) in (_named(path, known) if path else {}).items():
        if name in fields:
            values[name] = _value(cls, name, value, f"config file {path}: {written}")
    for variable, text in env.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX)
        if name not in known:
            near = ", ".join(PREFIX + item for item in _near(name, known))
            raise ConfigError(f"unknown variable {_clip(variable)}; expected one of {near}")
        if name.lower() in fields and text != "":
            values[name.lower()] = _value(cls, name.lower(), text, variable)
    for name, value in (args or {}).items():
        if value is not None and name in fields:
            values[name] = _value(cls, name, value, f"--{name.replace('_', '-')}")
    return cls(**values)


def _named(path: str, known: frozenset[str]) -> dict[str, tuple[str, Any]]:
    """Return a file's values by field, each with its name as written; ConfigError for an unknown or repeated name."""
    found: dict[str, tuple[str, Any]] = {}
    for written, value in _file_values(path).items():
        name = written.lower().replace("-", "_").removeprefix(PREFIX.lower())
        if name.upper() not in known:
            near = ", ".join(item.lower() for item in _near(name, known))
            raise ConfigError(
                f"config file {path}: unknown name {_shown(written)}; expected one of {near}"
            )
        if name in found:
            both = f"{_shown(found[name][0])} and {_shown(written)}"
            raise ConfigError(f"config file {path}: {both} name one setting; expected one of them")
        found[name] = written, value
    return found


def _near(name: str, known: frozenset[str]) -> list[str]:
    import difflib  # noqa: PLC0415 - only on the way to an error

    names = sorted(known)
    close = difflib.get_close_matches(name.upper()[:80], names, n=3, cutoff=0.4)
    return close or difflib.get_close_matches(name.upper()[:80], names, n=10, cutoff=0.0)
