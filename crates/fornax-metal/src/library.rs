//! The kernel sources and the names of their entries: which family holds which kernel, and how a
//! name is made of a kernel and a type. It knows no device and no plan.

use fornax_gguf::TensorType;

/// One `.metal` file and what it is compiled behind.
#[derive(Debug)]
pub(crate) struct Family {
    /// The folder under `kernels/`.
    pub(crate) name: &'static str,
    /// File names and texts, in their order.
    pub(crate) sources: &'static [(&'static str, &'static str)],
    /// Kernels without a type.
    plain: &'static [&'static str],
    /// Kernels with an instance for every weight type.
    weights: &'static [&'static str],
    /// Kernels with an instance for every type of cache.
    kv: &'static [&'static str],
}

const BLOCKS: (&str, &str) = ("blocks.metal", include_str!("../kernels/blocks/blocks.metal"));

macro_rules! source {
    ($name:literal) => {
        (
            concat!($name, ".metal"),
            include_str!(concat!("../kernels/", $name, "/", $name, ".metal")),
        )
    };
}

/// Every family.
pub(crate) static FAMILIES: &[Family] = &[
    Family {
        name: "embed",
        sources: &[BLOCKS, source!("embed")],
        plain: &[],
        weights: &["embed"],
        kv: &[],
    },
    Family {
        name: "norm",
        sources: &[source!("norm")],
        plain: &["rms_norm", "copy", "select_rows"],
        weights: &[],
        kv: &[],
    },
    Family {
        name: "matvec",
        sources: &[BLOCKS, source!("matvec")],
        plain: &["activate"],
        weights: &["matvec", "qkv", "gated_mlp"],
        kv: &[],
    },
    Family {
        name: "matmul",
        sources: &[BLOCKS, source!("matmul")],
        plain: &[],
        weights: &["matmul_small", "matmul_tiled"],
        kv: &[],
    },
    Family {
        name: "rope",
        sources: &[source!("rope")],
        plain: &["norm_rope"],
        weights: &[],
        kv: &["kv_write", "rope_write"],
    },
    Family {
        name: "attention",
        sources: &[source!("attention")],
        plain: &["attention_reduce"],
        weights: &[],
        kv: &["attention_split", "attention_tiled"],
    },
    Family {
        name: "choose",
        sources: &[source!("choose")],
        plain: &["argmax_parts", "argmax_pick"],
        weights: &[],
        kv: &[],
    },
];

/// The weight types that the kernels read.
pub(crate) const WEIGHT_TYPES: &[TensorType] = &[
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::MXFP4,
];

/// The types that keys and values are stored in.
pub(crate) const KV_TYPES: &[TensorType] = &[TensorType::F32, TensorType::F16, TensorType::Q8_0];

/// The entry name of a kernel with an instance for each type: the kernel, then the type in lower
/// case.
pub(crate) fn entry(kernel: &str, ty: TensorType) -> String {
    format!("{kernel}_{}", ty.name().to_ascii_lowercase())
}

impl Family {
    /// The names of all entries.
    pub(crate) fn entries(&self) -> Vec<String> {
        let typed = |kernels: &'static [&'static str], types: &'static [TensorType]| {
            kernels.iter().flat_map(move |k| types.iter().map(move |ty| entry(k, *ty)))
        };
        let plain = self.plain.iter().map(|k| (*k).to_string());
        plain.chain(typed(self.weights, WEIGHT_TYPES)).chain(typed(self.kv, KV_TYPES)).collect()
    }
}

/// Every entry with function constants that it can be built with, as they are on a common shape.
#[cfg_attr(
    not(any(target_os = "macos", test)),
    allow(dead_code, reason = "for the system's Metal")
)]
pub(crate) fn every_entry() -> impl Iterator<Item = (String, Vec<u32>)> {
    FAMILIES.iter().flat_map(Family::entries).map(|name| {
        let constants: &[u32] = match FAMILIES[family_of(&name).unwrap_or(0)].name {
            "attention" => &[1, 4, 4],
            "matvec" if name != "activate" => &[2, 1, 4, 0],
            _ => &[],
        };
        (name, constants.to_vec())
    })
}

/// The family that holds the entry called `name`.
pub(crate) fn family_of(name: &str) -> Option<usize> {
    FAMILIES.iter().position(|f| f.entries().iter().any(|e| e == name))
}
