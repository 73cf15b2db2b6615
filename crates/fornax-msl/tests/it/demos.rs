//! The demo kernels: each against plain loops, in every order, and with each of its barriers removed.

use fornax_msl::{Buffer, Dispatch, FaultKind, Library, Options, Pipeline, Report, Value};

use crate::{compile, filled, floats, noise, orders, read_floats, read_words, run, words};

type Check = Box<dyn Fn(&[Buffer]) -> Result<(), String>>;

/// A kernel with inputs, and the largest error of its result that is right.
struct Demo {
    library: Library,
    dispatch: Dispatch,
    outputs: Vec<Buffer>,
    check: Check,
}

impl Demo {
    fn report(&self, options: Options) -> Result<Report, String> {
        // Atomics add to what is there.
        for b in &self.outputs {
            b.write(0, &vec![0; b.len()]).expect("a range inside");
        }
        run(self.dispatch.clone(), options).map_err(|e| e.to_string())
    }

    fn run(&self, options: Options) -> Result<(), String> {
        self.report(options)?;
        (self.check)(&self.outputs)
    }
}

fn close(got: &[f32], want: &[f64], bound: f64) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    let norm = (want.iter().map(|v| v * v).sum::<f64>() / want.len() as f64).sqrt();
    let bad = got.iter().zip(want).position(|(g, w)| {
        let e = (f64::from(*g) - w).abs();
        e.is_nan() || e > bound * norm.max(1e-9)
    });
    bad.map_or(Ok(()), |i| Err(format!("value {i} is {} and should be {}", got[i], want[i])))
}

fn halves(values: &[f32]) -> (Vec<u8>, Vec<f64>) {
    // Multiples of 1/1024 in [-1, 1] are exact in half precision.
    let exact: Vec<f32> = values.iter().map(|v| (v * 1024.0).round() / 1024.0).collect();
    let bits = |v: f32| {
        if v == 0.0 {
            return 0u16;
        }
        let u = v.to_bits();
        (((u >> 16) & 0x8000) | ((((u >> 23) & 255) - 112) << 10) | ((u >> 13) & 1023)) as u16
    };
    let bytes = exact.iter().flat_map(|&v| bits(v).to_ne_bytes()).collect();
    (bytes, exact.into_iter().map(f64::from).collect())
}

fn half_value(bits: u16) -> f32 {
    let (sign, exponent) = (if bits >> 15 == 1 { -1.0 } else { 1.0 }, i32::from(bits >> 10 & 31));
    let mantissa = f32::from(bits & 1023) / 1024.0;
    let whole = if exponent == 0 { mantissa * 2.0 } else { mantissa + 1.0 };
    sign * whole * 2f32.powi(exponent - 15)
}

fn norm_shape(columns: u32, eps: f32) -> Vec<u8> {
    [columns.to_ne_bytes(), eps.to_ne_bytes()].concat()
}

fn norm(weighted: bool, wide: bool) -> Demo {
    let (rows, columns, eps) = (3usize, 333usize, 1e-5f64);
    let library = compile("norm.metal", include_str!("kernels/norm.metal"));
    let (x, w) = (noise(1, rows * columns), noise(2, columns));
    let mut constants = vec![(0, Value::Bool(weighted))];
    if wide {
        constants.push((1, Value::Uint(3)));
    }
    let pipeline = library.pipeline("rms_norm_f32", &constants).expect("a pipeline");
    let y = Buffer::new("y", rows * columns * 4).expect("memory");
    let mut dispatch = Dispatch::new(&pipeline, [rows as u32, 1, 1], [96, 1, 1])
        .buffer(0, &filled("x", &floats(&x)))
        .buffer(2, &y)
        .bytes(3, &norm_shape(columns as u32, eps as f32));
    if weighted {
        dispatch = dispatch.buffer(1, &filled("w", &floats(&w)));
    }
    let mut want = Vec::new();
    for row in x.chunks(columns) {
        let sum: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let r = 1.0 / (sum / columns as f64 + eps).sqrt();
        want.extend(
            row.iter()
                .zip(&w)
                .map(|(&v, &w)| f64::from(v) * r * if weighted { f64::from(w) } else { 1.0 }),
        );
    }
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-5));
    Demo { library, dispatch, outputs: vec![y], check }
}

