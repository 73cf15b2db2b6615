# shellcheck shell=bash disable=SC2034
# Sourced by the scripts beside it: a second Rust compiler for targets that this machine cannot run.
#
# A standard library fits only the very compiler that it was built with, and `rustup target add` needs rustup's own
# server. Debian 12 carries one compiler new enough (rustc-web) together with its library for Arm and with the
# library's source, so all of that is unpacked, not installed, into a folder of its own. cargo stays the machine's.
#
# FORNAX_CROSS names the folder (about 700 MB). Delete it to start again.

set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
cross=${FORNAX_CROSS:-${XDG_CACHE_HOME:-$HOME/.cache}/fornax-cross}
sysroot=$cross/usr/lib/rustlib

note() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# packages SIGN=PACKAGE...: installs each package whose sign, a command or a file by its whole path, is not there.
packages() {
  local pair sign wanted=()
  for pair in "$@"; do
    sign=${pair%%=*}
    [ -e "$sign" ] || command -v "$sign" > /dev/null || wanted+=("${pair#*=}")
  done
  [ ${#wanted[@]} = 0 ] && return
  note "installing ${wanted[*]}"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${wanted[@]}" > /dev/null
}

# requirement PACKAGE PREFIX: the package that PACKAGE depends on and whose name starts with PREFIX.
requirement() {
  apt-cache depends --no-recommends --no-suggests "$1" | awk -v p="$2" '$1 == "Depends:" && index($2, p) == 1 { print $2; exit }'
}

# unpack ARCHIVE [TAR ARGUMENT...]
unpack() { dpkg-deb --fsys-tarfile "$1" | tar -x -C "$cross" --exclude './usr/share/*' "${@:2}"; }

# The compiler, clippy and the library's source; sets RUSTC and RUSTDOC.
second_compiler() {
  export RUSTC=$cross/bin/rustc RUSTDOC=$cross/bin/rustdoc
  # Build scripts run here, so they are linked here.
  packages c++=g++
  [ -e "$cross/release" ] && return

  # The lists of a new machine may lack the security archive, where the newest is.
  apt-get update -qq >&2
  local release library backend fetched program
  release=$(apt-cache madison rustc-web | awk 'NR == 1 { print $3 }')
  library=$(requirement libstd-rust-web-dev libstd-rust-web-)
  backend=$(requirement "$library" libllvm)
  note "unpacking rustc-web $release into $cross"
  # A plain library, in nobody's way; installed, because it wants further ones.
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$backend" > /dev/null
  rm -rf "$cross"
  mkdir -p "$cross/bin"
  fetched=$(mktemp -d)
  # _apt may not enter a folder made by root, and root needs no sandbox.
  (cd "$fetched" && apt-get -qq -o APT::Sandbox::User=root download \
    {rustc-web,libstd-rust-web-dev,"$library",rust-web-clippy,rust-web-src}="$release" >&2)
  for archive in "$fetched"/*.deb; do
    # Of the source, only the standard library's is wanted.
    case $(basename "$archive") in
      rust-web-src_*) unpack "$archive" --wildcards './usr/src/*/library' ;;
      *) unpack "$archive" ;;
    esac
  done
  rm -rf "$fetched"

  # Nothing tells the programs where their own shared libraries are.
  for program in rustc rustdoc cargo-clippy clippy-driver; do
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$cross/usr/lib/x86_64-linux-gnu" "$cross/usr/bin/$program" > "$cross/bin/$program"
    chmod +x "$cross/bin/$program"
  done
  "$RUSTC" --version >&2
  echo "$release" > "$cross/release"
}

# The standard library for 64-bit Arm Linux, of exactly the compiler's release.
arm_library() {
  [ -d "$sysroot/aarch64-unknown-linux-gnu" ] && return
  # Package lists of its own, so that the machine does not come to know a second architecture.
  local lists
  lists=$(mktemp -d)
  mkdir -p "$lists"/{state/partial,cache/archives/partial}
  printf '%s\n' 'APT::Architecture "arm64";' 'APT::Architectures { "arm64"; };' 'APT::Sandbox::User "root";' 'Acquire::Languages "none";' \
    "Dir::State::Lists \"$lists/state\";" "Dir::Cache \"$lists/cache\";" > "$lists/apt.conf"
  note "fetching the standard library for Arm"
  (
    cd "$lists"
    export APT_CONFIG=$lists/apt.conf
    apt-get -qq update >&2
    apt-get -qq download "libstd-rust-web-dev:arm64=$(cat "$cross/release")" >&2
  )
  unpack "$lists"/libstd-rust-web-dev_*_arm64.deb
  rm -rf "$lists"
}

# All that builds programs for 64-bit Arm Linux and runs them under QEMU, in the project's folder: root on Debian 12. Sets
# `arm_emulator`; ARM_CPU names the processor.
arm_programs() {
  second_compiler
  arm_library
  packages qemu-aarch64-static=qemu-user-static aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu \
    /usr/aarch64-linux-gnu/lib/libc.so=libc6-dev-arm64-cross
  cd "$root"
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/arm
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  arm_emulator="qemu-aarch64-static -cpu ${ARM_CPU:-max} -L /usr/aarch64-linux-gnu"
}

# The standard library for macOS, as far as a type check reads it: metadata, no code. It is checked from its source, once.
apple_library() { apple_source check rmeta "$sysroot/aarch64-apple-darwin/lib"; }

# The same with code, in a folder of its own that rustc takes as its --sysroot.
apple_sysroot=$cross/apple
apple_objects() { apple_source build rlib "$apple_sysroot/lib/rustlib/aarch64-apple-darwin/lib"; }

# apple_source VERB ENDING INTO: the standard library through `cargo VERB`, its files with that ending put into INTO.
apple_source() {
  local target=aarch64-apple-darwin verb=$1 ending=$2 into=$3 source shell
  [ -e "$into/.whole" ] && return
  note "cargo $verb of the standard library for $target, once (one to five minutes of one core)"
  source=$(echo "$cross"/usr/src/*/library)
  # The compiler looks for the source here when it prints a path into it.
  mkdir -p "$sysroot/src/rust"
  ln -sfn "$source" "$sysroot/src/rust/library"

  shell=$(mktemp -d)
  mkdir "$shell/src"
  # A package that only names the library: the library's own workspace wants more than the vendored sources.
  echo '#![feature(no_core)] #![no_core]' > "$shell/src/lib.rs"
  {
    printf '[package]\nname = "shell"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n'
    printf '[dependencies]\nsysroot = { path = "%s/sysroot", features = ["backtrace"] }\n[patch.crates-io]\n' "$source"
    for facade in core alloc std; do
      printf 'rustc-std-workspace-%s = { path = "%s/rustc-std-workspace-%s" }\n' $facade "$source" $facade
    done
  } > "$shell/Cargo.toml"
  cp "$source/Cargo.lock" "$shell"
  (
    cd "$shell"
    unset CARGO_BUILD_TARGET RUSTC_WRAPPER
    export RUSTC_BOOTSTRAP=1 __CARGO_DEFAULT_LIB_METADATA=fornax CARGO_TARGET_DIR=$shell/target
    # It is a shared library too, which nobody takes.
    export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=$scripts/stand-in/cc CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_STRIP=false
    RUSTFLAGS='-Z force-unstable-if-unmarked --cap-lints allow' cargo "$verb" --quiet --offline --target $target \
      --config 'source.crates-io.replace-with = "vendored"' --config "source.vendored.directory = '$source/vendor'"
  )
  rm -rf "$into"
  mkdir -p "$into"
  find "$shell/target/$target/debug/deps" -name "*.$ending" ! -name 'libshell-*' ! -name 'libsysroot-*' -exec cp -t "$into" {} +
  rm -rf "$shell"
  touch "$into/.whole"
}
