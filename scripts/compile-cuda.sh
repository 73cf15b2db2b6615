#!/usr/bin/env bash
# usage: scripts/compile-cuda.sh [FILE.cu...]            (default: every kernel file of fornax-cuda)
# Compiles CUDA kernels to machine code with NVIDIA's run-time compiler, the one that the engine itself calls; neither a GPU nor a
# driver is needed. CUDA_ARCHS names the architectures. FORNAX_NVRTC names the folder that takes the compiler (about 250 MB).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
nvrtc=${FORNAX_NVRTC:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax-nvrtc}
release=13.0

if [ $# = 0 ]; then
  kernels=$root/crates/fornax-cuda/kernels
  mapfile -t files < <(find "$kernels" -name '*.cu' | sort)
  [ ${#files[@]} != 0 ] || { echo "compile-cuda.sh: no kernel file under $kernels" >&2; exit 1; }
  set -- "${files[@]}"
fi
if [ "$(cat "$nvrtc/release" 2> /dev/null)" != $release ]; then
  python3 -m pip --version > /dev/null 2>&1 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-pip > /dev/null; }
  rm -rf "$nvrtc"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile --target "$nvrtc" \
    "nvidia-cuda-nvrtc==$release.*" "nvidia-cuda-runtime==$release.*" "nvidia-cuda-crt==$release.*" "nvidia-cuda-cccl==$release.*" >&2
  echo $release > "$nvrtc/release"
fi
toolkit=$(echo "$nvrtc"/nvidia/cu13)
# Without this path the compiler does not find its own built-in functions.
export LD_LIBRARY_PATH=$toolkit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
exec python3 "$root/scripts/nvrtc.py" "$toolkit" "${CUDA_ARCHS:-sm_80 sm_90}" "$@"
