//! What the host gives against what the kernel takes, and sources that do not compile.

use fornax_msl::{Buffer, CompileOptions, Dispatch, Error, Library, Options, Space, Value};

use crate::{compile, filled, floats, run};

const SOURCE: &str = r#"
#include <metal_stdlib>
using namespace metal;
struct Shape { uint rows; uint columns; float scale; };
constant bool biased [[function_constant(0)]];
constant int mode [[function_constant(3)]];
constant float gain [[function_constant(4)]];
constant float twice_gain = is_function_constant_defined(gain) ? 2.0 * gain : 1.0;
inline float tuned(float v) { return mode == 2 ? -v : v; }
kernel void full(device const float4 *x [[buffer(0)]], device half *y [[buffer(1)]],
                 constant Shape &shape [[buffer(2)]], constant ushort *table [[buffer(3)]],
                 device const float *bias [[buffer(4), function_constant(biased)]],
                 threadgroup float *part [[threadgroup(0)]],
                 uint t [[thread_index_in_threadgroup]]) {
    part[t] = biased ? bias[t] : 0.0f;
    y[t] = half(tuned(x[t].x) * shape.scale + part[t] + float(table[0])) * half(twice_gain);
}
kernel void plain(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) { y[t] = twice_gain; }
[[max_total_threads_per_threadgroup(64)]] kernel void small(device float *y [[buffer(0)]]) { y[0] = 1.0f; }
"#;

fn library() -> Library {
    compile("signature.metal", SOURCE)
}

fn buffer(label: &str, len: usize) -> Buffer {
    filled(label, &vec![0; len])
}

/// A dispatch of `full` with everything in place.
fn full(constants: &[(u32, Value)]) -> Dispatch {
    let pipeline = library().pipeline("full", constants).expect("a pipeline");
    Dispatch::new(&pipeline, [1, 1, 1], [32, 1, 1])
        .buffer(0, &buffer("x", 512))
        .buffer(1, &buffer("y", 64))
        .bytes(2, &[0; 12])
        .bytes(3, &[0; 2])
        .threadgroup(0, 128)
}

const UNBIASED: [(u32, Value); 2] = [(0, Value::Bool(false)), (3, Value::Int(1))];

/// Expects a refusal that says `words`.
fn refused(dispatch: Dispatch, words: &str) {
    let error = run(dispatch, Options::default()).expect_err(words);
    assert!(error.is_arguments(), "{error}");
    assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
}

fn without(mut dispatch: Dispatch, index: u32) -> Dispatch {
    dispatch.bound.retain(|(i, _)| *i != index);
    dispatch
}

#[test]
fn kernels_say_what_they_take() {
    let library = library();
    let names: Vec<&str> = library.kernels().iter().map(|k| k.name.as_str()).collect();
    assert_eq!(names, ["full", "plain", "small"]);
    let k = &library.kernels()[0];
    let got: Vec<_> = k
        .arguments
        .iter()
        .map(|a| {
            (a.name.as_str(), a.index, a.space, a.read_only, a.reference, a.size, a.align, a.needs)
        })
        .collect();
    let want = [
        ("x", 0, Space::Device, true, false, 16, 16, None),
        ("y", 1, Space::Device, false, false, 2, 2, None),
        ("shape", 2, Space::Constant, true, true, 12, 4, None),
        ("table", 3, Space::Constant, true, false, 2, 2, None),
        ("bias", 4, Space::Device, true, false, 4, 4, Some(0)),
        ("part", 0, Space::Threadgroup, false, false, 4, 4, None),
    ];
    assert_eq!(got, want);
    assert_eq!(k.arguments[0].type_text, "const float4 *");
    let constants: Vec<_> =
        k.constants.iter().map(|c| (c.name.as_str(), c.index, c.required)).collect();
    assert_eq!(constants, [("biased", 0, true), ("mode", 3, true), ("gain", 4, false)]);
    let plain: Vec<&str> = library.kernels()[1].constants.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(plain, ["gain"]);
    assert_eq!((k.max_threads, library.kernels()[2].max_threads), (1024, 64));
}

