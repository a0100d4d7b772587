#!/usr/bin/env bash
# Starts the Kubernetes overlay `cpu`, with three vector_search pods, on this machine without a cluster, by `podman play
# kube` (scripts/play_pods.py says what podman cannot do), and shows that it works: every pod starts and becomes ready,
# strangers are refused, a chat and a search are answered, a killed container comes back, a collection is split over the
# vector_search pods while these are killed and replaced, and all end in order. Leaves nothing behind.
# Needs root, podman, kubectl, `make setup` and the images spillway-mesh:0.1.0, spillway-worker:0.1.0 (docs/deployment.md).
set -euo pipefail
cd "$(dirname "$0")/.."

state=/tmp/spillway-play
network=spillway-play
python=${PYTHON:-.venv/bin/python}
: "${READY_S:=300}"
. scripts/json_field.sh

fail() {
    printf 'play_kubernetes: %s\n' "$*" >&2
    exit 1
}

container() { # POD: the name podman gives its container
    case $1 in
    redis-*) echo "$1-redis" ;;
    *) echo "$1-${1%-*}" ;;
    esac
}

address() { # POD: at which this machine reaches it
    podman inspect "$(podman pod inspect "$1" --format '{{.InfraContainerID}}')" |
        field "it[0]['NetworkSettings']['Networks']['$network']['IPAddress']"
}

ready() { # POD: wait until the service says that it is
    local until=$((SECONDS + READY_S))
    until curl -sf "http://$(address "$1"):9464/readyz?wait=5" >/dev/null; do
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

for program in podman kubectl curl "$python"; do
    command -v "$program" >/dev/null || fail "$program is missing"
done
[ "$(id -u)" = 0 ] || fail "needs root: the containers' user gets directories of its own"
for image in spillway-mesh:0.1.0 spillway-worker:0.1.0; do
    podman image exists "$image" || fail "there is no image $image; docs/deployment.md says how to build it"
done
mkdir -m 755 "$state" 2>/dev/null || fail "$state exists: another run is under way, or was killed (then remove it)"
pods=()

finish() {
    local status=$?
    trap - EXIT
    if [ "$status" != 0 ]; then
        for pod in "${pods[@]}"; do
            printf -- '--- the end of the log of %s\n' "$pod"
            podman logs --tail 15 "$(container "$pod")" 2>&1 || true
        done >&2
    fi
    for pod in "${pods[@]}"; do
        podman pod rm -f -t 0 "$pod" >/dev/null 2>&1 || true
    done
    # Of a ConfigMap that is mounted podman makes a volume, which it keeps.
    for volume in $(sed -n 's/^  name: \(redis-[a-z]*-[a-z0-9]*\)$/\1/p' "$state/objects.yaml" 2>/dev/null); do
        podman volume rm "$volume" >/dev/null 2>&1 || true
    done
    podman secret rm redis-bus redis-pages >/dev/null 2>&1 || true
    podman network rm "$network" >/dev/null 2>&1 || true
    rm -rf "$state"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# What an operator does once: a Secret with a password of one's own.
password=$(head -c 24 /dev/urandom | base64 | tr -d '/+=\n')
base64_of() { printf '%s' "$1" | base64 -w 0; }
for name in redis-bus redis-pages; do
    printf '{"password": "%s", "url": "%s"}' "$(base64_of "$password")" \
        "$(base64_of "redis://:$password@$name-0:6379")" | podman secret create "$name" - >/dev/null
done

kubectl kustomize k8s/overlays/podman >"$state/objects.yaml"
mapfile -t pods < <("$python" scripts/play_pods.py "$state" <"$state/objects.yaml" | sort -r)
[ ${#pods[@]} -gt 0 ] || fail "there is no pod to play"
podman network create "$network" >/dev/null
began=$SECONDS
for pod in "${pods[@]}"; do
    podman play kube --network "$network" "$state/pods/$pod.yaml" >"$state/played" 2>&1 || fail "$pod: $(cat "$state/played")"
done

for pod in "${pods[@]}"; do
    facts=$(podman inspect "$(container "$pod")" | field "'user %s, read-only root: %s, no new privileges: %s' % (
        it[0]['Config']['User'], it[0]['HostConfig']['ReadonlyRootfs'],
        'no-new-privileges' in it[0]['HostConfig']['SecurityOpt'])")
    [ "$facts" = "user 10001:10001, read-only root: True, no new privileges: True" ] || fail "$pod runs as $facts"
    [[ $pod = redis-* ]] || ready "$pod"
    printf '%-16s ready after %3d s   (%s)\n' "$pod" $((SECONDS - began)) "$facts"
done
router=http://$(address router-0):8080

status=$(curl -s -o /dev/null -w '%{http_code}' "$router/v1/models")
[ "$status" = 401 ] || fail "a request without a key was answered with $status; expected 401"
echo "no key         401"
key=$(podman exec "$(container router-0)" spillway keys create --tenant play)
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
pid=$(podman inspect --format '{{.State.Pid}}' "$(container vector-search-0)")
kill -KILL "$pid"
until now=$(podman inspect --format '{{.State.Pid}}' "$(container vector-search-0)") && [ "$now" != 0 ] && [ "$now" != "$pid" ]; do
    sleep 0.2
done
began=$SECONDS
until found=$(search 2>"$state/refused"); do # 503 no_worker, which clients try again
    [ $((SECONDS - began)) -lt "$READY_S" ] || fail "$(cat "$state/refused")"
    sleep 1
done
[ "${found%% *}" = danube ] || fail "after kill -9 the search found $found; expected danube"
echo "kill -9        of vector-search-0; $((SECONDS - began)) s later the search -> $found"

SPILLWAY_API_KEY=$key "$python" scripts/play_shards.py "$state" "$router" "http://$(address router-1):8080"

# SIGTERM, and the grace that the manifests give.
for pod in "${pods[@]}"; do
    [[ $pod != redis-* ]] || continue
    podman stop -t 60 "$(container "$pod")" >/dev/null
    status=$(podman inspect --format '{{.State.ExitCode}}' "$(container "$pod")")
    [ "$status" = 0 ] || fail "$pod ended with status $status; expected 0"
done
echo "SIGTERM        every service ended with status 0"
