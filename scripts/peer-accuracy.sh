#!/usr/bin/env bash
# Records how far llama.cpp is from exact logits on the quantised test models, with the prompts of the engine's test
# `accuracy` (testdata/peer-accuracy.json). Needs what scripts/peer.sh builds. To take in another model, name it in that
# file first.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
peer=${PEER_HOME:-${FORNAX_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax}/peer}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$root" && ACCURACY_FOLDER=$folder cargo test --quiet --package fornax-engine --test it write_prompts -- --ignored)
"$peer/bin/python" "$root/scripts/peer-accuracy.py" "$folder" "$root/testdata"