#[test]
fn what_fits_runs_and_function_constants_count() {
    run(full(&UNBIASED), Options::default()).expect("everything in place");
    let biased = [(0, Value::Bool(true)), (3, Value::Int(2))];
    run(full(&biased).buffer(4, &buffer("bias", 128)), Options::default()).expect("with bias");
    refused(full(&biased), "argument 'bias' (const float *) at index 4 is not bound");

    let y = buffer("y", 128);
    for (constants, want) in [(vec![], 1.0f32), (vec![(4, Value::Float(1.5))], 3.0), (vec![], 1.0)]
    {
        let pipeline = library().pipeline("plain", &constants).expect("a pipeline");
        let d = Dispatch::new(&pipeline, [1, 1, 1], [32, 1, 1]).buffer(0, &y);
        run(d, Options::default()).expect("sound");
        let mut bytes = [0; 4];
        y.read(0, &mut bytes).expect("a range inside");
        assert_eq!(f32::from_ne_bytes(bytes), want);
    }
}

#[test]
fn pipelines_that_cannot_be() {
    let library = library();
    let refused = |name: &str, constants: &[(u32, Value)], words: &str| {
        let error = library.pipeline(name, constants).expect_err(words);
        assert!(error.is_arguments() && error.to_string().contains(words), "{error}");
    };
    refused("fulll", &[], "no function 'fulll'");
    refused("full", &[(0, Value::Bool(true))], "constant 3 ('mode') is not set");
    refused("full", &[(0, Value::Uint(1)), (3, Value::Int(1))], "constant 0 is of another type");
    refused("full", &[(9, Value::Bool(true))], "no function constant 9");
}

#[test]
fn arguments_that_do_not_fit() {
    let d = || full(&UNBIASED);
    refused(without(d(), 1), "argument 'y' (half *) at index 1 is not bound");
    refused(d().buffer(5, &buffer("z", 4)), "buffer index 5, where the kernel has no argument");
    refused(d().buffer(4, &buffer("bias", 128)), "buffer index 4");
    refused(d().buffer(0, &buffer("x", 512)), "bound twice");
    refused(without(d(), 1).bytes(1, &[0; 64]), "is written, so it cannot be bytes");
    refused(without(d(), 2).bytes(2, &[0; 8]), "needs 12 bytes for its Shape &, and 8 are bound");
    refused(without(d(), 3).bytes(3, &[0; 4098]), "the limit is 4096");
    let x = buffer("x", 1024);
    refused(without(d(), 0).range(0, &x, 8, 512), "offset 8 in buffer 'x' is not a multiple of 16");
    refused(
        without(d(), 0).range(0, &x, 512, 528),
        "528 bytes at 512 of buffer 'x', which has 1024",
    );
    let both = without(without(d(), 0), 1).range(0, &x, 0, 512).range(1, &x, 496, 64);
    refused(both, "arguments 0 and 1 overlap in buffer 'x'");
    let owner: fornax_msl::Owner = std::sync::Arc::new(vec![0u8; 64]);
    let wrapped = Buffer::wrap("weights", &owner).expect("memory");
    refused(without(d(), 1).buffer(1, &wrapped), "buffer 'weights' is read-only");
    assert!(wrapped.write(0, &[1]).expect_err("read-only").is_arguments());
    assert!(x.write(1020, &floats(&[1.0, 2.0])).expect_err("too long").is_arguments());
}

#[test]
fn sizes_that_do_not_fit() {
    let mut d = full(&UNBIASED);
    d.threadgroup_memory.clear();
    refused(d.clone(), "threadgroup argument 'part' at index 0 has no length");
    refused(d.clone().threadgroup(0, 100), "a multiple of 16");
    refused(
        d.clone().threadgroup(0, 128).threadgroup(1, 16),
        "index 1, where the kernel takes none",
    );
    refused(d.clone().threadgroup(0, (32 << 10) + 16), "the limit is 32768");
    let sized = |grid: [u32; 3], threads: [u32; 3]| Dispatch { grid, threads, ..full(&UNBIASED) };
    refused(sized([1, 0, 1], [32, 1, 1]), "has an empty axis");
    refused(sized([1, 1, 1], [32, 33, 1]), "1056 threads in a threadgroup");
    let small = library().pipeline("small", &[]).expect("a pipeline");
    refused(
        Dispatch::new(&small, [1, 1, 1], [65, 1, 1]).buffer(0, &buffer("y", 4)),
        "the kernel takes 64 at most",
    );
}

