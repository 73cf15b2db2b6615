//! The kernel sources and the names of their entries, in one place each. It knows no driver and
//! no op.

use fornax_gguf::TensorType;

/// Headers by the names under which the sources include them.
pub(crate) static HEADERS: &[(&str, &str)] = &[
    ("../layout.cuh", include_str!("../kernels/layout.cuh")),
    ("layout.cuh", include_str!("../kernels/layout.cuh")),
    ("../weights.cuh", include_str!("../kernels/weights.cuh")),
];

/// The weight formats that kernels read, as the sources list them.
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

/// How the entries of a family are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Suffix {
    None,
    Weight,
    Kv,
}

/// A source file and its entries.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The file's name without its ending.
    pub name: &'static str,
    source: &'static str,
    entries: &'static [(&'static str, Suffix)],
}

/// Every family.
pub fn families() -> &'static [Family] {
    const W: Suffix = Suffix::Weight;
    &[
        Family {
            name: "embed",
            source: include_str!("../kernels/embed/embed.cu"),
            entries: &[("embed", W)],
        },
        Family {
            name: "matmul",
            source: include_str!("../kernels/matmul/matmul.cu"),
            entries: &[("matmul", W)],
        },
        Family {
            name: "gated_mlp",
            source: include_str!("../kernels/gated_mlp/gated_mlp.cu"),
            entries: &[("gated_mlp", W)],
        },
        Family {
            name: "norm",
            source: include_str!("../kernels/norm/norm.cu"),
            entries: &[("rms_norm", Suffix::None), ("norm_rope", Suffix::None)],
        },
        Family {
            name: "attention",
            source: include_str!("../kernels/attention/attention.cu"),
            entries: &[("kv_write", Suffix::Kv), ("attention", Suffix::Kv)],
        },
        Family {
            name: "choose",
            source: include_str!("../kernels/choose/choose.cu"),
            entries: &[("select_rows", Suffix::None), ("argmax", Suffix::None)],
        },
    ]
}

/// The entry of a kernel that reads weights, or stores keys and values, of a type.
pub(crate) fn entry(kernel: &str, ty: TensorType) -> String {
    format!("{kernel}_{}", ty.name().to_ascii_lowercase())
}

impl Family {
    /// The source with entries for these weight formats alone.
    pub(crate) fn source_for(&self, types: &[TensorType]) -> String {
        let list: Vec<String> = types
            .iter()
            .map(|ty| format!("M({}, {})", ty.name(), ty.name().to_ascii_lowercase()))
            .collect();
        format!("#define EACH_FORMAT(M) {}\n#line 1\n{}", list.join(" "), self.source)
    }

    /// The entries that the source then has.
    pub fn entries_for(&self, types: &[TensorType]) -> Vec<String> {
        let kv = [TensorType::F32, TensorType::F16];
        let names = |(kernel, suffix): &(&str, Suffix)| match suffix {
            Suffix::None => vec![(*kernel).to_string()],
            Suffix::Weight => types.iter().map(|ty| entry(kernel, *ty)).collect(),
            Suffix::Kv => kv.iter().map(|ty| entry(kernel, *ty)).collect(),
        };
        self.entries.iter().flat_map(names).collect()
    }
}
