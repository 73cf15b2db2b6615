#!/usr/bin/env bash
# The table of docs/bench.md: races llama.cpp on every model of it, in turns, and writes the receipts; `cargo xtask docs`
# makes the page of them. Eight minutes on two idle cores; needs scripts/peer.sh and the model files in the folder of the first argument:
#   SmolLM2-135M-Instruct.Q4_1.gguf  gemma-3-270m-q4_k_m.gguf  qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
# The Q8_0 files are made from these: only their sizes matter here.
set -euo pipefail
models=$(cd "${1:?the folder with the models}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repeats=${2:-5}
fornax=${FORNAX:-$(pwd)/target/release/fornax}

q8() {
  [ -f "$models/$2" ] || "$fornax" quantize "$models/$1" "$models/$2" q8_0
}
race() {
  local receipt=$1
  shift
  echo "== $receipt"
  "$fornax" bench --quiet --against llama.cpp -r "$repeats" --receipt "bench/receipts/$receipt.json" "$@"
}

[ -x "$fornax" ] || cargo build --release
q8 SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct.Q8_0.gguf
q8 qwen2.5-coder-0.5b-instruct-q4_k_m.gguf qwen2.5-coder-0.5b-instruct-q8_0.gguf
race 1-smollm2-135m-q4_1 -m "$models/SmolLM2-135M-Instruct.Q4_1.gguf" -p 512 -n 64 --batch 16
race 2-smollm2-135m-q8_0 -m "$models/SmolLM2-135M-Instruct.Q8_0.gguf" -p 512 -n 64 --batch 16
race 3-gemma-3-270m-q4_k_m -m "$models/gemma-3-270m-q4_k_m.gguf" -p 512 -n 64 --batch 16
race 4-qwen2.5-0.5b-q4_k_m -m "$models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf" -p 512 -n 64 --batch 16
race 5-qwen2.5-0.5b-q8_0 -m "$models/qwen2.5-coder-0.5b-instruct-q8_0.gguf" -p 512 -n 64 --batch 16
race 6-qwen3-0.6b-q8_0 --synthetic qwen3-0.6b:q8_0 -p 512 -n 64 --batch 16
race 7-llama-1b-q8_0 --synthetic llama-1b:q8_0 -p 256 -n 32
race 8-smollm2-135m-q4_1-depth-4096 -m "$models/SmolLM2-135M-Instruct.Q4_1.gguf" -p 0 -n 32 -d 4096
race 9-smollm2-135m-q4_1-depth-4096-q8_0 -m "$models/SmolLM2-135M-Instruct.Q4_1.gguf" -p 0 -n 32 -d 4096 --kv-type q8_0
