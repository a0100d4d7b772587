"""The processes that a local mesh may hold: name, module, flags and environment of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bench import ROOT
from bench.mesh import proc

DEMO = ROOT / "models" / "demo"


@dataclass(frozen=True, slots=True)
class Service:
    """One process: its instance name, its module, its flags; `cores` pins it.

    With `stamps` it writes the moments of each request's stages to that file when it ends (`bench/mesh/stamped.py`).
    """

    name: str
    module: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    stamps: str = ""

    @property
    def keeps_pages(self) -> bool:
        """True if it puts KV pages into the tiers below its own memory, or keeps them there."""
        return self.module == "services.kv_store" or "SPILLWAY_CHAT_MODEL" in self.env


def router(name: str = "router", port: int = 0, *flags: str) -> Service:
    """Describe a router on a port of its own (chosen now, so that a restart finds it again)."""
    chosen = str(port or proc.free_port())
    return Service(name, "services.router", ("--port", chosen, *flags))


def gpu_worker(name: str = "gpu_worker", *flags: str) -> Service:
    """Describe the accelerator's worker; without flags it runs the encoder on the CPU."""
    return Service(name, "services.gpu_worker", flags or ("--device", "cpu"))


def chat_worker(
    name: str = "gpu_worker", *flags: str, model: str = str(DEMO), dtype: str = "fp32", **env: str
) -> Service:
    """Describe a gpu_worker that serves chat as well; `env` are further variables, without the prefix.

    In float32 by default, in which greedy answers are compared.
    """
    base = gpu_worker(name, *flags)
    variables = {"CHAT_MODEL": model, "CHAT_DTYPE": dtype, **env}
    return replace(base, env={f"SPILLWAY_{key}": value for key, value in variables.items()})


def kv_store(name: str = "kv_store") -> Service:
    """Describe the keeper of sessions' cold life."""
    return Service(name, "services.kv_store")


def cpu_worker(name: str = "cpu_worker", *flags: str) -> Service:
    """Describe the overflow worker of the CPU lane."""
    return Service(name, "services.cpu_worker", ("--role", "overflow", *flags))


def host_helper(socket: str, name: str = "host_helper") -> Service:
    """Describe the helper that attends on the host for the gpu_worker at a socket."""
    return Service(name, "services.cpu_worker", ("--role", "host", "--host-socket", socket))


def pinned(service: Service, core: int) -> Service:
    """Return a service bound to one core."""
    return replace(service, cores=frozenset({core}))


def vector_search(name: str = "vector_search", *flags: str) -> Service:
    """Describe the one replica of vector search."""
    return Service(name, "services.vector_search", flags)


def sim_worker(
    name: str = "gpu_worker", beta_s: float = 0.005, alpha_s: float = 0.0, slo_s: float = 2.0
) -> Service:
    """Describe a simulated device: `beta_s` seconds a batch and `alpha_s` an item, all to end within `slo_s`."""
    flags = ("--alpha", str(alpha_s), "--beta", str(beta_s), "--embed-slo-s", str(slo_s))
    return gpu_worker(name, "--device", "sim", *flags)


def standard() -> list[Service]:
    """Return the processes that `spillway up` runs where there is an accelerator, beside Redis."""
    return [router(), gpu_worker(), cpu_worker(), vector_search(), kv_store()]
