//! Each report, from a kernel that commits the fault; and what is near to a fault and none.

use std::sync::Arc;

use fornax_msl::{
    Buffer, Command, Dispatch, Error, Fault, FaultKind, Library, Options, Order, Owner, Queue,
};

use crate::{compile, filled, floats, orders, read_floats, run, words};

const SOURCE: &str = include_str!("kernels/faults.metal");

fn library() -> Library {
    compile("faults.metal", SOURCE)
}

fn dispatch(name: &str, groups: u32, threads: u32) -> Dispatch {
    let pipeline = library().pipeline(name, &[]).expect("a pipeline");
    Dispatch::new(&pipeline, [groups, 1, 1], [threads, 1, 1])
}

fn ones(label: &str, n: usize) -> Buffer {
    filled(label, &floats(&vec![1.0; n]))
}

fn empty(label: &str, n: usize) -> Buffer {
    Buffer::new(label, 4 * n).expect("memory")
}

/// Checks what every report of a fault has, and gives it.
fn fault(result: Result<fornax_msl::Report, Error>, name: &str, kind: FaultKind) -> Fault {
    let error = result.err().unwrap_or_else(|| panic!("{name}: no fault was reported"));
    let fault = error.as_fault().unwrap_or_else(|| panic!("{name}: {error}")).clone();
    assert_eq!(fault.kind, kind, "{name}: {error}");
    assert_eq!(fault.kernel, name);
    let (file, line) = fault.place.clone().unwrap_or_else(|| panic!("no place: {error}"));
    assert_eq!(file, "faults.metal", "{error}");
    let text = SOURCE.lines().nth(line as usize - 1).expect("a line of the source");
    assert!(text.ends_with(&format!("// {name}")), "line {line}: {text}: {error}");
    fault
}

/// Runs in every order and expects the fault in each.
fn always(dispatch: &Dispatch, kind: FaultKind) -> Fault {
    let name = dispatch.pipeline.info().name.clone();
    let mut all = orders().into_iter().map(|o| fault(run(dispatch.clone(), o), &name, kind));
    all.next_back().expect("an order")
}

#[test]
fn accesses_out_of_bounds() {
    let past = |at: u32| {
        dispatch("read_past", 1, 32)
            .buffer(0, &ones("x", 32))
            .buffer(1, &empty("y", 32))
            .bytes(2, &words(&[at]))
    };
    for at in [1, 3, 32, 4096, 1 << 20, 1 << 27, u32::MAX] {
        let f = always(&past(at), FaultKind::OutOfBounds);
        assert_eq!((f.buffer.as_deref(), f.argument), (Some("x"), Some(0)), "{at}: {f}");
    }
    run(past(0), Options::default()).expect("all inside");

    let f =
        always(&dispatch("write_past", 2, 32).buffer(0, &empty("y", 63)), FaultKind::OutOfBounds);
    assert_eq!((f.buffer.as_deref(), f.offset), (Some("y"), 63 * 4), "{f}");
    let d = dispatch("matrix_past", 1, 32).buffer(0, &ones("x", 70)).buffer(1, &empty("y", 64));
    assert_eq!(always(&d, FaultKind::OutOfBounds).buffer.as_deref(), Some("x"));
    let n = filled("n", &[0; 124]);
    assert_eq!(
        always(&dispatch("atomic_past", 1, 32).buffer(0, &n), FaultKind::OutOfBounds).offset,
        124
    );
    let bytes = dispatch("bytes_past", 1, 32).bytes(0, &words(&[0; 31])).buffer(1, &empty("y", 32));
    let f = always(&bytes, FaultKind::OutOfBounds);
    assert_eq!((f.buffer, f.argument), (None, Some(0)));
}

