//! Every family of kernels, as the host joins it, passes the strict lint: address spaces, conversions between vectors, and a
//! language no newer than C++14. It needs clang 19, so scripts/lint-metal.sh runs it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fornax_metal::MetalDevice;
use fornax_msl::{CompileOptions, lint};

#[test]
fn every_family_passes_the_strict_lint() {
    let mut families = 0;
    for (name, source) in MetalDevice::sources() {
        lint(&[(name, &source)], &CompileOptions::default())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        families += 1;
    }
    assert!(families > 5, "{families} families");
}

/// What the lint is for, in the last lines of a family.
#[test]
fn a_family_with_mixed_address_spaces_does_not() {
    let (name, source) = MetalDevice::sources().next().unwrap();
    let wrong = "inline device float *moved(threadgroup float *p) { return (device float *)p; }\n";
    let error = lint(&[(name, &(source + wrong))], &CompileOptions::default()).unwrap_err();
    assert!(error.is_compile(), "{error}");
}
