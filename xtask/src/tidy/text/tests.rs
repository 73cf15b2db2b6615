//! Each rule about one file, on text that keeps it and text that breaks it.

use super::super::files::File;
use super::{check, warn};

/// The complaints about a file, as `line: message`.
fn complaints(path: &str, text: &str) -> Vec<String> {
    let file = File { path: path.to_owned(), text: text.to_owned() };
    check(&file).into_iter().map(|c| format!("{}: {}", c.line, c.message)).collect()
}

fn in_rust(code: &str) -> Vec<String> {
    complaints("crates/a/src/lib.rs", &format!("//! What it is for.\n{code}\n"))
}

#[track_caller]
fn one(found: &[String], start: &str) {
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with(start), "{found:?}");
}

#[test]
fn files_open_with_what_they_are_for() {
    assert!(in_rust("fn f() {}").is_empty());
    one(&complaints("a.rs", "// Not that kind.\nfn f() {}\n"), "1: opens without `//!`");
    one(&complaints("a.rs", ""), "1: opens without `//!`");
    assert!(complaints("k.cu", "// Rows by blocks.\n__global__ void k() {}\n").is_empty());
    one(&complaints("k.metal", "#include <metal_stdlib>\n"), "1: opens without a comment");
    assert!(complaints("a.md", "words\n").is_empty());
}

#[test]
fn long_files_are_warned_of_and_then_refused() {
    let file = |lines: usize| File {
        path: "a.rs".to_owned(),
        text: format!("//! Long.\n{}", "\n".repeat(lines - 1)),
    };
    assert!(warn(&file(600)).is_none());
    assert!(warn(&file(601)).is_some() && check(&file(601)).is_empty());
    assert!(warn(&file(1_000)).is_some() && check(&file(1_000)).is_empty());
    assert!(warn(&file(1_001)).is_none());
    assert_eq!(check(&file(1_001))[0].message, "1001 lines, more than 1000");
    let page = File { path: "a.md".to_owned(), text: "\n".repeat(2_000) };
    assert!(check(&page).is_empty() && warn(&page).is_none());
}

#[test]
fn modules_have_telling_names() {
    one(&complaints("crates/a/src/utils.rs", "//! Things.\n"), "0: \"utils\" says nothing");
    one(&complaints("tests/common/mod.rs", "//! Things.\n"), "0: \"common\" says nothing");
    one(&in_rust("mod helpers {\n}"), "2: module \"helpers\" says nothing");
    assert!(complaints("crates/a/src/tensor_types.rs", "//! Types of tensors.\n").is_empty());
    assert!(in_rust("mod commonly { }\n// mod utils {").is_empty());
}

#[test]
fn unfinished_code_is_found_and_talk_of_it_is_not() {
    one(&in_rust("fn f() { todo!() }"), "2: `todo!`");
    one(&in_rust("fn f() { unimplemented!(\"x\") }"), "2: `unimplemented!`");
    one(&in_rust("#[ignore]\n#[test]\nfn t() {}"), "2: a test that is not run");
    assert!(in_rust("#[ignore = \"every shape: cargo xtask deep\"]\nfn t() {}").is_empty());
    one(&in_rust("// FIXME later"), "2: FIXME");
    one(&in_rust("/* XXX */"), "2: XXX");
    one(&complaints("a.md", "TODO: write\n"), "1: TODO");
    one(&complaints("a.sh", "# FIXME\n"), "1: FIXME");
    assert!(in_rust("const S: &str = \"todo!() FIXME\"; // no todo here, nor XXXS").is_empty());
    assert!(in_rust("let IQ2_XXS = not_todo!();").is_empty());
    assert!(complaints("a.sh", "mktemp dXXXXXX\n").is_empty());
}

#[test]
fn folders_of_one_machine_are_found_everywhere() {
    for place in ["work", "root", "home", "Users"] {
        let path = format!("/{place}/x");
        one(&in_rust(&format!("const P: &str = \"{path}\";")), "2: ");
        one(&complaints("a.md", &format!("see {path}\n")), "1: ");
        assert!(complaints("a.md", &format!("see docs{path}\n")).is_empty());
        assert!(complaints("a.sh", &format!("ls ~{path}\n")).is_empty());
    }
}

#[test]
fn unsafe_has_its_reason() {
    one(&in_rust("fn f() {\n    unsafe { g() }\n}"), "3: unsafe without");
    one(&in_rust("unsafe impl Send for A {}"), "2: unsafe without");
    one(
        &in_rust("// SAFETY: fine.\nlet a = unsafe { g() };\nlet b = unsafe { h() };"),
        "4: unsafe",
    );
    one(&in_rust("// SAFETY: too far away.\n\nlet a = unsafe { g() };"), "4: unsafe without");
    assert!(in_rust("// SAFETY: fine.\nunsafe impl Send for A {}").is_empty());
    assert!(in_rust("// SAFETY: fine,\n// as both know.\nlet a =\n    unsafe { g() };").is_empty());
    assert!(in_rust("// SAFETY: fine.\n#[allow(x)]\nlet a = unsafe { g() };").is_empty());
    assert!(in_rust("let a = unsafe { g() }; // SAFETY: fine.").is_empty());
    assert!(in_rust("// SAFETY: fine.\nunsafe { g() }\n    .map(|()| unsafe { h() })").is_empty());
    one(&in_rust("unsafe_free { g() }\n    .map(|()| unsafe { h() })"), "3: unsafe without");
    assert!(in_rust("/// Does it.\nunsafe fn f() {}\n#![forbid(unsafe_code)]").is_empty());
    assert!(in_rust("let s = \"unsafe { }\"; // unsafe { }").is_empty());
}

#[test]
fn safe_crates_forbid_unsafe_code() {
    let root = "crates/fornax-text/src/lib.rs";
    one(&complaints(root, "//! Text.\n"), "0: lacks `#![forbid(unsafe_code)]`");
    assert!(complaints(root, "//! Text.\n#![forbid(unsafe_code)]\n").is_empty());
    assert!(complaints("crates/fornax-cpu/src/lib.rs", "//! Kernels.\n").is_empty());
}

#[test]
fn one_reason_covers_the_item_below_it_and_no_more() {
    let item = "#[allow(clippy::undocumented_unsafe_blocks, reason = \"said above\")]
impl Lanes for Neon {
    unsafe fn a() {
        unsafe { x() }
    }
    unsafe fn b() {
        unsafe { y() }
    }
}
";
    assert!(
        in_rust(&format!("// SAFETY of every function below: the trait's.\n{item}")).is_empty()
    );
    let after = format!(
        "// SAFETY of every function below: the trait's.\n{item}fn c() {{ unsafe {{ z() }} }}"
    );
    one(&in_rust(&after), "12: unsafe without");
    assert_eq!(in_rust(item).len(), 2);
    let silent = item.replace("clippy::undocumented_unsafe_blocks", "dead_code");
    assert_eq!(in_rust(&format!("// SAFETY of every function below: no.\n{silent}")).len(), 2);
}
