//! The language: vectors, scalars, simdgroup functions, matrices, atomics, positions; each against what the specification says.

use fornax_msl::{Buffer, CompileOptions, Dispatch, Library, Options};

use crate::{compile, filled, floats, orders, read_floats, read_words, run, words};

const SOURCE: &str = include_str!("kernels/language.metal");

fn outputs(name: &str, threads: u32, values: usize) -> Vec<f32> {
    let pipeline = compile("language.metal", SOURCE).pipeline(name, &[]).expect("a pipeline");
    let out = Buffer::new("out", values * 4).expect("memory");
    let d = Dispatch::new(&pipeline, [1, 1, 1], [threads, 1, 1]).buffer(0, &out);
    run(d, Options::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(out.first_unwritten(0, 4), None);
    let written = (0..values).take_while(|i| out.first_unwritten(4 * i, 4).is_none()).count();
    read_floats(&out)[..written].to_vec()
}

fn same(got: &[f32], want: &[f32]) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits(), "value {i} is {g} and should be {w}");
    }
    assert_eq!(got.len(), want.len(), "the values are {got:?}");
}

#[test]
fn vectors() {
    let want = [
        3.0, 4.0, 23.0, 14.0, 14.0, 4.0, 3.0, 10.0, 12.5, 21.0, -2.0, 1.0, 0.0, 376.0, 257.0, -1.0,
        -128.0, 3.0, 2.0, 2.0, 8.0, 14.0, 2.0, 2.0, 3.0, 23.0, 6.0, 16.0, 12.0, 8.0, 32.0, 3.0,
        -3.0, -4.0, 9.0, 1.5, 3.0,
    ];
    same(&outputs("vectors", 1, 64), &want);
}

#[test]
fn scalars() {
    let inf = f32::INFINITY;
    let want = [
        inf,
        2048.0,
        1.0 / 3.0,
        1.0,
        9.0,
        0.427_734_38,
        2.0,
        3.0,
        -2.0,
        0.25,
        8.0,
        8.0,
        std::f32::consts::SQRT_2,
        0.5,
        3.0,
        2.0,
        1.0,
        -1.0,
        3.0,
        1.5,
        0.0,
        -1.0,
        1.0,
        7.0,
        -2.0,
        12.0,
        8.0,
        31.0,
        3.0,
        15.0,
        1.0,
        188.0,
        -1.0,
        80.0,
        2.0,
        3.0,
        5.0,
        1.0,
        1.0,
        1.0,
        65504.0,
        32767.0,
        inf,
        1.0,
        1.0,
        8.0,
        5.5,
        7.0,
        1.5,
        10.0,
        8.0,
        0.75,
        3.0,
        1.0,
        0.125,
        100.0,
        1.0,
        1.0,
        0.0,
        1.0,
    ];
    same(&outputs("scalars", 1, 96), &want);
}

#[test]
fn each_half_operation_rounds() {
    let pipeline = compile("language.metal", SOURCE).pipeline("halves", &[]).expect("a pipeline");
    let out = Buffer::new("out", 24).expect("memory");
    // 2048, 1 and 2^-11 in half precision.
    let values: Vec<u8> =
        [0x6800u16, 0x3c00, 0x1000].iter().flat_map(|v| v.to_ne_bytes()).collect();
    let d = Dispatch::new(&pipeline, [1, 1, 1], [1, 1, 1]).buffer(0, &out).bytes(1, &values);
    run(d, Options::default()).expect("sound");
    let inf = f32::INFINITY;
    assert_eq!(read_floats(&out), [2048.0, inf, 2048.0, 2048.0, 2.0, 2049.0]);
}

#[test]
fn simdgroup_functions() {
    let got = outputs("simd", 64, 64 * 32 - 6);
    // The lanes' values are apart, so the first one's stop at its own.
    assert_eq!(got.len(), 26);
    let pipeline = compile("language.metal", SOURCE).pipeline("simd", &[]).expect("a pipeline");
    for options in orders() {
        let out = Buffer::new("out", 64 * 128).expect("memory");
        let d = Dispatch::new(&pipeline, [1, 1, 1], [64, 1, 1]).buffer(0, &out);
        run(d, options).expect("sound");
        for (t, got) in read_floats(&out).chunks(32).enumerate() {
            let (lane, base) = (t % 32, t / 32 * 32);
            let n = |v: usize| v as f32;
            let within = |from: i64| {
                if (0..32).contains(&from) { n(base + from as usize) } else { n(t) }
            };
            let want = [
                496.0,
                2.0,
                n(base + 31) - 40.0,
                -4.0,
                32.0,
                32.0,
                31.0,
                0.0,
                n(base + 5),
                n(base),
                n(base + 31 - lane),
                n(t ^ 1),
                within(lane as i64 + 2),
                within(lane as i64 - 2),
                n(base + (lane + 2) % 32),
                n(lane),
                n(lane * (lane + 1) / 2),
                1.0,
                0.0,
                1.0,
                0.0,
                8.0,
                32.0,
                if lane == 0 { 1.0 } else { 0.0 },
                if lane < 30 { n(t + 2) } else { 1000.0 },
                if lane > 0 { 3.0 } else { 1.0 },
            ];
            same(&got[..want.len()], &want);
        }
    }
}

