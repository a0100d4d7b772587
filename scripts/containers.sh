# Sourced by the checks that start compose.yaml's services: tour_containers.sh, play_plan.sh. They end at the first line
# that does not hold, and remove what they started; KEEP=1 leaves it running.
# `compose` is the command (COMPOSE="…"), `work` a directory of the run's own, `url` the router's address on the host.
read -ra compose <<<"${COMPOSE:-docker compose}"
export ROUTER_PORT=${ROUTER_PORT:-8080}
url=http://127.0.0.1:$ROUTER_PORT
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
began=$SECONDS

say() { printf '%5d s  %s\n' $((SECONDS - began)) "$*"; }
fail() { say "NOT SO: $*" >&2; tail -5 "$work/said" >&2 || true; exit 1; }
since() { awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $1 }"; }
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
end() {
    local status=$?
    trap - ERR
    if [ -n "${KEEP:-}" ]; then
        say "kept: $work; it ends by: ${compose[*]} down --volumes"
    else
        "${compose[@]}" down --volumes >/dev/null 2>&1 || true
        rm -rf "$work"
    fi
    exit "$status"
}
trap end EXIT

start() { # all services; says what went wrong
    "${compose[@]}" up -d >"$work/up" 2>&1 || { cat "$work/up" >&2; fail "up"; }
}
inside() { "${compose[@]}" exec -T "$@" 2>>"$work/said"; }
api() { curl -sS --max-time 60 -H "Authorization: Bearer $key" -H 'Content-Type: application/json' "$url$1" "${@:2}"; }
is_ready() {
    if [[ $1 = redis-* ]]; then
        inside "$1" redis-cli ping | grep -q PONG
    else
        inside "$1" python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz?wait=20', timeout=30)"
    fi
} 2>/dev/null
wait_ready() {
    local give_up=$((SECONDS + 300))
    until is_ready "$1"; do
        [ $SECONDS -lt $give_up ] || fail "$1 is not ready"
        sleep 0.5
    done
}
make_key() { # of a tenant; answered with 401 before, with 200 after
    [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/models")" = 401 ]
    say "without a key: 401"
    key=$(inside router spillway keys create --tenant "$1" | tr -d '\r')
    export SPILLWAY_API_KEY=$key
    [ "$(api /v1/models -o /dev/null -w '%{http_code}')" = 200 ]
    say "with the key that \`exec router spillway keys create --tenant $1\` printed: 200"
}
