#!/usr/bin/env bash
# usage: scripts/ladder-cuda.sh [FOLDER [MODELS]]
# Everything that says whether the CUDA provider computes the right thing, in one call on a machine with a GPU: the proof
# and every conformance case against the reference; every case again as steps of many rows, with 8-bit activations and with
# halves; the test models of all families against expected logits (f32 activations), against the reference (8-bit), and bit
# by bit alone and in company (deterministic); how far 8-bit logits are from exact ones beside llama.cpp's; and, where
# compute-sanitizer is there, memory, races and barriers of the proof. FOLDER holds the programs `proof`, `many`, `golden` and
# `accuracy` of the crate's examples; without one they are built here.
# Ends in `N passed, N failed`.
# What the kernels need is compiled as it is met. For a machine whose time is dear it can be compiled ahead, on any other:
#   FORNAX_CUBINS=/some/folder cargo test -p fornax-cuda --lib compile_for_the_ladder -- --ignored
# and the folder carried along and named by the same variable.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-}
models=${2:-$root/testdata/models}
if [ -z "$folder" ]; then
  (cd "$root" && cargo build --quiet --release --package fornax-cuda --examples) || exit 1
  folder=${CARGO_TARGET_DIR:-$root/target}/release/examples
fi
passed=0
failed=0

# Runs a program that ends in "N passed, ... N failed" and adds its counts; a program that does not is one failure.
count() {
  local out last
  out=$("$@" 2>&1)
  last=$(grep -E '^[0-9]+ passed' <<< "$out" | tail -n 1)
  grep -E '^FAIL' <<< "$out"
  if [[ $last =~ ^([0-9]+)\ passed,.*\ ([0-9]+)\ failed ]] || [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
    echo "$*: $last"
  else
    failed=$((failed + 1))
    echo "$*: no result"
    tail -n 5 <<< "$out"
  fi
}

# One part of the sanitizer over the proof's plain run, which holds every kind of stage. What the proof itself finds is
# counted above.
sanitize() {
  if wait "$2" && grep -qE '(ERROR|RACECHECK) SUMMARY: 0 (errors|hazards)' "$work/$1"; then
    passed=$((passed + 1))
    echo "compute-sanitizer $1: clean"
  else
    failed=$((failed + 1))
    echo "compute-sanitizer $1:"
    grep -E '=========' "$work/$1" | head -n 12
  fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

count "$folder/proof" conformance
count "$folder/many"
count "$folder/golden" "$models"
count "$folder/accuracy" "$models/.."
if command -v compute-sanitizer > /dev/null; then
  # Side by side: none of them measures.
  tools=(memcheck racecheck synccheck) running=()
  for tool in "${tools[@]}"; do
    timeout 300 compute-sanitizer --tool "$tool" "$folder/proof" > "$work/$tool" 2>&1 &
    running+=($!)
  done
  for ix in "${!tools[@]}"; do
    sanitize "${tools[$ix]}" "${running[$ix]}"
  done
else
  echo "compute-sanitizer is not here: memory, races and barriers are not checked"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