#[test]
fn positions_in_three_dimensions() {
    let pipeline =
        compile("language.metal", SOURCE).pipeline("positions", &[]).expect("a pipeline");
    let (groups, size) = ([3u32, 1, 2], [4u32, 6, 2]);
    let whole: Vec<u32> = groups.iter().zip(size).map(|(g, s)| g * s).collect();
    let count = whole.iter().product::<u32>() as usize;
    for options in orders() {
        let out = Buffer::new("out", count * 16).expect("memory");
        run(Dispatch::new(&pipeline, groups, size).buffer(0, &out), options).expect("sound");
        let pack = |v: [u32; 3]| v[0] | v[1] << 8 | v[2] << 16;
        for (i, got) in read_words(&out).chunks(4).enumerate() {
            let i = i as u32;
            let at = [i % whole[0], i / whole[0] % whole[1], i / whole[0] / whole[1]];
            let group = [at[0] / size[0], at[1] / size[1], at[2] / size[2]];
            let local = [at[0] % size[0], at[1] % size[1], at[2] % size[2]];
            let index = (local[2] * size[1] + local[1]) * size[0] + local[0];
            let last = index | (index / 32) << 8 | 2 << 16 | 1 << 24;
            assert_eq!(got, [pack(at), pack(group), pack(local), last]);
        }
    }
}

#[test]
fn matrices_of_each_type() {
    let library = compile("language.metal", SOURCE);
    // Element (row, column) of the source is row + 16 * column, exact in bfloat's eight bits up to 256.
    let value = |row: usize, column: usize| (row + 8 * (column % 8)) as f32;
    let source: Vec<f32> = (0..16 * 16).map(|i| value(i / 16, i % 16)).collect();
    let half = |v: f32| {
        let u = v.to_bits();
        if v == 0.0 { 0 } else { ((((u >> 23) - 112) << 10) | (u >> 13 & 1023)) as u16 }
    };
    let bytes = |name: &str| match name {
        "matrices_f32" => floats(&source),
        "matrices_f16" => source.iter().flat_map(|&v| half(v).to_ne_bytes()).collect(),
        _ => source.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_ne_bytes()).collect(),
    };
    for name in ["matrices_f32", "matrices_f16", "matrices_bf16"] {
        let pipeline = library.pipeline(name, &[]).expect("a pipeline");
        let size = if name == "matrices_f32" { 4 } else { 2 };
        let b = Buffer::new("b", 64 * size).expect("memory");
        let elements = Buffer::new("elements", 64 * 4).expect("memory");
        let d = Dispatch::new(&pipeline, [1, 1, 1], [32, 1, 1])
            .buffer(0, &filled("a", &bytes(name)))
            .buffer(1, &b)
            .buffer(2, &elements);
        run(d, Options::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Transposed, from column 8 and row 1 on: result (r, c) is source (1 + c, 8 + r).
        let want = |r: usize, c: usize| value(1 + c, 8 + r);
        let mut got = vec![0; 64 * size];
        b.read(0, &mut got).expect("a range inside");
        let want_bytes: Vec<u8> = (0..64)
            .map(|i| want(i / 8, i % 8))
            .flat_map(|v| match name {
                "matrices_f32" => v.to_ne_bytes().to_vec(),
                "matrices_f16" => half(v).to_ne_bytes().to_vec(),
                _ => ((v.to_bits() >> 16) as u16).to_ne_bytes().to_vec(),
            })
            .collect();
        assert_eq!(got, want_bytes, "{name}");
        for (i, got) in read_floats(&elements).into_iter().enumerate() {
            let lane = i / 2;
            let (r, c) =
                (((lane / 4) & 4) + lane / 2 % 4, ((lane / 4) & 2) * 2 + lane % 2 * 2 + i % 2);
            assert_eq!(got, want(r, c), "{name}, lane {lane}");
        }
    }
}

#[test]
fn atomics() {
    let pipeline = compile("language.metal", SOURCE).pipeline("atomics", &[]).expect("a pipeline");
    for options in orders() {
        let n = filled("n", &words(&[7, 100, 0, 0, 0, 15, 0]));
        let out = Buffer::new("out", 64 * 4).expect("memory");
        let d = Dispatch::new(&pipeline, [2, 1, 1], [32, 1, 1]).buffer(0, &n).buffer(1, &out);
        run(d, options).expect("sound");
        let got = read_words(&n);
        assert_eq!(got[..6], [7 + 128, 36, 5u32.wrapping_neg(), 0xffff, 0, 0]);
        assert!(got[6] < 64);
        assert_eq!(read_words(&out), [1; 64]);
    }
}

#[test]
fn without_checks_the_results_are_the_same() {
    let options = CompileOptions { unchecked: true, ..Default::default() };
    let library =
        Library::compile_with(&[("language.metal", SOURCE)], &options).expect("a sound source");
    let pipeline = library.pipeline("scalars", &[]).expect("a pipeline");
    let out = Buffer::new("out", 96 * 4).expect("memory");
    let d = Dispatch::new(&pipeline, [1, 1, 1], [1, 1, 1]).buffer(0, &out);
    let report = run(d, Options::default()).expect("sound");
    assert_eq!(report.bytes_written(), 0, "nothing is counted");
    let checked = outputs("scalars", 1, 96);
    same(&read_floats(&out)[..checked.len()], &checked);
}