fn matvec_q8() -> Demo {
    let (rows, columns) = (37usize, 256usize);
    let library = compile("matvec.metal", include_str!("kernels/matvec.metal"));
    let x = noise(3, columns);
    let (scales, scale_values) = halves(&noise(4, rows * columns / 32));
    let quants: Vec<i8> = noise(5, rows * columns).iter().map(|v| (v * 127.0) as i8).collect();
    let mut blocks = Vec::new();
    for (b, q) in quants.chunks(32).enumerate() {
        blocks.extend(&scales[2 * b..2 * b + 2]);
        blocks.extend(q.iter().map(|&q| q as u8));
    }
    let pipeline = library.pipeline("matvec_q8", &[]).expect("a pipeline");
    let y = Buffer::new("y", rows * 4).expect("memory");
    let dispatch = Dispatch::new(&pipeline, [10, 1, 1], [128, 1, 1])
        .buffer(0, &filled("a", &blocks))
        .buffer(1, &filled("x", &floats(&x)))
        .buffer(2, &y)
        .bytes(3, &words(&[rows as u32, columns as u32]));
    let want: Vec<f64> = (0..rows)
        .map(|r| {
            let at = |c: usize| {
                let i = r * columns + c;
                scale_values[i / 32] * f64::from(quants[i]) * f64::from(x[c])
            };
            (0..columns).map(at).sum()
        })
        .collect();
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-5));
    Demo { library, dispatch, outputs: vec![y], check }
}

fn matvec_split() -> Demo {
    let (rows, columns) = (5usize, 300usize);
    let library = compile("matvec.metal", include_str!("kernels/matvec.metal"));
    let ((a, av), (x, xv)) = (halves(&noise(6, rows * columns)), halves(&noise(7, columns)));
    let pipeline = library.pipeline("matvec_split", &[]).expect("a pipeline");
    let y = Buffer::new("y", rows * 4).expect("memory");
    let dispatch = Dispatch::new(&pipeline, [rows as u32, 1, 1], [128, 1, 1])
        .buffer(0, &filled("a", &a))
        .buffer(1, &filled("x", &x))
        .buffer(2, &y)
        .bytes(3, &words(&[columns as u32]))
        .threadgroup(0, 512);
    let want: Vec<f64> =
        av.chunks(columns).map(|row| row.iter().zip(&xv).map(|(a, x)| a * x).sum()).collect();
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-5));
    Demo { library, dispatch, outputs: vec![y], check }
}

fn matmul(half: bool) -> Demo {
    let (m, n, k) = (32usize, 64usize, 24usize);
    let library = compile("matmul.metal", include_str!("kernels/matmul.metal"));
    let (a, b) = (noise(8, m * k), noise(9, k * n));
    let ((ha, av), (hb, bv)) = (halves(&a), halves(&b));
    let name = if half { "matmul_f16" } else { "matmul_f32" };
    let pipeline = library.pipeline(name, &[]).expect("a pipeline");
    let exact = |v: &[f64]| floats(&v.iter().map(|&v| v as f32).collect::<Vec<f32>>());
    let (a, b) = if half { (ha, hb) } else { (exact(&av), exact(&bv)) };
    let c = Buffer::new("c", m * n * 4).expect("memory");
    let dispatch = Dispatch::new(&pipeline, [n as u32 / 32, m as u32 / 32, 1], [128, 1, 1])
        .buffer(0, &filled("a", &a))
        .buffer(1, &filled("b", &b))
        .buffer(2, &c)
        .bytes(3, &words(&[m as u32, n as u32, k as u32, 0]))
        .threadgroup(0, if half { 512 } else { 1024 });
    let mut want = vec![0.0; m * n];
    for (i, w) in want.iter_mut().enumerate() {
        *w = (0..k).map(|l| av[i / n * k + l] * bv[l * n + i % n]).sum();
    }
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-5));
    Demo { library, dispatch, outputs: vec![c], check }
}

