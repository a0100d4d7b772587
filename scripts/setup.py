"""`make setup`: checks what the machine must have, then makes .venv from the lock file. Standard library only.

Safe to run again: nothing is done if the lock file is the one installed.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_S = 10.0
BUILD_PACKAGES = frozenset({"numpy", "packaging", "pybind11", "setuptools", "wheel"})
# Large, and only some tests need them: `make setup-full` installs them.
FULL_PACKAGES = frozenset({"triton"})
SHOWN = (
    "Collecting",
    "Downloading",
    "Building wheel",
    "Installing",
    "Successfully",
    "ERROR",
    "error",
)
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print one line with the seconds since the start."""
    print(f"  {time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def fail(text: str) -> "None":
    """Print one sentence and end with status 1."""
    sys.stderr.write(f"setup: {text}\n")
    raise SystemExit(1)


def compiler() -> "str | None":
    """Return a compiler that builds C++17 with Python's headers' language, or None."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        path = shutil.which(name.split()[0])
        if path is None:
            continue
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "probe.cpp"
            source.write_text(
                "#include <optional>\nint main() { std::optional<int> x; return x ? 1 : 0; }\n"
            )
            command = [path, "-std=c++17", str(source), "-o", str(Path(place) / "probe")]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return path
    return None


def missing() -> "list[str]":
    """Return one line per prerequisite that this machine lacks, with how Debian installs it."""
    lacks = []
    if sys.implementation.name != "cpython" or sys.version_info < (3, 11):
        lacks.append(
            f"CPython 3.11 or newer: this is {sys.implementation.name} {sys.version.split()[0]}; "
            "name another one with `make setup PYTHON=/path/to/python3`"
        )
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        lacks.append(
            f"Python's headers: no Python.h in {include} (Debian: apt-get install python3-dev)"
        )
    try:
        import ensurepip  # noqa: F401, PLC0415
        import venv  # noqa: F401, PLC0415
    except ImportError:
        lacks.append("Python's venv module (Debian: apt-get install python3-venv)")
    if compiler() is None:
        lacks.append(
            "a C++17 compiler: CXX, g++ and clang++ do not work (Debian: apt-get install g++)"
        )
    if shutil.which("make") is None:
        lacks.append("make (Debian: apt-get install make)")
    return lacks


def stamp_text() -> str:
    """Identify what would be installed."""
    digest = hashlib.sha256()
    for name in (
        "requirements.lock",
        "pyproject.toml",
        "client/pyproject.toml",
        "scripts/setup.py",
    ):
        digest.update((ROOT / name).read_bytes())
    digest.update(sys.version.encode())
    digest.update(os.environ.get("SPILLWAY_TORCH_INDEX", "").encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def pip(venv_python: Path, *words: str, fatal: bool = True) -> bool:
    """Run pip, show the lines that tell progress, and on failure everything it said."""
    command = [str(venv_python), "-m", "pip", "--disable-pip-version-check", *words]
    said = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.lstrip().startswith(SHOWN):
                say("  " + line.strip()[:100])
    if process.returncode != 0 and fatal:
        sys.stderr.writelines(said[-40:])
        fail(f"pip {' '.join(words[:2])} ended with status {process.returncode}")
    return process.returncode == 0


def install_locked(venv_python: Path, wanted: "Callable[[str], bool]", *flags: str) -> None:
    """Install the lock file's packages whose names are wanted."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    chosen = [entry for entry in entries if wanted(re.split(r"[=\s]", entry)[0])]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as some:
        some.write("\n".join(chosen) + "\n")
        some.flush()
        pip(venv_python, "install", "--no-deps", "--require-hashes", *flags, "-r", some.name)


def has_nvidia() -> bool:
    """Return True if an NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def reachable(index: str) -> bool:
    """Return whether an index answers within a bounded time."""
    if not index.startswith("http"):
        return True
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=REACH_S) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def install_torch(venv_python: Path) -> None:
    """Install torch by version: from SPILLWAY_TORCH_INDEX, else the CPU index where no NVIDIA driver is."""
    probe = [
        str(venv_python), "-c", "from importlib.metadata import version; print(version('torch'))"
    ]  # fmt: skip
    have = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.strip()
    if have.split("+")[0] == TORCH.split("==")[1]:
        say(f"torch {have} is installed")
        return
    asked = os.environ.get("SPILLWAY_TORCH_INDEX", "")
    index = asked or ("" if has_nvidia() else CPU_INDEX)
    if index:
        say(f"installing {TORCH} from {index}")
        if reachable(index):
            if pip(venv_python, "install", TORCH, "--index-url", index, fatal=bool(asked)):
                return
        elif asked:
            fail(f"SPILLWAY_TORCH_INDEX is {index!r}: it does not answer within {REACH_S:g} s")
        say(f"{index} cannot be used; taking torch from pip's configured sources")
    say(f"installing {TORCH} from pip's configured sources")
    pip(venv_python, "install", TORCH)


def main() -> None:
    """Check, then install what is not installed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=str(ROOT / ".venv"), help="where to install")
    parser.add_argument("--check", action="store_true", help="only check the prerequisites")
    parser.add_argument("--full", action="store_true", help="only install what some tests need")
    args = parser.parse_args()
    place = Path(args.venv).resolve()
    if args.full:
        install_locked(place / "bin" / "python", FULL_PACKAGES.__contains__)
        return
    stamp = place / ".spillway-setup"
    if not args.check and stamp.exists() and stamp.read_text() == stamp_text():
        return
    lacks = missing()
    if lacks:
        fail("this machine lacks:\n" + "\n".join(f"  - {line}" for line in lacks))
    if args.check:
        return
    python = place / "bin" / "python"
    print(f"setup: installing into {place}; the first time takes some minutes", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    stamp.unlink(missing_ok=True)
    say("installing the tools that builds need")
    install_locked(python, BUILD_PACKAGES.__contains__)
    say("installing the lock file's packages (hnswlib is compiled here)")
    install_locked(python, lambda name: name not in FULL_PACKAGES, "--no-build-isolation")
    install_torch(python)
    say("installing spillway")
    ours = ("-e", str(ROOT), "-e", str(ROOT / "client"))
    pip(python, "install", "--no-deps", "--no-build-isolation", *ours)
    pip(python, "check")
    stamp.write_text(stamp_text())
    say("setup is done")


if __name__ == "__main__":
    main()
