#!/bin/sh
# The password comes by the environment and goes in by standard input, so that `ps` does not show it.
exec redis-server - "$@" <<END
include /usr/local/etc/redis/redis.conf
requirepass $REDISCLI_AUTH
masterauth $REDISCLI_AUTH
END
