#!/bin/sh
# Makes a cluster of nodes that are none yet; does nothing to one that is there, whole or not.
set -eu
port=${PORT:-6379}
nodes=
for peer in $PEERS; do
    until redis-cli -h "$peer" -p "$port" ping 2>/dev/null | grep -q PONG; do
        echo "waiting for $peer"
        sleep 2
    done
    if ! redis-cli -h "$peer" -p "$port" cluster info | grep -q '^cluster_known_nodes:1.$'; then
        echo "$peer belongs to a cluster"
        exit 0
    fi
    nodes="$nodes $(getent ahostsv4 "$peer" | awk '{ print $1; exit }'):$port"
done
# shellcheck disable=SC2086 # one word a node
redis-cli --cluster create $nodes --cluster-replicas 1 --cluster-yes