#[test]
fn an_access_past_one_argument_into_the_next() {
    // Both arguments lie in one buffer, one after the other, and a third lies right before them.
    let all = ones("arena", 96);
    let d = dispatch("read_past", 1, 32)
        .range(0, &all, 128, 128)
        .range(1, &all, 256, 128)
        .bytes(2, &words(&[1]));
    let f = always(&d, FaultKind::OutOfBounds);
    assert_eq!((f.argument, f.offset), (Some(0), 128), "{f}");
    // The same in bytes that were mapped by someone else, and in bytes that cannot be mapped twice.
    let owner: Owner = Arc::new(floats(&[1.0; 96]));
    let wrapped = Buffer::wrap("wrapped", &owner).expect("memory");
    let d = dispatch("read_past", 1, 32)
        .range(0, &wrapped, 0, 128)
        .buffer(1, &empty("y", 32))
        .bytes(2, &words(&[1]));
    assert_eq!(always(&d, FaultKind::OutOfBounds).buffer.as_deref(), Some("wrapped"));
}

#[test]
fn threadgroup_and_thread_memory_out_of_bounds() {
    always(&dispatch("array_past", 1, 32).buffer(0, &empty("y", 32)), FaultKind::OutOfBounds);
    let d = dispatch("argument_past", 1, 32).buffer(0, &empty("y", 32)).threadgroup(0, 112);
    always(&d, FaultKind::OutOfBounds);
    let y = empty("y", 32);
    always(&dispatch("other_thread", 1, 32).buffer(0, &y), FaultKind::OutOfBounds);
    always(&dispatch("thread_array", 1, 5).buffer(0, &y), FaultKind::ArrayIndex);
    always(&dispatch("table_past", 1, 5).buffer(0, &y), FaultKind::ArrayIndex);
    run(dispatch("table_past", 1, 4).buffer(0, &y), Options::default()).expect("all inside");
}

#[test]
fn reads_of_what_was_never_written() {
    let x = empty("x", 32);
    x.write(0, &floats(&[1.0; 31])).expect("a range inside");
    let d = dispatch("unwritten_device", 1, 32).buffer(0, &x).buffer(1, &empty("y", 32));
    let f = always(&d, FaultKind::Unwritten);
    assert_eq!((f.buffer.as_deref(), f.offset, f.thread), (Some("x"), 124, 31), "{f}");
    assert_eq!(x.first_unwritten(0, 128), Some(124));
    let y = empty("y", 32);
    always(&dispatch("unwritten_in_place", 1, 32).buffer(0, &y), FaultKind::Unwritten);
    y.mark_written(0, 128);
    let d2 = dispatch("unwritten_in_place", 1, 32).buffer(0, &y);
    let report = run(d2, Options::default()).expect("all written");
    let traffic = &report.dispatches[0].traffic[0];
    assert_eq!((traffic.bytes_read, traffic.bytes_written), (128, 128));
    // A kernel's write counts, and forgetting takes it back.
    run(dispatch("same_bytes", 1, 32).buffer(0, &x), Options::default()).expect("sound");
    run(d.clone(), Options::default()).expect("all written");
    x.forget(8, 1);
    assert_eq!(always(&d, FaultKind::Unwritten).offset, 8);
    let f = always(
        &dispatch("unwritten_threadgroup", 2, 32).buffer(0, &empty("y", 32)),
        FaultKind::Unwritten,
    );
    assert_eq!(f.offset, 28);
    assert!(f.to_string().contains("'part'"), "{f}");
}

#[test]
fn barriers_and_simdgroup_functions_that_not_all_reach() {
    let y = empty("y", 64);
    for (name, threads) in [
        ("half_a_barrier", 32),
        ("two_barriers", 64),
        ("half_a_sum", 32),
        ("sum_or_max", 32),
        ("sum_after_return", 32),
        ("lane_by_lane", 32),
        ("barrier_after_return", 64),
    ] {
        always(&dispatch(name, 1, threads).buffer(0, &y), FaultKind::Divergent);
    }
    // Simdgroups that have returned whole stop nobody's simdgroup functions.
    run(dispatch("sum_after_return", 1, 3).buffer(0, &y), Options::default()).expect("all there");
}

#[test]
fn misaligned_accesses() {
    let (x, y) = (filled("x", &[0; 34 * 32 + 4]), empty("y", 32 * 4 + 4));
    for name in ["wide_load", "odd_word"] {
        let f = always(&dispatch(name, 1, 32).buffer(0, &x).buffer(1, &y), FaultKind::Misaligned);
        assert_eq!((f.buffer.as_deref(), f.argument), (Some("x"), Some(0)), "{f}");
    }
    always(&dispatch("wide_store", 1, 32).buffer(0, &y), FaultKind::Misaligned);
    always(&dispatch("odd_atomic", 1, 1).buffer(0, &filled("n", &[0; 8])), FaultKind::Misaligned);
}

