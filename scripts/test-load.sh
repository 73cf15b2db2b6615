#!/usr/bin/env bash
# usage: scripts/test-load.sh FORNAX MODEL.gguf [SECONDS [SEED]]
# Serves the model with the given fornax and lets 64 clients at it for so long (600 s): requests of every kind and random
# length, clients that leave, requests that are wrong. Fails on any answer that was not asked for, and if blocks, memory,
# connections, files or threads do not come back to what they were. Prints what it saw. Needs Python 3 and Linux.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fornax=$1 model=$2 seconds=${3:-600} seed=${4:-1}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -9 "$server" 2> /dev/null || true; rm -rf "$work"' EXIT

# So little memory for keys and values that all of it has been touched when the warm-up is over.
"$fornax" serve -m "load=$model" --port 0 --ctx 2048 --max-running 32 --kv-memory 64M --device cpu 2> "$work/log" &
server=$!
url=
for _ in $(seq 600); do
  url=$(sed -n 's|^listening on \(http://.*\)$|\1|p' "$work/log")
  [ -z "$url" ] || break
  kill -0 "$server" 2> /dev/null || break
  sleep 0.1
done
[ -n "$url" ] || { cat "$work/log" >&2; echo 'failed: the server did not begin to listen' >&2; exit 1; }

failed() {
  echo "failed: $1; the end of the log:" >&2
  grep -v 'fornax::access' "$work/log" | tail -n 20 >&2
  exit 1
}

python3 "$root/tests/clients/load.py" "$url" "$server" "$seconds" "$seed" || failed 'the load'
kill -TERM "$server"
wait "$server" || failed "the server ended with $?"
server=
! grep -i 'panicked' "$work/log" || failed 'a panic'
