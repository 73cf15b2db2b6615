#!/usr/bin/env bash
# usage: scripts/test-clients.sh [PYTEST ARGUMENT...]
# Runs the official clients of OpenAI and Anthropic, and a fuzzer that reads /openapi.json (schemathesis), against the
# server with a tiny model. Makes a virtual environment in the target folder and installs tests/clients/requirements.txt
# into it, the first time and whenever that file changes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
wanted=$root/tests/clients/requirements.txt
venv=$target/clients

# Of the whole workspace, as the tests build it: of one package it would be built on other features, all once more.
cargo build --quiet --manifest-path "$root/Cargo.toml" --workspace --bin fornax --example chat_model

if ! cmp -s "$wanted" "$venv/installed.txt"; then
  rm -rf "$venv"
  if ! python3 -m venv "$venv" 2> /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv > /dev/null
    python3 -m venv "$venv"
  fi
  "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$wanted"
  cp "$wanted" "$venv/installed.txt"
fi

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -9 "$server" 2> /dev/null || true; rm -rf "$work"' EXIT
"$target/debug/examples/chat_model" "$work/tiny.gguf"

# start CONTEXT: serves the model, with so much room for a request; the address is in FORNAX_URL.
start() {
  "$target/debug/fornax" serve -m "$work/tiny.gguf" --port 0 --ctx "$1" --request-timeout 60 2> "$work/log" &
  server=$!
  for _ in $(seq 600); do
    FORNAX_URL=$(sed -n 's|^listening on \(http://.*\)$|\1|p' "$work/log")
    [ -z "$FORNAX_URL" ] || return 0
    kill -0 "$server" 2> /dev/null || break
    sleep 0.1
  done
  fail 'the server did not begin to listen'
}

fail() {
  echo "failed: $1; the end of the log:" >&2
  tail -n 20 "$work/log" >&2
  exit 1
}

# Still well, and it ends as it should when it is asked to.
stop() {
  local healthy='import os, sys, urllib.request as r; sys.exit(r.urlopen(os.environ["FORNAX_URL"] + "/health", timeout=20).status != 200)'
  "$venv/bin/python" -c "$healthy" || fail health
  kill -TERM "$server"
  wait "$server" || fail "the server ended with $?"
  server=
}

export FORNAX_URL PYTHONDONTWRITEBYTECODE=1
start 2048
"$venv/bin/python" -m pytest --quiet -p no:cacheprovider "$root/tests/clients" "$@" || fail clients
stop

# Every request gets an answer in time, none of them says that the server is at fault, and what the description forbids is
# refused. Little room, so that no answer is long.
start 64
cd "$work"
if ! "$venv/bin/schemathesis" run "$FORNAX_URL/openapi.json" --url "$FORNAX_URL" --seed 1 --max-examples 20 \
  --phases examples,coverage,fuzzing --checks not_a_server_error,negative_data_rejection,content_type_conformance \
  --request-timeout 60 --workers 2 --no-color > "$work/fuzz" 2>&1; then
  cat "$work/fuzz" >&2
  fail fuzzer
fi
grep 'generated,' "$work/fuzz"
stop
echo 'clients and fuzzer are content'