fn histogram() -> Demo {
    let library = compile("histogram.metal", include_str!("kernels/histogram.metal"));
    let values: Vec<u32> = noise(10, 200).iter().map(|v| ((v + 1.0) * 500.0) as u32).collect();
    let pipeline = library.pipeline("histogram", &[]).expect("a pipeline");
    let outputs: Vec<Buffer> = [("bins", 64), ("total", 4), ("largest", 4)]
        .iter()
        .map(|&(label, len)| Buffer::new(label, len).expect("memory"))
        .collect();
    let dispatch = Dispatch::new(&pipeline, [4, 1, 1], [64, 1, 1])
        .buffer(0, &filled("values", &words(&values)))
        .buffer(1, &outputs[0])
        .buffer(2, &outputs[1])
        .buffer(3, &outputs[2])
        .bytes(4, &words(&[values.len() as u32]));
    let mut bins = vec![0u32; 16];
    values.iter().for_each(|v| bins[*v as usize & 15] += 1);
    let (total, largest) = (values.iter().sum::<u32>(), values.iter().max().copied());
    let check = Box::new(move |o: &[Buffer]| {
        let got = (read_words(&o[0]), read_floats(&o[1])[0], read_words(&o[2])[0]);
        let want = (bins.clone(), total as f32, largest.unwrap_or(0));
        if got == want { Ok(()) } else { Err(format!("{got:?}, not {want:?}")) }
    });
    Demo { library, dispatch, outputs, check }
}

fn reverse_rows() -> Demo {
    let library = compile("exchange.metal", include_str!("kernels/exchange.metal"));
    let x = noise(12, 256);
    let pipeline = library.pipeline("reverse_rows", &[]).expect("a pipeline");
    let y = Buffer::new("y", 1024).expect("memory");
    let dispatch = Dispatch::new(&pipeline, [2, 1, 1], [128, 1, 1])
        .buffer(0, &filled("x", &floats(&x)))
        .buffer(1, &y);
    let want: Vec<f64> = x.iter().map(|&v| 2.0 * f64::from(v)).collect();
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-6));
    Demo { library, dispatch, outputs: vec![y], check }
}

fn neighbours() -> Demo {
    let library = compile("exchange.metal", include_str!("kernels/exchange.metal"));
    let pipeline = library.pipeline("neighbours", &[]).expect("a pipeline");
    let (x, y) = (Buffer::new("x", 512).expect("memory"), Buffer::new("y", 512).expect("memory"));
    let dispatch = Dispatch::new(&pipeline, [2, 1, 1], [64, 1, 1]).buffer(0, &x).buffer(1, &y);
    let want: Vec<f64> =
        (0..128).map(|i| f64::from((i % 64) ^ 1) + f64::from((i % 64) ^ 32)).collect();
    let check = Box::new(move |o: &[Buffer]| close(&read_floats(&o[0]), &want, 1e-6));
    Demo { library, dispatch, outputs: vec![y], check }
}

fn demos() -> Vec<(&'static str, Demo)> {
    vec![
        ("norm", norm(true, false)),
        ("norm without weights, three columns a thread", norm(false, true)),
        ("matvec q8", matvec_q8()),
        ("matvec split", matvec_split()),
        ("matmul f32", matmul(false)),
        ("matmul f16", matmul(true)),
        ("histogram", histogram()),
        ("reverse rows", reverse_rows()),
        ("neighbours", neighbours()),
    ]
}

#[test]
fn demos_are_right_in_every_order() {
    for (name, demo) in demos() {
        for options in orders() {
            demo.run(options).unwrap_or_else(|e| panic!("{name}, {options:?}: {e}"));
        }
    }
}

#[test]
fn removing_any_barrier_shows() {
    let mut removed = 0;
    for (name, demo) in demos() {
        let report = demo.report(Options::default()).expect("a sound kernel");
        let reached = &report.dispatches[0].barriers;
        for (n, site) in demo.library.barriers().iter().enumerate() {
            if !reached.contains(&n) {
                continue;
            }
            removed += 1;
            for mut options in orders() {
                options.disabled_barrier = Some(demo.library.barrier_id(n));
                let seen = demo.run(options).is_err();
                assert!(seen, "{name}, {options:?}: nothing sees that {site:?} is gone");
            }
        }
    }
    assert!(removed >= 14, "only {removed} barriers were found");
}

