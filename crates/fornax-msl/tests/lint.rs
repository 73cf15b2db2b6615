//! The lint: the kernels here pass it, and what a C++ compiler lets through does not. It needs clang 19, so
//! scripts/lint-metal.sh runs it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fornax_msl::{CompileOptions, Library, lint};

const HEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

fn linted(body: &str) -> Result<(), String> {
    let parts = [("head.metal", HEAD), ("body.metal", body)];
    lint(&parts, &CompileOptions::default()).map_err(|e| {
        assert!(e.is_compile(), "{e}");
        e.to_string()
    })
}

#[test]
fn sound_kernels_pass() {
    for (name, text) in [
        ("norm.metal", include_str!("it/kernels/norm.metal")),
        ("matvec.metal", include_str!("it/kernels/matvec.metal")),
        ("matmul.metal", include_str!("it/kernels/matmul.metal")),
        ("histogram.metal", include_str!("it/kernels/histogram.metal")),
        ("exchange.metal", include_str!("it/kernels/exchange.metal")),
        ("language.metal", include_str!("it/kernels/language.metal")),
        ("faults.metal", include_str!("it/kernels/faults.metal")),
    ] {
        lint(&[(name, text)], &CompileOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn what_mixes_address_spaces_or_types_does_not() {
    let helpers = "inline float first(device const float *p) { return p[0]; }\n\
        inline float whole(float4 v) { return v.x; }\n\
        inline void set(threadgroup float *p) { *p = 1.0f; }\n";
    let arguments = "device float *y [[buffer(0)]], constant float4 &c [[buffer(1)]], \
        device const half4 *h [[buffer(2)]], threadgroup float *part [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]";
    let kernel = |body: &str| format!("{helpers}kernel void k({arguments}) {{\n{body}\n}}\n");
    linted(&kernel(
        "part[t] = first(y) + whole(c); set(part + t); y[t] = float4(h[t]).x + part[t];",
    ))
    .expect("a sound kernel");
    // Each body with whether g++ accepts it: those are what the lint is for.
    for (body, slips) in [
        ("y[t] = first(part);", true),
        ("set(y + t);", true),
        ("threadgroup float *p = y; *p = 1.0f;", true),
        ("device float *p = part; *p = 1.0f;", true),
        ("thread float *p = y + t; *p = 1.0f;", true),
        ("c.x = 1.0f;", true),
        ("constant float *p = (constant float *)&c; *p = 1.0f;", true),
        ("half4 v = c; y[t] = v.x;", false),
        ("y[t] = whole(float3(1, 2, 3));", false),
        ("y[t] = whole(h[t]);", false),
        ("float4 v = float4(1, 2, 3); y[t] = v.x;", false),
        ("y[t] = nothing(1.0f);", false),
        ("y[t] = simd_sum(t == 0);", false),
        ("bfloat b = y[t]; y[t] = b;", false),
        ("if constexpr (sizeof(float) == 4) { y[t] = 1.0f; }", true),
        ("y[t] = simd_shuffle(bfloat(1.0f), 1);", false),
        ("simdgroup_float8x8 m; simdgroup_load(m, h); y[t] = 0;", false),
        ("float sum; if (t > 3) { sum = 0; } y[t] = sum;", true),
        ("h[t] = half4(0);", false),
    ] {
        let error = linted(&kernel(body)).expect_err(body);
        assert!(error.contains("body.metal:5:") || error.contains("(lint.h)"), "{body}: {error}");
        let text = kernel(body);
        let compiled = Library::compile(&[("head.metal", HEAD), ("body.metal", &text)]);
        assert_eq!(compiled.is_ok(), slips, "{body}: {compiled:?}");
    }
}
