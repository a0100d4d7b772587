#!/bin/sh
# postStart of a node: greets the others at the addresses they have now. Nodes remember one another by address, and
# after an outage of all of them no remembered address is right. A node that knows nobody is left to form.sh.
port=${PORT:-6379}
here() { redis-cli -h "${HOST:-127.0.0.1}" -p "$port" "$@" 2>/dev/null | tr -d '\r'; }
for _ in $(seq 30); do
    # Not by cluster_state, which says ok until the first timeout: by the links to the others.
    nodes=$(here cluster nodes | grep ' connected\| disconnected')
    case $nodes in
    '') ;; # the server is not up yet
    *disconnected*)
        for peer in $PEERS; do
            address=$(getent ahostsv4 "$peer" | awk '{ print $1; exit }')
            [ -z "$address" ] || here cluster meet "$address" "$port" >/dev/null
        done
        ;;
    *) exit 0 ;; # all there, or nobody known
    esac
    sleep 1
done
exit 0 # the node goes on by itself; a failed hook would restart it