#[test]
fn traffic_is_counted_by_argument() {
    let demo = matvec_q8();
    let report = run(demo.dispatch.clone(), Options::default()).expect("a sound kernel");
    let dispatch = &report.dispatches[0];
    let of = |index: u32| {
        dispatch.traffic.iter().find(|t| t.index == index).expect("an argument").clone()
    };
    let weights = of(0);
    assert_eq!(weights.label.as_deref(), Some("a"));
    assert_eq!(weights.bytes_read, 37 * 8 * 34, "each weight byte once");
    assert_eq!(weights.bytes_loaded, 37 * 8 * 34);
    let x = of(1);
    assert_eq!(x.bytes_read, 256 * 4);
    assert_eq!(x.bytes_loaded, 37 * 256 * 4, "each row loads the vector");
    let y = of(2);
    assert_eq!((y.stores, y.bytes_stored, y.bytes_written), (37, 148, 148));
    assert_eq!(of(3).label, None);
    assert_eq!((dispatch.threadgroups, dispatch.threads), (10, 128));
    assert_eq!(report.bytes_read(), 37 * 8 * 34 + 1024);
    assert_eq!(report.bytes_written(), 148);
}

#[test]
fn threadgroup_memory_and_barriers_are_counted() {
    let demo = matmul(false);
    let report = run(demo.dispatch.clone(), Options::default()).expect("a sound kernel");
    assert_eq!(report.dispatches[0].threadgroup_memory, 2048);
    assert_eq!(report.dispatches[0].barriers, [0, 1]);
}

#[test]
fn the_half_instance_rounds_once() {
    let library = compile("norm.metal", include_str!("kernels/norm.metal"));
    let constants = [(0, Value::Bool(false))];
    let pipeline: Pipeline = library.pipeline("rms_norm_f16", &constants).expect("a pipeline");
    let (x, values) = halves(&noise(11, 64));
    let y = Buffer::new("y", 128).expect("memory");
    let dispatch = Dispatch::new(&pipeline, [1, 1, 1], [32, 1, 1])
        .buffer(0, &filled("x", &x))
        .buffer(2, &y)
        .bytes(3, &norm_shape(64, 0.0));
    run(dispatch, Options::default()).expect("a sound kernel");
    let mut bytes = vec![0; 128];
    y.read(0, &mut bytes).expect("a range inside");
    let r = 1.0 / (values.iter().map(|v| v * v).sum::<f64>() / 64.0).sqrt();
    for (pair, v) in bytes.chunks_exact(2).zip(&values) {
        let got = f64::from(half_value(u16::from_ne_bytes([pair[0], pair[1]])));
        assert!((got - v * r).abs() <= (v * r).abs() / 2048.0 + 1e-6, "{got} for {}", v * r);
    }
}

#[test]
fn a_fault_names_kernel_buffer_and_line() {
    let demo = matvec_q8();
    let mut dispatch = demo.dispatch.clone();
    dispatch.bound.retain(|(index, _)| *index != 0);
    let short = filled("short weights", &vec![0; 36 * 8 * 34 + 8]);
    let error = run(dispatch.buffer(0, &short), Options::default()).expect_err("out of bounds");
    let fault = error.as_fault().expect("a fault");
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    assert_eq!(fault.kernel, "matvec_q8");
    assert_eq!(fault.buffer.as_deref(), Some("short weights"));
    assert_eq!(fault.argument, Some(0));
    let (file, line) = fault.place.clone().expect("a place");
    assert_eq!(file, "matvec.metal");
    assert!((8..=18).contains(&line), "line {line}: {error}");
}

#[test]
fn a_barrier_of_another_library_stays() {
    let (one, other) = (matvec_split(), matvec_split());
    let options =
        Options { disabled_barrier: Some(other.library.barrier_id(0)), ..Options::default() };
    one.run(options).expect("its own barrier is there");
    other.run(options).expect_err("this one's is not");
}
