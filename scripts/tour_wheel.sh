#!/usr/bin/env bash
# The three commands of README's "Install", from wheels: installs them into an environment of its own, where no compiler
# is on the PATH, and works from an empty directory with a GGUF file and 20 PDFs, by as many programs as are to be had
# (`python -m tests.clients.environments pdf` installs those that are packages). Ends at the first thing that does not hold.
#   scripts/tour_wheel.sh               make the wheels first, install with pip
#   WHEELS=dist UV=uv KEEP=1 …          wheels that are there already; install with this uv; keep the directory
#   IMAGE=python:3.11-slim-bookworm …   in a container of this image, which sees the directory only (DOCKER=podman;
#                                       DOCKER_FLAGS="…" for `run`, say to mount a pip.conf)
set -Eeuo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
export PYTHONPATH=$PWD:$PWD/client # for what this script asks of the checkout; what is installed runs without it
work=$(mktemp -d)
began=$SECONDS

say() { printf '%5d s  %s\n' $((SECONDS - began)) "$*"; }
fail() { say "NOT SO: $*" >&2; tail -20 "$work/said" >&2 || true; exit 1; }
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
end() {
    local status=$?
    trap - ERR
    if [ -x "$bin/spillway" ]; then spillway down --data-dir data >/dev/null 2>&1 || true; fi
    if [ -n "${container:-}" ]; then "$docker" rm -f "$container" >/dev/null 2>&1 || true; fi
    if [ -n "${KEEP:-}" ]; then say "kept: $work"; else rm -rf "$work"; fi
    exit "$status"
}
bin=$work/environment/bin
trap end EXIT
machine=() # what a command of the user's machine begins with
# As a user of another machine: of this one's environment, a home without anything in it, and no compiler.
as_user() { (cd "$work/empty" && "${machine[@]}" env -i HOME="$work/home" PATH="$bin" LANG=C.UTF-8 "$@"); }
spillway() { as_user spillway "$@" 2>>"$work/said"; }
libraries() { (cd "$1" && find . -name '*.so' -type f -exec sha256sum {} + | sort); }
mkdir "$work/empty" "$work/home" "$work/pdf"

# -- the wheels -------------------------------------------------------------------------------------------------
wheels=${WHEELS:-$work/wheels}
if [ -z "${WHEELS:-}" ]; then
    "$python" scripts/image.py compiled --march x86-64-v3 --wheels "$wheels" >"$work/said"
    "$python" scripts/image.py ours --wheels "$wheels" >"$work/said"
fi
say "wheels: $(cd "$wheels" && echo *.whl)"

# -- the installation --------------------------------------------------------------------------------------------
base=$("$python" -c 'import sys; print(sys.base_prefix)')/bin/python3 # the one that hnswlib's wheel is for
if [ -n "${IMAGE:-}" ]; then
    [ -z "${UV:-}" ] || fail "IMAGE and UV are given; expected one of them"
    docker=${DOCKER:-docker}
    read -ra flags <<<"${DOCKER_FLAGS:-}"
    container=$("$docker" run -d --init --network host -v "$work:$work" -v "$(realpath "$wheels"):$work/dist:ro" \
        "${flags[@]}" "$IMAGE" sleep infinity 2>"$work/said")
    machine=("$docker" exec -w "$work/empty" "$container")
    base=python3 wheels=$work/dist
    "${machine[@]}" test ! -e "$PWD"
    if "${machine[@]}" sh -c 'command -v cc || command -v c++ || command -v gcc || command -v g++ || command -v clang'; then
        fail "a compiler is in the container"
    fi
    say "a container of $IMAGE, without a compiler or this checkout: $("${machine[@]}" python3 --version)"
fi
if [ -n "${UV:-}" ]; then
    uv=$(command -v "$UV")
    env -u PYTHONPATH PATH="$bin" UV_TOOL_DIR="$work/tools" UV_TOOL_BIN_DIR="$bin" \
        "$uv" tool install --python "$base" \
        --find-links "$wheels" ${UV_FIND_LINKS:+--find-links "$UV_FIND_LINKS"} spillway >"$work/said" 2>&1
    inside=$work/tools/spillway/bin/python
