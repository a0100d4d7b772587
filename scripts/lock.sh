#!/usr/bin/env bash
# Writes requirements.lock anew: one file, hashed, for every platform; torch is named by version only (see setup.py).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
# torch and what only torch brings come from its own index; the client is built from this tree.
printf 'torch==2.13.0 ; python_version < "3"\nspillway-client==0.1.0 ; python_version < "3"\n' >"$overrides"
"$uv" pip compile pyproject.toml --group dev --group build --group torch --group gpu \
    --generate-hashes --universal --python-version 3.11 --override "$overrides" \
    --no-annotate --custom-compile-command "scripts/lock.sh" \
    --default-index https://pypi.org/simple --output-file requirements.lock "$@" >/dev/null
