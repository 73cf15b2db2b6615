#!/usr/bin/env bash
# usage: scripts/test-arm.sh [CARGO TEST ARGUMENT...]    (default: the unit tests of the crates that hold Arm code and of
# those they stand on, the conformance cases on every tier among them; the rest of the tests say nothing about instructions
# and take too long in an emulator)
# Builds tests for 64-bit Arm Linux and runs them under QEMU, as root on Debian 12. ARM_CPU names the processor: "max" has
# dotprod, i8mm, bf16 and fp16; "cortex-a72" has none of them and so tests the way down.
source "$(dirname "${BASH_SOURCE[0]}")/cross.sh"

arm_programs
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$arm_emulator
# The cases once more with other numbers of threads and other blocks are the same instructions.
[ $# = 0 ] && set -- -p fornax-gguf -p fornax-plan -p fornax-cpu --lib -- --skip every_case_on_one_and --skip every_case_with_longer
exec cargo test --target aarch64-unknown-linux-gnu "$@"
