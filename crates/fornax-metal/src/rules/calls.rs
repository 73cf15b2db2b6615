//! How the system's Metal is called, held against the text of the files that call it: what neither a type check nor the
//! emulator sees, and what a Mac would show late or not at all. It runs nothing.

use super::{Token, close, tokens};

const FILES: [(&str, &str); 4] = [
    ("mod.rs", include_str!("../api/system/mod.rs")),
    ("library.rs", include_str!("../api/system/library.rs")),
    ("memory.rs", include_str!("../api/system/memory.rs")),
    ("run.rs", include_str!("../api/system/run.rs")),
];

/// A function's name and everything in its braces, a blank between words.
fn functions(text: &str) -> Vec<(String, String)> {
    let all = tokens(text);
    let mut found = Vec::new();
    for (at, token) in all.iter().enumerate().filter(|(_, t)| t.text == "fn") {
        let open = (at..all.len()).find(|i| ["{", ";"].contains(&all[*i].text.as_str()));
        let Some(open) = open.filter(|i| all[*i].text == "{") else { continue };
        let body: Vec<&str> = all[open..close(&all, open)].iter().map(text_of).collect();
        assert!(token.line > 0);
        found.push((all[at + 1].text.clone(), body.join(" ")));
    }
    found
}

fn text_of(token: &Token) -> &str {
    &token.text
}

/// What the one function that does this does.
fn one(call: &str) -> String {
    one_named(call).1
}

fn one_named(call: &str) -> (String, String) {
    let all = FILES.iter().flat_map(|(_, text)| functions(text));
    let mut doing: Vec<(String, String)> = all.filter(|(_, body)| body.contains(call)).collect();
    let names: Vec<&String> = doing.iter().map(|(name, _)| name).collect();
    assert_eq!(doing.len(), 1, "{call} in {names:?}, expected one function");
    let (name, body) = doing.remove(0);
    assert_eq!(body.matches(call).count(), 1, "{call} in {name}");
    (name, body)
}

/// Each of these after the one before it.
fn in_order(body: &str, calls: &[&str]) {
    let mut rest = body;
    for call in calls {
        let at =
            rest.find(call).unwrap_or_else(|| panic!("no {call} where it should be in {body}"));
        rest = &rest[at + call.len()..];
    }
}

#[test]
fn every_compilation_says_language_and_safe_math() {
    in_order(&one("newLibraryWithSource_options_error"), &["options ( )", "Some ( & options )"]);
    let options = one("setLanguageVersion");
    for said in [
        "setMathMode ( MTLMathMode : : Safe )",
        "setMathFloatingPointFunctions ( MTLMathFloatingPointFunctions : : Precise )",
        "setFastMathEnabled ( false )",
    ] {
        assert!(options.contains(said), "{said}");
    }
    // The newer setters do not exist before macOS 15.
    in_order(&options, &["available", "15.0", "setMathMode", "else", "setFastMathEnabled"]);
    for (file, text) in FILES {
        let others = ["newDefaultLibrary", "newLibraryWithURL", "newLibraryWithData"];
        for other in others.into_iter().chain(["MTLMathMode::Fast", "MTLMathMode::Relaxed"]) {
            assert!(!text.contains(other), "{file}: {other}");
        }
    }
}

#[test]
fn a_device_is_looked_for_in_both_ways_with_the_framework_that_one_of_them_needs() {
    let found = one("MTLCreateSystemDefaultDevice ( )");
    assert!(found.contains("MTLCopyAllDevices ( )"), "{found}");
    let linked = r#"#[link(name = "CoreGraphics", kind = "framework")]"#;
    assert!(FILES[0].1.contains(linked));
    in_order(&one("recommendedMaxWorkingSetSize ( ) . saturating_sub"), &["held"]);
}

#[test]
fn whoever_waits_asks_how_it_ended() {
    let mut waits = 0;
    for (file, text) in FILES {
        for (name, body) in functions(text) {
            let parts: Vec<&str> = body.split("waitUntilCompleted").collect();
            for after in &parts[1..] {
                assert!(after.contains("ended ("), "{file}: {name} waits and does not ask");
                waits += 1;
            }
        }
    }
    assert!(waits >= 2, "{waits} waits");
    in_order(&one("GPUEndTime"), &["status ( )", "error ( )", "Completed", "None", "GPUEndTime"]);
}

#[test]
fn an_encoder_runs_dispatches_side_by_side_and_ends_however_it_is_left() {
    let part = one("computeCommandEncoderWithDispatchType");
    in_order(&part, &["MTLDispatchType : : Concurrent", "Ending ( & encoder )", "commit ( )"]);
    assert_eq!(one_named("endEncoding").0, "drop", "of the guard");
    assert!(one("memoryBarrierWithScope").contains("MTLBarrierScope : : Buffers"));
}

#[test]
fn pipelines_are_asked_for_their_limits() {
    assert!(one("newComputePipelineStateWithDescriptor").contains("self . fits ("));
    assert!(one("threadExecutionWidth ( )").contains("threadgroup_bytes"));
    one("maxTotalThreadsPerThreadgroup");
}

/// Memory is resident only once the set is committed; what has gone leaves it; nothing is left when the queue goes.
#[test]
fn a_residency_set_is_committed_and_emptied() {
    in_order(
        &one("addAllocation"),
        &["removeAllAllocations", "addAllocation", "set . commit", "requestResidency"],
    );
    in_order(&one("endResidency"), &["removeAllAllocations", "set . commit", "removeResidencySet"]);
    let queue = one("newResidencySetWithDescriptor_error");
    in_order(
        &queue,
        &["available", "15.0", "supportsFamily", "newResidencySetWithDescriptor_error"],
    );
}

/// What the system makes is let go of on any thread: in a pool, or in a function that is only called within one.
#[test]
fn objects_are_made_within_a_pool() {
    const INSIDE: [&str; 3] = ["part", "build", "pipelines"];
    let makes = ["newBuffer", "newCommandQueue", "commandBufferWith", "newLibrary", "newFunction"];
    let mut seen = 0;
    for (file, text) in FILES {
        for (name, body) in functions(text) {
            let Some(first) = makes.iter().filter_map(|m| body.find(m)).min() else { continue };
            let pooled = body.find("autoreleasepool").is_some_and(|at| at < first);
            assert!(pooled || INSIDE.contains(&name.as_str()), "{file}: {name}");
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} functions");
    for inside in ["self . build (", "self . part (", "self . pipelines ("] {
        for (file, text) in FILES {
            for (name, body) in functions(text).iter().filter(|(name, _)| name != "pipelines") {
                let Some(first) = body.find(inside) else { continue };
                let pooled = body.find("autoreleasepool").is_some_and(|at| at < first);
                assert!(pooled, "{file}: {name} calls {inside} out of a pool");
            }
        }
    }
}
