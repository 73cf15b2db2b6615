#!/usr/bin/env bash
# Brings NVIDIA's run-time compiler and compiles every kernel of fornax-cuda twice: file by file (compile-cuda.sh), and through the
# provider's own path with its embedded sources, checking that every entry that the host asks for is there. No GPU, no driver.
# FORNAX_NVRTC names the folder that takes the compiler, as for compile-cuda.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export FORNAX_NVRTC=${FORNAX_NVRTC:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax-nvrtc}
"$root/scripts/compile-cuda.sh"
cd "$root"
cargo run -q -p fornax-cuda --example compile_kernels -- 80 90
