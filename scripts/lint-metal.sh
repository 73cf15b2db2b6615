#!/usr/bin/env bash
# usage: scripts/lint-metal.sh [SOURCE...]            (default: every kernel source of fornax-metal)
# Holds Metal kernel sources to their address spaces and types with clang's C++ for OpenCL, on Linux; installs clang 19 on
# Debian when it is missing. A SOURCE is a file, or several joined with + as the host joins them.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! command -v "${FORNAX_MSL_CLANG:-clang++-19}" > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends clang-19 > /dev/null
fi
workspace=(--quiet --manifest-path "$root/Cargo.toml")
if [ $# = 0 ]; then
  # The lint itself: what it has to see, it sees. And every family as the host joins it. Of the whole workspace, as the tests
  # build it: of one package all would be built once more.
  cargo test "${workspace[@]}" --workspace --test lint
else
  cargo run "${workspace[@]}" --package fornax-msl --example lint -- "$@"
fi
