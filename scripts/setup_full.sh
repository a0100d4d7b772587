#!/usr/bin/env bash
# `make setup-full`: what only some tests need. Triton, from the lock file; and programs from Debian's packages: Redis 7.0,
# kubectl, Chromium, Prometheus. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python scripts/setup.py --full

# program: the package that has it
declare -A packages=(
    [redis-server]=redis-server
    [kubectl]=kubernetes-client
    [chromium]="chromium fonts-dejavu-core"
    [prometheus]=prometheus
)

missing=()
for program in "${!packages[@]}"; do
    if command -v "$program" >/dev/null; then
        echo "setup-full: $program is installed"
    else
        missing+=("$program")
    fi
done
[ ${#missing[@]} != 0 ] || exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "setup-full: needs root and apt-get; the tests of ${missing[*]} will be skipped" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Some packages start a service where they can; the tests start their own.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.spillway
trap 'rm -f /usr/sbin/policy-rc.d.spillway; [ -z "${made:-}" ] || rm -f /usr/sbin/policy-rc.d' EXIT
if [ ! -e /usr/sbin/policy-rc.d ]; then
    install -m 755 /usr/sbin/policy-rc.d.spillway /usr/sbin/policy-rc.d
    made=1
fi
apt-get update -q
for program in "${missing[@]}"; do
    apt-get install -q -y --no-install-recommends ${packages[$program]}
    command -v "$program"
done
