#!/usr/bin/env bash
# usage: scripts/objects-apple.sh
# Compiles the crates with code of their own for macOS on Apple silicon down to machine code, on Linux, as root on Debian 12:
# what a type check does not see, instructions in `asm!`, constants of generic code, code generation itself. Nothing is
# linked: that would need Apple's SDK, and so would running it.
source "$(dirname "${BASH_SOURCE[0]}")/cross.sh"

second_compiler
apple_objects
cd "$root"
# Three compilers would throw out each other's work in one folder.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/apple-objects
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
export {CC,CXX}_aarch64_apple_darwin="$scripts/stand-in/cc" AR_aarch64_apple_darwin="$scripts/stand-in/ar" RANLIB_aarch64_apple_darwin=true SDKROOT=/
sysroot_flags="target.aarch64-apple-darwin.rustflags = ['--sysroot', '$apple_sysroot']"
cargo build --target aarch64-apple-darwin --config "$sysroot_flags" --lib \
  -p fornax-gguf -p fornax-plan -p fornax-cpu -p fornax-metal
shopt -s nullglob
built=("$CARGO_TARGET_DIR"/aarch64-apple-darwin/debug/libfornax_*.rlib)
note "${#built[@]} libraries of machine code for aarch64-apple-darwin"
[ ${#built[@]} -ge 4 ]