#[test]
fn races_in_a_threadgroup() {
    let y = empty("y", 64);
    for (name, threads) in [
        ("race_read", 64),
        ("race_write", 2),
        ("race_in_simdgroup", 32),
        ("race_flags", 64),
        ("race_across_simdgroups", 64),
        ("race_atomic", 2),
        ("matrix_race", 32),
    ] {
        always(&dispatch(name, 1, threads).buffer(0, &y), FaultKind::Race);
    }
    let d = dispatch("race_device", 1, 64).buffer(0, &y).buffer(1, &empty("z", 64));
    assert_eq!(always(&d, FaultKind::Race).buffer.as_deref(), Some("y"));
}

#[test]
fn threadgroups_and_dispatches_that_conflict() {
    let y = empty("y", 64);
    // Two threadgroups of one dispatch write the same bytes.
    always(&dispatch("same_bytes", 2, 32).buffer(0, &y), FaultKind::Conflict);

    let (a, b, c) = (ones("a", 32), empty("b", 32), empty("c", 32));
    let copy = |x: &Buffer, y: &Buffer| {
        Command::Dispatch(dispatch("copy", 1, 32).buffer(0, x).buffer(1, y))
    };
    let write = Command::Dispatch(dispatch("same_bytes", 1, 32).buffer(0, &a));
    for options in orders() {
        let queue = Queue::new(options);
        b.write(0, &[0; 128]).expect("a range inside");
        // Written, then read; read, then written; written twice.
        let raw = queue.run(&[copy(&a, &b), copy(&b, &c)]);
        assert_eq!(fault(raw, "copy", FaultKind::Conflict).buffer.as_deref(), Some("b"));
        let war = queue.run(&[copy(&a, &b), write.clone()]);
        let kernel = war.as_ref().err().and_then(Error::as_fault).map(|f| f.kernel.clone());
        fault(war, &kernel.expect("a fault"), FaultKind::Conflict);
        let waw = queue.run(&[copy(&a, &c), copy(&a, &c)]);
        assert_eq!(fault(waw, "copy", FaultKind::Conflict).buffer.as_deref(), Some("c"));
        // A barrier between orders them, and so does the end of a run.
        let ordered =
            [copy(&a, &b), Command::Barrier, copy(&b, &c), Command::Barrier, write.clone()];
        let report = queue.run(&ordered).expect("ordered");
        assert_eq!((report.barriers, report.dispatches.len()), (2, 3));
        queue.run(&[copy(&a, &b)]).expect("alone");
        queue.run(&[copy(&b, &c)]).expect("alone");
        // Disjoint ranges of one buffer do not conflict, nor do two readers.
        let half = |at: usize| {
            let d = dispatch("copy", 1, 16);
            Command::Dispatch(d.range(0, &a, at, 64).range(1, &c, at, 64))
        };
        queue.run(&[half(0), half(64), copy(&a, &b)]).expect("disjoint");
    }
}

#[test]
fn a_conflict_names_the_dispatch() {
    let (a, b, c) = (ones("a", 32), ones("b", 32), empty("c", 32));
    let copy = |x: &Buffer, y: &Buffer| {
        Command::Dispatch(dispatch("copy", 1, 32).buffer(0, x).buffer(1, y))
    };
    let queue = Queue::new(Options { order: Order::InOrder, ..Options::default() });
    let all = [copy(&a, &c), Command::Barrier, copy(&a, &b), copy(&b, &c)];
    let f = fault(queue.run(&all), "copy", FaultKind::Conflict);
    assert_eq!(f.dispatch, 2, "{f}");
    let other = "threadgroup [0, 0, 0] of dispatch 1 (kernel copy) has written";
    assert!(f.to_string().contains(other), "{f}");
}

