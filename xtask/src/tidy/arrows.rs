//! The arrows between the crates: who may depend on whom. Knows manifests as `cargo metadata` tells them, no code.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Complaint;

/// Every package of the workspace with those it may be built on. A star: the boundary (`fornax-plan`) is in the middle,
/// providers and the engine meet there and do not know each other, and the binary alone brings them together.
const ALLOWED: [(&str, &[&str]); 11] = [
    ("fornax-gguf", &[]),
    ("fornax-text", &["fornax-gguf"]),
    ("fornax-plan", &["fornax-gguf"]),
    ("fornax-cpu", &["fornax-gguf", "fornax-plan"]),
    ("fornax-msl", &[]),
    ("fornax-metal", &["fornax-gguf", "fornax-plan", "fornax-msl"]),
    ("fornax-cuda", &["fornax-gguf", "fornax-plan"]),
    ("fornax-engine", &["fornax-gguf", "fornax-text", "fornax-plan"]),
    ("fornax-server", &["fornax-gguf", "fornax-text", "fornax-plan", "fornax-engine"]),
    (
        "fornax",
        &[
            "fornax-gguf",
            "fornax-text",
            "fornax-plan",
            "fornax-cpu",
            "fornax-metal",
            "fornax-cuda",
            "fornax-engine",
            "fornax-server",
        ],
    ),
    ("xtask", &[]),
];

/// Packages that nothing at all may depend on, tests included.
const TOPS: [&str; 2] = ["fornax", "xtask"];

/// Complains of every arrow between packages of the workspace that the table does not have.
pub(super) fn check(metadata: &Value) -> Result<Vec<Complaint>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut complaints = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let manifest = format!("the manifest of {name}");
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            complaints.push(Complaint::new(&manifest, 0, "is not in the table of arrows"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let Some(to) = dependency["name"].as_str().filter(|to| names.contains(to)) else {
                continue;
            };
            // Tests bring together what the code keeps apart.
            let only_tests = dependency["kind"] == "dev";
            if TOPS.contains(&to) || !only_tests && !allowed.contains(&to) {
                complaints.push(Complaint::new(&manifest, 0, format!("may not depend on {to}")));
            }
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn complaints(packages: &Value) -> Vec<String> {
        let found = check(&json!({ "packages": packages })).expect("the shape is right");
        found.into_iter().map(|c| format!("{} {}", c.path, c.message)).collect()
    }

    #[test]
    fn the_star_passes() {
        let packages = json!([
            { "name": "fornax-gguf", "dependencies": [{ "name": "memmap2", "kind": null }] },
            { "name": "fornax-plan", "dependencies": [{ "name": "fornax-gguf", "kind": null }] },
            { "name": "fornax-cpu", "dependencies": [
                { "name": "fornax-plan", "kind": null },
                { "name": "fornax-engine", "kind": "dev" },
            ] },
            { "name": "fornax-engine", "dependencies": [{ "name": "fornax-plan", "kind": null }] },
        ]);
        assert_eq!(complaints(&packages), [""; 0]);
    }

    #[test]
    fn an_arrow_against_the_star_is_named() {
        let packages = json!([
            { "name": "fornax-gguf", "dependencies": [] },
            { "name": "fornax-cpu", "dependencies": [{ "name": "fornax-gguf", "kind": null }] },
            { "name": "fornax-engine", "dependencies": [{ "name": "fornax-cpu", "kind": null }] },
            { "name": "fornax-plan", "dependencies": [{ "name": "fornax-engine", "kind": "build" }] },
        ]);
        assert_eq!(
            complaints(&packages),
            [
                "the manifest of fornax-engine may not depend on fornax-cpu",
                "the manifest of fornax-plan may not depend on fornax-engine",
            ]
        );
    }

    #[test]
    fn nothing_reaches_the_binary_and_no_package_is_unknown() {
        let packages = json!([
            { "name": "fornax", "dependencies": [] },
            { "name": "fornax-text", "dependencies": [{ "name": "fornax", "kind": "dev" }] },
            { "name": "fornax-extra", "dependencies": [] },
        ]);
        assert_eq!(
            complaints(&packages),
            [
                "the manifest of fornax-text may not depend on fornax",
                "the manifest of fornax-extra is not in the table of arrows",
            ]
        );
    }
}
