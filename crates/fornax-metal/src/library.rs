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
const POOL: (&str, &str) = ("pool.metal", include_str!("../kernels/pool/pool.metal"));
const CODEBOOKS: (&str, &str) =
    ("codebooks.metal", include_str!("../kernels/blocks/codebooks.metal"));
const MORE: (&str, &str) = ("more.metal", include_str!("../kernels/blocks/more.metal"));

/// The source that holds the codebooks.
#[cfg(test)]
pub(crate) const CODEBOOK_TEXT: &str = CODEBOOKS.1;

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
        sources: &[BLOCKS, CODEBOOKS, MORE, source!("embed")],
        plain: &["embed_any"],
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
        sources: &[
            BLOCKS,
            CODEBOOKS,
            MORE,
            source!("matvec"),
            source!("any"),
            source!("moe"),
            source!("grouped"),
        ],
        plain: &[
            "activate",
            "matvec_any",
            "matvec_joined_any",
            "qkv_any",
            "gated_mlp_any",
            "moe_route",
            "moe_gated",
            "moe_down",
            "moe_group",
            "grouped_gated",
            "grouped_down",
            "grouped_sum",
        ],
        weights: &["matvec", "matvec_joined", "qkv", "gated_mlp"],
        kv: &[],
    },
    Family {
        name: "matmul",
        sources: &[BLOCKS, CODEBOOKS, MORE, source!("matmul")],
        plain: &["matmul_small_any", "matmul_tiled_any"],
        weights: &["matmul_small", "matmul_tiled"],
        kv: &[],
    },
    Family {
        name: "rope",
        sources: &[POOL, source!("rope")],
        plain: &["norm_rope"],
        weights: &[],
        kv: &["kv_write", "rope_write"],
    },
    Family {
        name: "attention",
        sources: &[POOL, source!("attention")],
        plain: &["attention_reduce"],
        weights: &[],
        kv: &["attention_split", "attention_tiled"],
    },
    Family {
        name: "append",
        sources: &[POOL, source!("append")],
        plain: &[],
        weights: &[],
        kv: &["attention_append"],
    },
    Family {
        name: "conv",
        sources: &[source!("conv")],
        plain: &["short_conv"],
        weights: &[],
        kv: &[],
    },
    Family {
        name: "choose",
        sources: &[source!("choose"), source!("sample")],
        plain: &["argmax_parts", "argmax_pick", "penalise", "gather", "draw_token"],
        weights: &[],
        kv: &[],
    },
];

/// The weight types that have kernels of their own.
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

/// The weight types that the kernels of any type read besides.
pub(crate) const MORE_TYPES: &[TensorType] = &[
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::IQ1_S,
    TensorType::IQ1_M,
    TensorType::IQ2_XXS,
    TensorType::IQ2_XS,
    TensorType::IQ2_S,
    TensorType::IQ3_XXS,
    TensorType::IQ3_S,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
    TensorType::TQ1_0,
    TensorType::TQ2_0,
    TensorType::NVFP4,
];

/// Whether some kernel reads the type.
pub(crate) fn reads(ty: TensorType) -> bool {
    WEIGHT_TYPES.contains(&ty) || MORE_TYPES.contains(&ty)
}

/// The types that keys and values are stored in.
pub(crate) const KV_TYPES: &[TensorType] = &[TensorType::F32, TensorType::F16, TensorType::Q8_0];

/// The entry name of a kernel with an instance for each type: the kernel, then the type in lower
/// case.
pub(crate) fn entry(kernel: &str, ty: TensorType) -> String {
    format!("{kernel}_{}", ty.name().to_ascii_lowercase())
}

/// The kernel for matrices of these types, up to three, and its function constants behind the
/// four of its own: that of the type where there is one, else the kernel of any type.
pub(crate) fn typed(kernel: &str, types: &[TensorType], own: &[u32]) -> (String, Vec<u32>) {
    let first = types[0];
    if WEIGHT_TYPES.contains(&first) && types.iter().all(|ty| *ty == first) {
        return (entry(kernel, first), own.to_vec());
    }
    (format!("{kernel}_any"), numbered(types, own))
}

/// Four function constants of a kernel's own, then the types of up to three matrices.
pub(crate) fn numbered(types: &[TensorType], own: &[u32]) -> Vec<u32> {
    let number = |i: usize| types[i.min(types.len() - 1)].id();
    let mut constants = own.to_vec();
    constants.resize(4, 0);
    constants.extend((0..3).map(number));
    constants
}

/// Four function constants of a kernel's own, then the pieces that the cache has.
pub(crate) fn pieced(own: &[u32], pieces: usize) -> Vec<u32> {
    let mut constants = own.to_vec();
    constants.resize(PIECES_AT, 0);
    constants.push(pieces as u32);
    constants
}

/// The function constant that says how many pieces the cache has.
pub(crate) const PIECES_AT: usize = 4;

impl Family {
    /// The parts as one source, as the driver gets it: errors are told by part and line.
    pub(crate) fn source(&self) -> String {
        let part = |(name, text): &(&str, &str)| format!("#line 1 \"{name}\"\n{text}\n");
        self.sources.iter().map(part).collect()
    }

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
pub(crate) fn every_entry() -> impl Iterator<Item = (String, Vec<u32>)> {
    FAMILIES.iter().flat_map(Family::entries).map(|name| {
        let constants = match FAMILIES[family_of(&name).unwrap_or(0)].name {
            "attention" | "append" => pieced(&[1, 4, 4, 4], 1),
            "rope" => pieced(&[], 1),
            "embed" | "matvec" | "matmul" => numbered(&[TensorType::Q2_K], &[2, 1, 4, 0]),
            _ => Vec::new(),
        };
        (name, constants)
    })
}

/// The family that holds the entry called `name`.
pub(crate) fn family_of(name: &str) -> Option<usize> {
    FAMILIES.iter().position(|f| f.entries().iter().any(|e| e == name))
}
