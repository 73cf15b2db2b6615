//! The plan of every family, as text that a change must be seen to change.
//!
//! `FORNAX_UPDATE=1 cargo test -p fornax-engine plans` writes the files anew.

use std::path::PathBuf;

use fornax_engine::arch::FAMILIES;

use crate::fixture::Fixture;

/// A test model of each family.
const MODELS: [(&str, &str); 10] = [
    ("llama", "llama3"),
    ("mistral", "mistral-swa"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3-ropescale"),
    ("lfm2", "lfm2"),
    ("mixtral", "mixtral"),
    ("qwen3moe", "qwen3moe"),
    ("gpt-oss", "gptoss-mxfp4"),
];

#[test]
fn plans_are_as_committed() {
    for family in FAMILIES {
        let (_, model) = MODELS.iter().find(|(f, _)| *f == family.name).unwrap_or_else(|| {
            panic!("family {} has no test model in this list", family.name);
        });
        let f = Fixture::load(model);
        assert_eq!(f.plan.hyper.family, family.name, "{model} is of another family");
        let shapes: Vec<u32> = f.plan.layers.iter().map(|l| l.shape).collect();
        let have = format!("{}layer shapes {shapes:?}\n", f.plan);
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/it/plans")
            .join(format!("{}.txt", family.name));
        if std::env::var_os("FORNAX_UPDATE").is_some() {
            std::fs::write(&path, &have).unwrap();
        }
        let want = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(have == want, "the plan of {} changed:\n{have}", family.name);
    }
}
