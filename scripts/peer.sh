#!/usr/bin/env bash
# Builds llama.cpp (in the Python package llama-cpp-python) for this machine, for `fornax bench --against llama.cpp`.
# About twenty minutes on two cores, once. Needs Python with venv; brings clang 19 by apt where there is none: what
# Debian's gcc 12 builds is up to five times slower, and a race against a slow build proves nothing.
# PEER_HOME names another folder than the cache folder of fornax.
set -euo pipefail

folder=${PEER_HOME:-${FORNAX_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax}/peer}
if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c 'import llama_cpp' 2> /dev/null; then
  echo "$folder has it"
  exit
fi
if ! command -v clang-19 > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y clang-19 > /dev/null
fi
python3 -m venv "$folder"
CC=clang-19 CXX=clang++-19 CMAKE_ARGS='-DGGML_NATIVE=ON -DGGML_OPENMP=OFF' \
  "$folder/bin/pip" install --no-binary llama-cpp-python llama-cpp-python
"$folder/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
