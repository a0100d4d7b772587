#!/usr/bin/env bash
# `make setup-full`: what only some tests need, from Debian's packages: Redis 7.0. Needs root.
set -euo pipefail
if command -v redis-server >/dev/null; then
    echo "setup-full: redis-server is installed: $(redis-server --version)"
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "setup-full: needs root and apt-get; the tests on Redis 7.0 will be skipped" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# The package starts its service where it can; the tests start their own servers.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.spillway
trap 'rm -f /usr/sbin/policy-rc.d.spillway; [ -z "${made:-}" ] || rm -f /usr/sbin/policy-rc.d' EXIT
if [ ! -e /usr/sbin/policy-rc.d ]; then
    install -m 755 /usr/sbin/policy-rc.d.spillway /usr/sbin/policy-rc.d
    made=1
fi
apt-get update -q
apt-get install -q -y --no-install-recommends redis-server
redis-server --version
