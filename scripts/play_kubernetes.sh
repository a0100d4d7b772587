#!/usr/bin/env bash
# Starts the Kubernetes overlay `cpu` on this machine without a cluster, by `podman play kube` (through the overlay
# `podman`, which says what differs), and shows that it works: every Deployment starts and becomes ready, strangers are
# refused, a chat and a search are answered, a killed container comes back, and all end in order. Leaves nothing behind.
# Needs root, podman, kubectl and the images spillway-mesh:0.1.0 and spillway-worker:0.1.0 (docs/deployment.md).
set -euo pipefail
cd "$(dirname "$0")/.."

# Directory and ports are the overlay's.
state=/tmp/spillway-play
router=http://127.0.0.1:28080
declare -A health=([router]=28081 [gpu-worker]=28082 [cpu-worker]=28083 [vector-search]=28084 [kv-store]=28085)
servers=(redis-bus redis-pages)
services=(vector-search kv-store cpu-worker gpu-worker router) # the router is ready when workers are
: "${READY_S:=300}"

fail() {
    printf 'play_kubernetes: %s\n' "$*" >&2
    exit 1
}

container() { # NAME: the name podman gives the container of a Deployment
    case $1 in
    redis-*) echo "$1-pod-0-redis" ;;
    *) echo "$1-pod-0-$1" ;;
    esac
}

ready() { # NAME: wait until the service says that it is
    local until=$((SECONDS + READY_S))
    until curl -sf "http://127.0.0.1:${health[$1]}/readyz?wait=5" >/dev/null; do
        [ "$SECONDS" -lt "$until" ] || fail "$1 is not ready after $READY_S s"
        sleep 0.5
    done
}

ask() { # METHOD PATH [BODY]: the answer's body; asks again after a 503, as clients do; fails where the status is not 2xx
    local answer
    for _ in 1 2 3 4 5; do
        answer=$(curl -s -w '\n%{http_code}' --max-time 120 -X "$1" -H "Authorization: Bearer $key" \
            -H 'Content-Type: application/json' ${3:+-d "$3"} "$router$2")
        case $answer in
        *$'\n'2??) printf '%s' "${answer%$'\n'*}" && return ;;
        *$'\n'503) sleep 1 ;;
        *) break ;;
        esac
    done
    fail "$1 $2 answered: $answer"
}

field() { # EXPRESSION: of the JSON on standard input, called `it`
    python3 -c "import json, sys; text = sys.stdin.read(); it = json.loads(text) if text else sys.exit(1); print($1)"
}

for program in podman kubectl curl python3; do
    command -v "$program" >/dev/null || fail "$program is missing"
done
[ "$(id -u)" = 0 ] || fail "needs root: the containers' user gets directories of its own"
for image in spillway-mesh:0.1.0 spillway-worker:0.1.0; do
    podman image exists "$image" || fail "there is no image $image; docs/deployment.md says how to build it"
done
mkdir -m 755 "$state" 2>/dev/null || fail "$state exists: another run is under way, or was killed (then remove it)"

