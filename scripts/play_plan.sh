#!/usr/bin/env bash
# A planned deployment in containers: plans for this machine, from times measured here, starts the compose file that was
# written, and shows that the mesh runs the plan: it answers from documents, `spillway plan check` finds nothing that
# differs, and finds it when a process is stopped or a setting was planned otherwise. Leaves nothing behind.
#   scripts/play_plan.sh                       with docker compose, images built (docs/deployment.md)
#   PLAN=plan.json …                           this plan, instead of one that is made
#   COMPOSE="…" ROUTER_PORT=9080 KEEP=1 …      another program that takes the same commands; another port; leave it running
set -Eeuo pipefail
cd "$(dirname "$0")/.."
. scripts/containers.sh
. scripts/json_field.sh
export PYTHONPATH=$PWD:$PWD/client # for the planner and the client, which run beside the containers
spillway() { "$python" -m cli.main "$@" 2>>"$work/said"; }

# -- the plan ---------------------------------------------------------------------------------------------------
# In a project of its own, beside a copy of compose.yaml, which it extends.
cp compose.yaml "$work/"
plan=$work/plan.json
override=$work/compose.plan.yaml
if [ -n "${PLAN:-}" ]; then
    cp "$PLAN" "$plan"
    spillway plan write "$plan" --compose "$override" >"$work/planned"
else
    cat >"$work/rag.yaml" <<'SCHEMA'
name: answers from the handbook
stages:
  embed: {params: 23e6, tokens: 16}
  retrieval: {vectors: 500, vector_bytes: 1536, scan: 1}
  prefix: {params: 8e6, tokens: 512}
  decode: {params: 8e6, tokens: 32, context: 512}
SCHEMA
    spillway profile --quick --out "$work/profile.json" >"$work/planned"
    say "measured: $(grep -c '^[a-z]* .*[0-9]$' "$work/planned") times of stages on this machine"
    spillway plan deployment --schema "$work/rag.yaml" --inventory "$work/profile.json" --out "$plan" \
        --compose "$override" >"$work/planned"
fi
say "planned: $(field '", ".join("%d %s" % (each.get("replicas", 1), each.get("name") or each["service"]) for each in it["services"])' <"$plan")"
export COMPOSE_PROFILES
COMPOSE_PROFILES=$(sed -n 's/^# COMPOSE_PROFILES=\([a-z,]*\) .*/\1/p' "$override")
compose+=(-p spillway-plan -f "$work/compose.yaml" -f "$override")

# -- it runs ----------------------------------------------------------------------------------------------------
# Its status is 1 where costs drifted, too, as they may: they were measured in no time, and without the limits of containers.
check() { spillway plan check "$plan" --url "$url" --json >"$work/report" || [ $? = 1 ]; }
wait_differs() { # PATTERN: until the check names a difference like it, and no other; "" is none
    local give_up=$((SECONDS + 300)) found
    until check && found=$(field '"\n".join(it["differs"])' <"$work/report") && [ "$(grep -cv "^$1\$" <<<"$found")" = 0 ]; do
        [ $SECONDS -lt $give_up ] || fail "expected '$1', and plan check says: $(cat "$work/report")"
        sleep 0.5
    done
    say "plan check: ${found:-as planned}"
}
at=$EPOCHREALTIME
start
wait_ready router
make_key plan
wait_differs ''
give_up=$((SECONDS + 300))
until [ "$(api /v1/mesh | field 'bool(it["workers"]) and all(each["state"] == "ready" for each in it["workers"])')" = True ]; do
    [ $SECONDS -lt $give_up ] || fail "workers are not ready"
    sleep 0.5
done
say "all workers are ready $(since "$at") s after \`up -d\`"
inside -e SPILLWAY_API_KEY router spillway samples >"$work/out"
say "sample collections: $(tail -1 "$work/out")"
spillway chat --url "$url" --collection handbook 'Who is the mayor of Pudia?' >"$work/out"
grep -q 'Youtlane Thiker \[1\]' "$work/out"
say "a grounded answer: $(head -1 "$work/out") $(grep -o '\[1\] .*' "$work/out" | tail -1)"

# -- what is not as planned is found ------------------------------------------------------------------------------
"${compose[@]}" stop kv_store >>"$work/said" 2>&1
wait_differs 'kv_store: a replica is missing'
"${compose[@]}" start kv_store >>"$work/said" 2>&1
wait_differs ''
say "costs that drifted from those measured before: $(field '"; ".join(it["drifted"]) or "none"' <"$work/report")"
"$python" - "$plan" >"$work/other.json" <<'END'
import json, sys

plan = json.load(open(sys.argv[1]))
worker = next(each for each in plan["services"] if each["service"] == "gpu_worker")
settings = worker.setdefault("settings", {})
settings["SPILLWAY_MAX_RUNNING"] = str(int(settings.get("SPILLWAY_MAX_RUNNING", 6)) + 1)
json.dump(plan, sys.stdout)
END
if spillway plan check "$work/other.json" --url "$url" >"$work/out"; then fail "another plan passes for the one that runs"; fi
grep -q 'SPILLWAY_MAX_RUNNING .*, planned ' "$work/out"
say "plan check of another plan: $(head -1 "$work/out")"
say "done"
