#!/usr/bin/env bash
# usage: scripts/count-arm.sh [TYPE...]    (default: Q8_0 Q4_0 Q4_1 Q5_0 Q4_K Q6_K)
# Instructions that the Arm kernels run for 32 products of a weight and an activation, by tier and rows of activations,
# counted under QEMU one by one: there is no Arm machine here, and an emulator's time says nothing. A run over two pieces of a
# matrix less a run over one leaves the kernel alone. Needs what scripts/test-arm.sh needs.
source "$(dirname "${BASH_SOURCE[0]}")/cross.sh"

arm_programs
cargo build --quiet --release --target aarch64-unknown-linux-gnu -p fornax-cpu --example pieces
program=$CARGO_TARGET_DIR/aarch64-unknown-linux-gnu/release/examples/pieces

# One line of the log for every instruction, as each is a block of its own.
count() { $arm_emulator -singlestep -d exec,nochain -D /dev/stderr "$program" "$@" 2>&1 > /dev/null | grep -c '^Trace'; }

types=("$@")
[ $# = 0 ] && types=(Q8_0 Q4_0 Q4_1 Q5_0 Q4_K Q6_K)
printf '%-6s %-13s' type tier
rows=(1 8)
for n in "${rows[@]}"; do printf ' %8s' "$n rows"; done
echo
for type in "${types[@]}"; do
  for tier in neon neon_dotprod neon_i8mm; do
    printf '%-6s %-13s' "$type" "$tier"
    for n in "${rows[@]}"; do
      products=$($arm_emulator "$program" "$type" "$tier" "$n" 1)
      one=$(count "$type" "$tier" "$n" 1)
      two=$(count "$type" "$tier" "$n" 2)
      awk -v i=$((two - one)) -v p="$products" 'BEGIN { printf " %8.2f", 32 * i / p }'
    done
    echo
  done
done
