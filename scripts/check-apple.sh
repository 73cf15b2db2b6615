#!/usr/bin/env bash
# usage: scripts/check-apple.sh [CARGO ARGUMENT...]      (default: --workspace --all-targets -- -D warnings)
# Type-checks and lints for macOS on Apple silicon, on Linux, as root on Debian 12. Nothing is linked, so neither an SDK nor
# a C compiler for macOS is needed; the price is that link errors and code generation are not seen.
source "$(dirname "${BASH_SOURCE[0]}")/cross.sh"

second_compiler
apple_library
cd "$root"
[ $# = 0 ] && set -- --workspace --all-targets -- -D warnings
# The two compilers would throw out each other's work in one folder.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/apple
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
export {CC,CXX}_aarch64_apple_darwin="$scripts/stand-in/cc" AR_aarch64_apple_darwin="$scripts/stand-in/ar" RANLIB_aarch64_apple_darwin=true SDKROOT=/
exec "$cross/bin/cargo-clippy" clippy --target aarch64-apple-darwin "$@"
