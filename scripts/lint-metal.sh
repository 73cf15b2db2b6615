#!/usr/bin/env bash
# usage: scripts/lint-metal.sh [SOURCE...]            (default: every kernel source of fornax-metal)
# Holds Metal kernel sources to their address spaces and types with clang's C++ for OpenCL, on Linux; installs clang 19 on
# Debian when it is missing. A SOURCE is a file, or several joined with + as the host joins them. By default each file in a
# folder of crates/fornax-metal/kernels is one source, behind the shared ones in the folder blocks.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! command -v "${FORNAX_MSL_CLANG:-clang++-19}" > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends clang-19 > /dev/null
fi
# Names given are relative to where the caller stands.
sources=("$@")
if [ $# = 0 ]; then
  cd "$root/crates/fornax-metal"
  if [ -d kernels ]; then
    shared=$(find kernels/blocks -name '*.metal' | sort | tr '\n' '+')
    mapfile -t files < <(find kernels -name '*.metal' -not -path 'kernels/blocks/*' | sort)
    sources=("${files[@]/#/$shared}")
  fi
fi
manifest=(--quiet --manifest-path "$root/Cargo.toml" --package fornax-msl)
if [ $# = 0 ]; then
  # The lint itself: what it has to see, it sees.
  cargo test "${manifest[@]}" --features clang --test lint
fi
[ ${#sources[@]} = 0 ] || cargo run "${manifest[@]}" --example lint -- "${sources[@]}"
