#!/usr/bin/env bash
# usage: scripts/compile-cuda.sh [ARCHITECTURE...]       (default: 80 90)
# Compiles every CUDA kernel to machine code, by the path that the engine takes: NVIDIA's run-time compiler, which needs
# neither a GPU nor a driver. FORNAX_NVRTC names the folder that takes it (about 200 MB).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export FORNAX_NVRTC=${FORNAX_NVRTC:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax-nvrtc}
release=13.0

if [ "$(cat "$FORNAX_NVRTC/release" 2> /dev/null)" != $release ]; then
  if ! python3 -m pip --version > /dev/null 2>&1; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-pip > /dev/null
  fi
  rm -rf "$FORNAX_NVRTC"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile --target "$FORNAX_NVRTC" \
    "nvidia-cuda-nvrtc==$release.*" >&2
  echo $release > "$FORNAX_NVRTC/release"
fi
cd "$root"
# Of the whole workspace, as the tests build it: of one package it would be built on other features, all once more.
cargo build --quiet --workspace --example compile_kernels
# A process an architecture: within one the compiler takes one kernel after the other.
one() { "${CARGO_TARGET_DIR:-target}/debug/examples/compile_kernels" "$1"; }
running=()
[ $# != 0 ] || set -- 80 90
for architecture in "$@"; do
  one "$architecture" &
  running+=($!)
done
failed=0
for each in "${running[@]}"; do
  wait "$each" || failed=1
done
exit $failed