/// Expects that a source, after a first part of three lines, is refused with `words`.
fn fails(text: &str, words: &str) -> Error {
    let head = "#include <metal_stdlib>\nusing namespace metal;\n";
    let error = Library::compile(&[("head.metal", head), ("body.metal", text)]).expect_err(words);
    assert!(error.is_compile(), "{error}");
    assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
    error
}

#[test]
fn sources_that_do_not_compile() {
    let kernel =
        |parameters: &str, body: &str| format!("\nkernel void k({parameters}) {{\n{body}\n}}");
    let y = "device float *y [[buffer(0)]], uint t [[thread_position_in_grid]]";
    fails(&kernel(y, "y[t] = nothing;"), "body.metal:3:8: error");
    fails("kernel void k(device float *y [[buffer(0)]] {", "body.metal:1: this bracket has no end");
    fails("#error no\n", "body.metal:1:2: error");
    fails(&kernel(y, "double d = 1.0; y[t] = d;"), "body.metal:3: 'double' is not in the language");
    fails(&kernel(y, "bfloat b = 1.0f; y[t] = b;"), "body.metal:3:");
    fails(&kernel(y, "y[t] = simd_shuffle(t == 0, 1);"), "body.metal:3:");
    fails(&kernel(y, "y[t] = simd_sum(bfloat(1.0f));"), "simdgroup functions take numbers");
    fails(
        &kernel(y, "threadgroup float a = 1.0f;"),
        "body.metal:3: a threadgroup variable has no initial value",
    );
    fails(&kernel(y, "half4 h = float4(1.0f); y[t] = h.x;"), "body.metal:3:");
    fails(
        &kernel(y, "uint u = as_type<uint>(half(1)); y[t] = u;"),
        "as_type needs two types of one size",
    );
    fails(
        &kernel(y, "static float s; y[t] = s;"),
        "body.metal:3: a function has no static variables",
    );
    fails(
        "float f(float *p) { return *p; }",
        "body.metal:1: parameter 'float *p' is a pointer or reference without",
    );
    fails(
        "void f() {\n\nthreadgroup float a[4];\n}",
        "body.metal:3: threadgroup variables are declared in kernels only",
    );
    fails(
        &kernel("device float *y [[buffer(0)]], uint t", "y[t] = 1;"),
        "parameter 't' of kernel k",
    );
    fails(
        &kernel("uint2 t [[thread_index_in_simdgroup]]", ""),
        "'t' is uint2 and has one component",
    );
    fails(
        &kernel("int t [[thread_position_in_grid]]", ""),
        "'t' is int and has to be uint or ushort",
    );
    fails(
        &kernel(
            "uint2 t [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]",
            "",
        ),
        "a position and its size are of one type",
    );
    fails(&kernel("device float *y [[buffer(31)]]", "y[0] = 1;"), "at index 31");
    fails(
        &kernel("device float *y [[buffer(1)]], device float *z [[buffer(1)]]", ""),
        "two arguments at 1",
    );
    fails(&(kernel(y, "") + &kernel(y, "")), "two kernels with the name 'k'");
    fails(
        "template [[host_name(\"a\")]] kernel void k<float>(device float *);",
        "no kernel template 'k'",
    );
}

#[test]
fn definitions_reach_the_source() {
    let text = "#include <metal_stdlib>\nusing namespace metal;\n#if WIDE != 4\n#error\n#endif\n\
        kernel void k(device float *y [[buffer(0)]]) { y[0] = WIDE; }";
    let options =
        CompileOptions { defines: vec![("WIDE".into(), "4".into())], ..Default::default() };
    let library = Library::compile_with(&[("k.metal", text)], &options).expect("a sound source");
    assert_eq!(library.kernels().len(), 1);
    assert!(Library::compile(&[("k.metal", text)]).is_err());
}
