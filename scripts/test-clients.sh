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

cargo build --quiet --manifest-path "$root/Cargo.toml" --package fornax
cargo build --quiet --manifest-path "$root/Cargo.toml" --package fornax-server --example chat_model

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
"$target/debug/fornax" serve -m "$work/tiny.gguf" --port 0 --ctx 2048 --request-timeout 60 2> "$work/log" &
server=$!

url=
for _ in $(seq 600); do
  url=$(sed -n 's|^listening on \(http://.*\)$|\1|p' "$work/log")
  [ -z "$url" ] || break
  kill -0 "$server" 2> /dev/null || { cat "$work/log" >&2; exit 1; }
  sleep 0.1
done
[ -n "$url" ] || { echo 'the server did not begin to listen' >&2; cat "$work/log" >&2; exit 1; }

export FORNAX_URL=$url PYTHONDONTWRITEBYTECODE=1
failed=
"$venv/bin/python" -m pytest --quiet -p no:cacheprovider "$root/tests/clients" "$@" || failed=clients

# Every request gets an answer, none of them says that the server is at fault, and what the description forbids is refused.
if [ -z "$failed" ]; then
  (cd "$work" && "$venv/bin/schemathesis" run "$url/openapi.json" --url "$url" --seed 1 --max-examples 25 \
    --phases examples,coverage,fuzzing --checks not_a_server_error,negative_data_rejection,content_type_conformance \
    --request-timeout 60 --workers 2 --no-color > "$work/fuzz" 2>&1) || failed=fuzz
  if [ -n "$failed" ]; then cat "$work/fuzz" >&2; else tail -n 12 "$work/fuzz"; fi
fi

healthy='import sys, urllib.request as r; sys.exit(r.urlopen(sys.argv[1] + "/health", timeout=20).status != 200)'
[ -n "$failed" ] || "$venv/bin/python" -c "$healthy" "$url" || failed=health
kill -TERM "$server"
wait "$server" || { echo "the server ended with $?" >&2; failed=${failed:-end}; }
server=
[ -z "$failed" ] || { echo "failed: $failed; the end of the log:" >&2; tail -n 20 "$work/log" >&2; exit 1; }
echo 'clients and fuzzer are content'
