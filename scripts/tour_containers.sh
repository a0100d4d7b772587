#!/usr/bin/env bash
# The tour, against containers: starts the mesh, walks through what README shows, and kills one container of each kind
# in the middle of a stream and of an ingest. Every line it prints has been checked; it ends at the first that does not hold.
#   scripts/tour_containers.sh                 with docker compose, images built
#   COMPOSE="…" ROUTER_PORT=9080 KEEP=1 …      another program that takes the same commands; another port; leave it running
set -Eeuo pipefail
cd "$(dirname "$0")/.."
export COMPOSE_PROFILES=cpu,overflow # the overflow worker is killed, too
. scripts/containers.sh
services="router gpu_worker cpu_worker vector_search kv_store redis-bus redis-pages"

# A client in a container of its own, which none of the kills below touches.
client() {
    "${compose[@]}" run --rm -T --no-deps -v "$work/notes:/notes:ro" -e SPILLWAY_URL=http://router:8080 \
        -e "SPILLWAY_API_KEY=$key" kv_store cli.main "$@" 2>>"$work/said"
}
incarnation() { inside "$1" sh -c 'cut -d" " -f22 /proc/1/stat' || true; } # when its first process began

# -- the start ------------------------------------------------------------------------------------------------
at=$EPOCHREALTIME
start
for service in $services; do wait_ready "$service"; done
say "all is ready $(since "$at") s after \`up -d\`"
for service in $services; do
    inside "$service" sh -c '[ "$(id -u)" != 0 ] && ! touch /x 2>/dev/null && ! command -v cc && ! command -v g++'
done
say "nobody in them is root, their root file systems cannot be written, none has a compiler"

# -- keys -------------------------------------------------------------------------------------------------------
make_key tour

# -- the tour -----------------------------------------------------------------------------------------------------
api /v1/embeddings -d '{"input": "water over the dam"}' >"$work/embedding"
grep -q '"embedding":\[' "$work/embedding"
say "embeddings: $(sed 's/.*"embedding":\[\([^]]*\).*/\1/' "$work/embedding" | tr ',' '\n' | grep -c .) numbers for one text"
mkdir -m 755 "$work/notes"
chmod 755 "$work"
printf '# Rivers\n\nThe Danube flows through Vienna and Budapest.\n' >"$work/notes/rivers.md"
printf '# Cats\n\nCats sleep most of the day.\n' >"$work/notes/cats.md"
client ingest notes /notes >"$work/out"
client search notes 'which river is in Hungary?' | tee "$work/out" | grep -q rivers.md
say "ingest and search: $(head -1 "$work/out")"
inside -e SPILLWAY_API_KEY router spillway samples >"$work/out"
say "sample collections: $(tail -1 "$work/out")"
client chat --collection handbook 'Who is the mayor of Pudia?' >"$work/out"
grep -q 'Youtlane Thiker \[1\]' "$work/out"
say "a grounded answer: $(head -1 "$work/out")"
api /v1/chat/completions -N -d '{"model": "spillway-demo", "stream": true, "retrieval": {"collection": "handbook"},
    "messages": [{"role": "user", "content": "Who is the mayor of Pudia?"}]}' >"$work/out"
grep -q '^data: \[DONE\]' "$work/out"
say "the same, streamed: $(grep -c '^data: {' "$work/out") chunks and [DONE]"
if "$python" -c 'import openai' 2>/dev/null; then
    "$python" - "$url/v1" "$key" >"$work/out" <<'END'
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
assert len(client.embeddings.create(model="minilm", input=["water over the dam"]).data[0].embedding) == 384
asked = [{"role": "user", "content": "What can you do?"}]
for chunk in client.chat.completions.create(model="spillway-demo", messages=asked, stream=True):
    print(chunk.choices[0].delta.content or "", end="")
END
    [ -s "$work/out" ]
    say "the openai client: $(head -c 60 "$work/out")…"
else
    say "the openai client: left out, $python has none"
fi

# -- one of each is killed, while a stream and an ingest run -----------------------------------------------------
story=(chat --seed 1 --min-tokens "${TOKENS:-3000}" 'Tell me a long story')
client "${story[@]}" >"$work/undisturbed"
say "an undisturbed story has $(wc -c <"$work/undisturbed") bytes"
for n in $(seq 200); do
    echo "Note $n: the lock keeper of mile $n wrote that gate number $n was opened." >"$work/notes/n$n.md"
done
for service in $services; do
    was=$(incarnation "$service")
    client "${story[@]}" >"$work/killed" &
    stream=$!
    client ingest "kill-${service//_/-}" /notes >"$work/ingested" &
    ingest=$!
    until [ -s "$work/killed" ]; do kill -0 $stream || fail "the stream's client failed"; sleep 0.1; done
    kill -0 $stream || fail "the stream ended before the kill: TOKENS= is too small"
    at=$EPOCHREALTIME
    inside "$service" sh -c 'kill -9 -1' || true # all that runs in it, its init then ends and the container with it
    until now=$(incarnation "$service") && [ -n "$now" ] && [ "$now" != "$was" ]; do sleep 0.2; done
    wait_ready "$service"
    back=$(since "$at")
    wait $stream || fail "$service killed: the stream's client failed"
    cmp "$work/undisturbed" "$work/killed"
    wait $ingest || fail "$service killed: the ingest failed: $(tail -3 "$work/said")"
    found=$(api "/v1/collections/kill-${service//_/-}/search" -d '{"text": "gate number 137", "k": 1}')
    grep -q '"n137.md"' <<<"$found" || fail "$service killed: a document is not found"
    say "$(printf '%-13s killed, ready again after %4s s; the story is the same to the last byte; %s' \
        "$service" "$back" "$(tail -1 "$work/ingested")")"
done
say "done"