#[test]
fn too_much_threadgroup_memory() {
    let d = |more: usize| {
        dispatch("static_memory", 1, 32).buffer(0, &empty("y", 32)).threadgroup(0, more)
    };
    always(&d(16 << 10), FaultKind::ThreadgroupMemory);
    let report = run(d(128), Options::default()).expect("it fits");
    assert_eq!(report.dispatches[0].threadgroup_memory, 28000 + 128);
}

#[test]
fn writes_to_what_is_read_only_and_divisions() {
    let f =
        always(&dispatch("cast_away", 1, 32).buffer(0, &ones("x", 32)), FaultKind::ReadOnlyWrite);
    assert_eq!(f.buffer.as_deref(), Some("x"));
    let d = |n: u32| dispatch("divide", 1, 32).buffer(0, &empty("y", 32)).bytes(1, &words(&[n]));
    always(&d(0), FaultKind::Division);
    run(d(3), Options::default()).expect("no division by zero");
}

#[test]
fn a_thread_variable_without_a_value_spoils_the_result() {
    let y = empty("y", 32);
    let d = dispatch("unset", 1, 32).buffer(0, &y).bytes(1, &words(&[5]));
    run(d, Options::default()).expect("no access at fault");
    for (i, v) in read_floats(&y).into_iter().enumerate() {
        assert!(if i % 8 < 5 { v == 0.0 } else { v.is_nan() || v.abs() > 1e30 }, "{i}: {v}");
    }
}

#[test]
fn a_mapped_file_is_wrapped_without_a_copy() {
    let path = std::env::temp_dir().join(format!("fornax-msl-{}", std::process::id()));
    std::fs::write(&path, floats(&[2.0; 8192])).expect("a temporary file");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("it is there");
    std::fs::remove_file(&path).expect("it is there");
    // SAFETY: the file has no name, so nobody shortens it.
    let map = unsafe { memmap2::Mmap::map(&file) }.expect("a map");
    let owner: Owner = Arc::new(map);
    let wrapped = Buffer::wrap("weights", &owner).expect("memory");
    // What is written to the file shows in the buffer: both are the same pages.
    std::os::unix::fs::FileExt::write_all_at(&file, &floats(&[3.0]), 4100).expect("a write");
    let mut bytes = [0; 8];
    wrapped.read(4096, &mut bytes).expect("a range inside");
    assert_eq!(bytes.to_vec(), floats(&[2.0, 3.0]));

    let y = empty("y", 32);
    let d = |from: usize, at: u32| {
        dispatch("read_past", 1, 32)
            .range(0, &wrapped, from, 128)
            .buffer(1, &y)
            .bytes(2, &words(&[at]))
    };
    let report = run(d(4100, 0), Options::default()).expect("all inside");
    assert_eq!(read_floats(&y)[..2], [3.0, 2.0]);
    assert_eq!(report.dispatches[0].traffic[0].bytes_read, 128);
    let f = always(&d(4100, 1), FaultKind::OutOfBounds);
    assert_eq!((f.buffer.as_deref(), f.offset), (Some("weights"), 128));
}

#[test]
fn reports_outlast_the_clock_that_stamps_accesses() {
    // The clock has 21 bits: it runs out in the midst of many threadgroups, and in the midst of one.
    let y = empty("y", 1500);
    let (a, b) = (ones("a", 32), empty("b", 32));
    let copy = || Command::Dispatch(dispatch("copy", 1, 32).buffer(0, &a).buffer(1, &b));
    for (groups, barriers) in [(1500, 1000), (2, 2_200_000), (1, 1)] {
        let long = dispatch("many_barriers", groups, 1).buffer(0, &y).bytes(1, &words(&[barriers]));
        run(long, Options::default()).expect("sound");
        run(dispatch("race_read", 1, 32).buffer(0, &y), Options::default())
            .expect_err("its array has more elements than there are threads");
        always(&dispatch("race_flags", 1, 64).buffer(0, &y), FaultKind::Race);
        let both = Queue::default().run(&[copy(), copy()]);
        fault(both, "copy", FaultKind::Conflict);
        Queue::default().run(&[copy(), Command::Barrier, copy()]).expect("ordered");
    }
}