else
    "${machine[@]}" "$base" -m venv "$work/environment"
    "${machine[@]}" env -u PYTHONPATH PATH="$bin" "$bin/python" -m pip install --find-links "$wheels" spillway \
        >"$work/said" 2>&1
    inside=$bin/python
fi
if PATH=$bin command -v cc c++ gcc g++ clang clang++; then fail "a compiler is on the PATH"; fi
packages=$(as_user "$inside" -c 'import engine, os; print(os.path.dirname(engine.__path__[0]))')
[[ $packages == "$work"/* ]]
libraries "$packages/engine" >"$work/brought"
libraries "$packages/services" >>"$work/brought"
[ "$(wc -l <"$work/brought")" -gt 10 ]
say "installed with $(wc -l <"$work/brought") native libraries and no compiler: $(spillway --version)"

# -- a model and documents of one's own ------------------------------------------------------------------------------
"$python" - "$work" >"$work/said" 2>&1 <<'END_PYTHON'
import sys
from pathlib import Path

from tests.support import gguf_files

gguf_files.demo(Path(sys.argv[1]) / "My-Model-Q8_0.gguf", lambda _: "Q8_0")
END_PYTHON
"$python" -m tests.support.handbook_pdfs write "$work/pdf" >"$work/programs" 2>"$work/said"
say "a GGUF file of $(wc -c <"$work/My-Model-Q8_0.gguf") bytes and $(find "$work/pdf" -name '*.pdf' | wc -l) PDFs by $(sed -n 's/^[^:]*\.pdf: //p' "$work/programs" | sort -u | wc -l) programs"
sed -n 's/^skipped: /         skipped: /p' "$work/programs"

# -- the commands ------------------------------------------------------------------------------------------------------
spillway up --detach --port 0 --data-dir data --model "$work/My-Model-Q8_0.gguf" >"$work/out"
url=$(grep -o 'http://[^ ]*' "$work/out" | tail -1)
say "$(tail -1 "$work/out")"
in_data() { spillway "$@" --data-dir data; }
in_data models >"$work/out"
grep -q 'my-model-q8-0 .*generate' "$work/out"
"$python" -c 'import sys, urllib.request as u; sys.exit(b"<script" not in u.urlopen(sys.argv[1]).read())' "$url/"
say "so is the dashboard, at $url/"
pid=$(in_data status | awk '/gpu_worker/ {print $2}')
"${machine[@]}" grep -q "$packages/engine/kernels/decoder/step" "/proc/$pid/maps"
say "the model runs in a library that came along"
in_data ingest docs "$work/pdf" >"$work/out"
grep -q '20 stored' "$work/out"
say "$(tail -1 "$work/out")"
in_data chat --collection docs 'Who is the mayor of Pudia?' >"$work/out"
grep -q 'Youtlane Thiker' "$work/out"
grep -q 'pudia.pdf:[^ ]* page \(1-\)\?2 ' "$work/out"
say "an answer of the file's, from the PDFs: $(head -1 "$work/out") $(grep -o '\[1\] .*' "$work/out" | tail -1)"
give_up=$((SECONDS + 600))
until grep -q '\b\([0-9]*\) of \1 documents in `docs`' "$work/empty/data/logs/supervisor.log"; do
    [ $SECONDS -lt $give_up ] || fail "the samples are not loaded"
    sleep 1
done
in_data search handbook 'Who is the mayor of Pudia?' >"$work/out"
grep -q 'pudia.md' "$work/out"
in_data search docs 'copy a whole directory tree' >"$work/out"
grep -q 'python/shutil.copytree' "$work/out"
say "the samples are there: $(head -1 "$work/out")"
"$python" -m tests.support.handbook_pdfs ask "$url" docs >"$work/out" || fail "$(cat "$work/out")"
say "about the PDFs, among all of these: $(tail -1 "$work/out")"
in_data down >"$work/out"
say "stopped"

# -- nothing was built ---------------------------------------------------------------------------------------------------
libraries "$packages/engine" >"$work/after"
libraries "$packages/services" >>"$work/after"
cmp "$work/brought" "$work/after"
[ -z "$(find "$work/home" "$work/empty" -name '*.so')" ]
if grep -rq kernels_not_built "$work/empty/data/logs"; then fail "a build was tried"; fi
say "no library was built or changed"
say "done"
