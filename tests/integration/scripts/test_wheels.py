"""`make wheels`: what the wheels hold, and that what is installed from them needs no compiler and no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from common.native import library
from engine.kernels.sources import CHECKSUMS, DECODER, ENCODER, HOST_CHANNEL, MEMORY
from services.vector_search.index.native.sources import (
    SCAN_LISTS,
    SCAN_LISTS_AVX2,
    SELECTION,
    TRAVERSE,
    TRAVERSE_AVX2,
)

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    ENCODER,
    *DECODER,
    *HOST_CHANNEL,
    *MEMORY,
    *CHECKSUMS,
    TRAVERSE,
    TRAVERSE_AVX2,
    SELECTION,
    SCAN_LISTS,
    SCAN_LISTS_AVX2,
)
# The machine's compiler, with nothing to compile: what the kernels compute is tested elsewhere, and takes minutes here.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec {compiler} -shared -x c++ /dev/null -o "$2"
"""
FOUND = """
import os, sys
from pathlib import Path
from common.native import finder, library
from engine.kernels.sources import CHECKSUMS, DECODER, ENCODER, HOST_CHANNEL, MEMORY
from services.vector_search.index.native.sources import SCAN_LISTS, SCAN_LISTS_AVX2, SELECTION, TRAVERSE, TRAVERSE_AVX2
assert library.compiler() is None
lists = (SCAN_LISTS, SCAN_LISTS_AVX2)
for source in (ENCODER, *DECODER, *HOST_CHANNEL, *MEMORY, *CHECKSUMS, TRAVERSE, TRAVERSE_AVX2, SELECTION, *lists):
    print(finder.find(source) or library.brought(source))
from cli import chat_model, handbook
print(chat_model.shipped() / "model.safetensors")
print(len(handbook.documents(Path("pages"))), "pages")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with this tree's wheels, their libraries empty."""
    if library.compiler() is None:
        pytest.skip("no C++ compiler")
    place = tmp_path_factory.mktemp("wheels")
    fake = place / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text(COMPILER.format(compiler=library.compiler()))
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    words = [sys.executable, "scripts/image.py", "ours", "--wheels", str(place / "dist")]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


def test_the_wheel_holds_the_libraries_and_is_for_this_platform(wheels: Path) -> None:
    """There is one library beside each source and build, and no other; the client's wheel is for any platform."""
    tag = re.sub(r"[-.]", "_", sysconfig.get_platform())
    (ours,) = wheels.glob("spillway-*.whl")
    (client,) = wheels.glob("spillway_client-*.whl")
    holds = set(zipfile.ZipFile(ours).namelist())
    wanted = {str(library.beside(source).relative_to(ROOT)) for source in SOURCES}

    assert ours.name.endswith(f"-py3-none-{tag}.whl")
    assert client.name.endswith("-py3-none-any.whl")
    assert {name for name in holds if name.endswith(".so")} == wanted
    assert {
        "models/demo/model.safetensors",
        "models/retro/model.safetensors",
        "services/router/dashboard/index.html",
        "services/router/openapi.yaml",
        "engine/kernels/decoder/step.cpp",
    } <= holds
    assert not [name for name in holds if name.startswith(("tests", "bench", "scripts", "build"))]
    record = next(name for name in holds if name.endswith("/RECORD"))
    assert wanted <= {
        line.split(",")[0] for line in zipfile.ZipFile(ours).read(record).decode().splitlines()
    }


def test_what_is_installed_finds_them_without_a_compiler(wheels: Path, tmp_path: Path) -> None:
    """With an empty PATH every library is the one that came along; model and handbook are at hand; none is built."""
    place, home = tmp_path / "installed", tmp_path / "home"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    words = [*install, "--find-links", str(wheels), "--target", str(place), "spillway"]
    subprocess.run(words, check=True)
    home.mkdir()
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*.so")}

    env = {"PATH": "", "HOME": str(home), "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FOUND], cwd=home, env=env, capture_output=True, text=True, check=True
    )

    *paths, pages = done.stdout.splitlines()
    assert set(map(Path, paths)) == {*before, place / "models" / "demo" / "model.safetensors"}
    assert pages == "300 pages"
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.so")} == before
    assert not list(home.rglob("*.so"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_tour() -> None:
    """Wheels, an installation without a compiler, and README's three commands with a GGUF file and 20 PDFs."""
    done = subprocess.run(
        [ROOT / "scripts" / "tour_wheel.sh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