finish() {
    local status=$?
    trap - EXIT
    if [ "$status" != 0 ]; then
        for name in "${servers[@]}" "${services[@]}"; do
            printf -- '--- the end of the log of %s\n' "$name"
            podman logs --tail 15 "$(container "$name")" 2>&1 || true
        done >&2
    fi
    for name in "${services[@]}" "${servers[@]}"; do
        podman pod rm -f -t 0 "$name-pod-0" >/dev/null 2>&1 || true
    done
    # An emptyDir and a ConfigMap are volumes of podman, which it keeps.
    for volume in tmp $(sed -n 's/^  name: \(redis-[a-z]*-[a-z0-9]*\)$/\1/p' "$state/objects.yaml" 2>/dev/null); do
        podman volume rm "$volume" >/dev/null 2>&1 || true
    done
    podman secret rm "${servers[@]}" >/dev/null 2>&1 || true
    rm -rf "$state"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# What an operator does once: a Secret with a password of one's own.
password=$(head -c 24 /dev/urandom | base64 | tr -d '/+=\n')
base64_of() { printf '%s' "$1" | base64 -w 0; }
secret() { # NAME PORT
    printf '{"password": "%s", "url": "%s"}' "$(base64_of "$password")" \
        "$(base64_of "redis://:$password@127.0.0.1:$2")" | podman secret create "$1" - >/dev/null
}
secret redis-bus 28379
secret redis-pages 28380

for name in redis-bus "${services[@]}"; do
    install -d -o 10001 -g 10001 -m 700 "$state/$name"
done
kubectl kustomize k8s/overlays/podman >"$state/objects.yaml"
began=$SECONDS
podman play kube "$state/objects.yaml" >"$state/played" 2>&1 || fail "$(cat "$state/played")"

for name in "${servers[@]}" "${services[@]}"; do
    facts=$(podman inspect "$(container "$name")" | field "'user %s, read-only root: %s, no new privileges: %s' % (
        it[0]['Config']['User'], it[0]['HostConfig']['ReadonlyRootfs'],
        'no-new-privileges' in it[0]['HostConfig']['SecurityOpt'])")
    [ "$facts" = "user 10001:10001, read-only root: True, no new privileges: True" ] || fail "$name runs as $facts"
    [[ $name = redis-* ]] || ready "$name"
    printf '%-14s ready after %3d s   (%s)\n' "$name" $((SECONDS - began)) "$facts"
done

status=$(curl -s -o /dev/null -w '%{http_code}' "$router/v1/models")
[ "$status" = 401 ] || fail "a request without a key was answered with $status; expected 401"
echo "no key         401"
key=$(podman exec "$(container router)" spillway keys create --tenant play)
ask GET /v1/models | field "'models         ' + ', '.join(model['id'] for model in it['data'])"

ask POST /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40}' |
    field "'chat           Hello! -> ' + it['choices'][0]['message']['content']" | tee "$state/chat"
grep -q -- '-> .' "$state/chat" || fail "the chat's answer is empty"

ask POST /v1/collections '{"name": "rivers"}' >/dev/null
ask POST /v1/collections/rivers/documents '{"documents": [
    {"id": "danube", "text": "The Danube flows through Budapest and ends in the Black Sea."},
    {"id": "bread", "text": "Bread is baked from flour, water, salt and yeast."}]}' >/dev/null
search() {
    ask POST /v1/collections/rivers/search '{"text": "a river in Hungary", "k": 1}' |
        field "'%s (%.2f)' % (it['data'][0]['id'], it['data'][0]['score'])"
}
found=$(search)
case $found in
danube*) echo "search         a river in Hungary -> $found" ;;
*) fail "the search found $found; expected danube" ;;
esac

# As a node that fails would end it; Kubernetes and podman start it again by its restart policy.
pid=$(podman inspect --format '{{.State.Pid}}' "$(container vector-search)")
kill -KILL "$pid"
until now=$(podman inspect --format '{{.State.Pid}}' "$(container vector-search)") && [ "$now" != 0 ] && [ "$now" != "$pid" ]; do
    sleep 0.2
done
began=$SECONDS
until found=$(search 2>"$state/refused"); do # 503 no_worker, which clients try again
    [ $((SECONDS - began)) -lt "$READY_S" ] || fail "$(cat "$state/refused")"
    sleep 1
done
[ "${found%% *}" = danube ] || fail "after kill -9 the search found $found; expected danube"
echo "kill -9        of vector-search; $((SECONDS - began)) s later the search -> $found"

# SIGTERM, and the grace that the manifests give.
for name in router gpu-worker cpu-worker kv-store vector-search; do
    podman stop -t 60 "$(container "$name")" >/dev/null
    status=$(podman inspect --format '{{.State.ExitCode}}' "$(container "$name")")
    [ "$status" = 0 ] || fail "$name ended with status $status; expected 0"
done
echo "SIGTERM        every service ended with status 0"
