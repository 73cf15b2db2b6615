//! Pages that must agree with something else: the README with what the checks run, the list of dependencies with the
//! manifests. Knows markdown as far as a fenced block and a table row.

use super::Complaint;

/// The README opens with two commands for a new machine; the second is the one that `.ci/run` calls, to the letter.
pub(super) fn check(readme: &str, ci: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let block = first_block(readme);
    let [run, test] = block[..] else {
        let message = format!("opens with {} commands, not with two", block.len());
        return vec![Complaint::new("README.md", 0, message)];
    };
    if !run.starts_with("cargo run --release -- run ") {
        complaints.push(Complaint::new("README.md", 0, format!("its first command is {run:?}")));
    }
    if !test.starts_with("cargo test") {
        complaints.push(Complaint::new("README.md", 0, format!("its second command is {test:?}")));
    }
    let called = |line: &str| line.trim().trim_start_matches("step tests ").trim_end() == test;
    if !ci.lines().any(called) {
        let message = format!("does not call the README's test command, {test:?}");
        complaints.push(Complaint::new(".ci/run", 0, message));
    }
    complaints
}

/// The lines of the first fenced block.
fn first_block(page: &str) -> Vec<&str> {
    page.lines()
        .skip_while(|line| !line.starts_with("```"))
        .skip(1)
        .take_while(|line| !line.starts_with("```"))
        .filter(|line| !line.trim().is_empty())
        .collect()
}

/// Every dependency of a manifest has its row in the list, and every row a manifest.
pub(super) fn check_dependencies(list: &str, manifests: &[(&str, &str)]) -> Vec<Complaint> {
    let rows: Vec<&str> = list
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect();
    let mut complaints = Vec::new();
    let mut used = Vec::new();
    for (path, manifest) in manifests {
        for name in dependencies(manifest) {
            used.push(name);
            if !rows.contains(&name) {
                let message = format!("{name} has no row in docs/deps.md that says why it is here");
                complaints.push(Complaint::new(path, 0, message));
            }
        }
    }
    for row in rows.iter().filter(|row| !used.contains(row)) {
        let message = format!("no manifest asks for {row}");
        complaints.push(Complaint::new("docs/deps.md", 0, message));
    }
    complaints
}

/// The names of the dependencies of a package's manifest that come from outside the workspace.
fn dependencies(manifest: &str) -> Vec<&str> {
    let mut section = "";
    let mut names = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
            // A table of its own for one dependency: [dependencies.name].
            if let Some((kind, name)) = section.rsplit_once('.')
                && kind.ends_with("dependencies")
                && kind != "workspace"
            {
                names.push(name);
            }
        } else if section.ends_with("dependencies")
            && section != "workspace.dependencies"
            && let Some((key, _)) = line.split_once('=')
        {
            names.push(key.trim().split('.').next().unwrap_or(key).trim_matches('"'));
        }
    }
    names
        .retain(|name| !name.starts_with('#') && *name != "fornax" && !name.starts_with("fornax-"));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "# fornax\n\n```sh\ncargo run --release -- run \"Hi\"\n\ncargo test --workspace\n```\n\n```\nmore\n```\n";

    #[test]
    fn the_two_commands_agree_with_the_checks() {
        assert_eq!(check(README, "set -e\nstep tests cargo test --workspace\n"), []);
        assert_eq!(check(README, "cargo test --workspace\n"), []);
    }

    #[test]
    fn another_test_command_is_a_breach() {
        let found = check(README, "step tests cargo test --workspace --release\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, ".ci/run");
        let found = check(&README.replace("cargo test --workspace", "make test"), "make test\n");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            check("# no block\n", "cargo test\n")[0].message,
            "opens with 0 commands, not with two"
        );
    }

    const MANIFEST: &str = "\
[package]
name = \"x\"
[dependencies]
fornax-gguf.workspace = true
anyhow.workspace = true
# serde = \"1\"
[target.'cfg(unix)'.dependencies]
libc = { version = \"0.2\" }
[dev-dependencies.proptest]
version = \"1\"
[lints]
workspace = true
";

    #[test]
    fn dependencies_are_found_in_every_kind_of_table() {
        assert_eq!(dependencies(MANIFEST), ["anyhow", "libc", "proptest"]);
        assert_eq!(dependencies("[workspace.dependencies]\nanyhow = \"1\"\n"), [""; 0]);
    }

    #[test]
    fn the_list_has_a_row_for_each_dependency_and_no_other() {
        let list =
            "| crate | why |\n| `anyhow` | errors |\n| `libc` | calls |\n| `proptest` | tests |\n";
        assert_eq!(check_dependencies(list, &[("a/Cargo.toml", MANIFEST)]), []);
        let short = "| `anyhow` | errors |\n| `proptest` | tests |\n| `rand` | none |\n";
        let found = check_dependencies(short, &[("a/Cargo.toml", MANIFEST)]);
        assert_eq!(found.len(), 2);
        assert!(found[0].message.starts_with("libc has no row"), "{found:?}");
        assert_eq!(found[1].message, "no manifest asks for rand");
    }
}
