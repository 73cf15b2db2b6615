#!/usr/bin/env bash
# usage: scripts/bench-serve.sh FORNAX LLAMA_SERVER MODEL.gguf [ROUNDS [LONG]]
# Runs `fornax serve` and llama.cpp's server in turns, on two threads each, under the same load from `fornax bench --serve`:
# 16 streaming clients with prompts of about 120 tokens and 64 tokens each, one such client, and one prompt of LONG (8,000)
# tokens that arrives while 8 clients decode, who leave when it has its answer. Prints each round, then the medians and
# their ratios. Needs python3 for the sums. For a quiet machine: client and server share its cores.
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2p' "$0" >&2; exit 2; }
fornax=$1 rival=$2 model=$3 rounds=${4:-3} long=${5:-8000}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -9 "$server" 2> /dev/null || true; rm -rf "$work"' EXIT

# A port that is free now.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

stop() {
  kill "$server" 2> /dev/null || true
  wait "$server" 2> /dev/null || true
  server=
}

# up URL: waits until the server answers that it is well.
up() {
  for _ in $(seq 1200); do
    if python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/health", timeout=5)' "$1" 2> /dev/null; then
      return 0
    fi
    kill -0 "$server" 2> /dev/null || break
    sleep 0.1
  done
  tail -n 20 "$work/log" >&2
  echo "failed: the server at $1 did not come up" >&2
  exit 1
}

# start WHO SLOTS CTX: CTX is the room of one request.
start() {
  local at
  at=$(port)
  url=http://127.0.0.1:$at
  case $1 in
    fornax)
      "$fornax" serve -m "$model" --port "$at" --device cpu --threads 2 --max-running "$2" --ctx "$3" --quiet 2> "$work/log" &
      ;;
    llama.cpp)
      "$rival" -m "$model" --port "$at" -t 2 -tb 2 -np "$2" -c $(($2 * $3)) --no-webui > "$work/log" 2>&1 &
      ;;
  esac
  server=$!
  up "$url"
}

# load WHO WHAT ROUND FLAG...: one line of JSON with what the clients saw, or why there is none.
load() {
  local who=$1 what=$2 round=$3
  shift 3
  if "$fornax" bench --serve "$url" --json --seed "$round" "$@" > "$work/one" 2> "$work/why"; then
    python3 - "$who" "$what" "$work/one" "$work/all" << 'END'
import json, sys
who, what, one, every = sys.argv[1:]
r = json.load(open(one))
gap = r["long"]["worst_gap_ms"] if r.get("long") else r["worst_gap_ms"]
row = {"who": who, "what": what, "tok_s": r["tokens_per_s"], "ttft_s": r["ttft_s"]["p50"], "gap_s": gap / 1e3}
if r.get("long"):
    row["ttft_s"] = r["long"]["ttft_s"]
print(f'{who:<10} {what:<8} {row["tok_s"]:8.1f} tok/s  first p50 {row["ttft_s"]:6.3f} s  worst gap {row["gap_s"]:6.3f} s'
      f'  {r["answered"]} of {r["requests"]} answered, {r["generated_tokens"]} tokens'
      + (f', long prompt {r["long"]["prompt_tokens"]} tokens, first after {r["long"]["ttft_s"]:.2f} s,'
         f' {r["long"]["outlasted_by"]} clients there to its end' if r.get("long") else ""))
print(json.dumps(row), file=open(every, "a"))
END
  else
    echo "$who $what: $(tail -n 1 "$work/why")"
  fi
}

for round in $(seq "$rounds"); do
  for who in fornax llama.cpp; do
    start "$who" 16 1024
    load "$who" 16 "$round" -p 120 -n 64 --requests 16
    load "$who" one "$((round + 1000))" -p 120 -n 64 --requests 1
    stop
    # Room for the long prompt in every slot, and no more than the smallest models were trained for.
    start "$who" 9 8192
    load "$who" mixed "$((round + 2000))" -p 40 -n 1200 --requests 8 --mixed "$long"
    stop
  done
done

python3 - "$work/all" << 'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
def middle(who, what, field):
    values = [r[field] for r in rows if r["who"] == who and r["what"] == what]
    return statistics.median(values) if values else None
print("\nmedians")
fields = (("tok_s", "tok/s", 1), ("ttft_s", "s to the first text, p50", 3), ("gap_s", "s worst gap", 3))
beside = (("gap_s", "s worst gap of the eight", 3), ("ttft_s", "s to the first text of the long prompt", 3))
for what in ("16", "one", "mixed"):
    for field, unit, digits in beside if what == "mixed" else fields:
        ours, theirs = middle("fornax", what, field), middle("llama.cpp", what, field)
        if ours is None:
            continue
        line = f"{what:<6} fornax {ours:9.{digits}f}"
        if theirs is not None:
            ratio = ours / theirs if field == "tok_s" else theirs / ours if ours else float("inf")
            line += f"  llama.cpp {theirs:9.{digits}f}  {ratio:5.2f} times as good"
        print(line + f"  {unit}")
END
