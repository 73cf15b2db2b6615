//! The kernel sources and the names of their entries, in one place each. It knows no op.

use std::borrow::Cow;
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Result};

use crate::compiler::Compiler;
use crate::driver::{Gpu, Module};
use crate::fast::planes;
use crate::fast::stage::{ROWS_THREADS, THREADS};
use crate::fast::tape;
use crate::rows;

/// Headers by the names under which the sources include them.
pub(crate) static HEADERS: &[(&str, &str)] = &[
    ("../layout.cuh", include_str!("../kernels/layout.cuh")),
    ("layout.cuh", include_str!("../kernels/layout.cuh")),
    ("weights.cuh", include_str!("../kernels/weights.cuh")),
    ("codebooks.cuh", include_str!("../kernels/codebooks.cuh")),
    ("../rare.cuh", include_str!("../kernels/rare.cuh")),
    ("../activate.cuh", include_str!("../kernels/activate.cuh")),
    ("../chosen.cuh", include_str!("../kernels/chosen.cuh")),
    ("../planes.cuh", include_str!("../kernels/planes.cuh")),
    ("planes.cuh", include_str!("../kernels/planes.cuh")),
    ("../keys.cuh", include_str!("../kernels/keys.cuh")),
    ("keys.cuh", include_str!("../kernels/keys.cuh")),
    ("../rounding.cuh", include_str!("../kernels/rounding.cuh")),
    ("../tensor.cuh", include_str!("../kernels/tensor.cuh")),
    ("tensor.cuh", include_str!("../kernels/tensor.cuh")),
    ("../tiles.cuh", include_str!("../kernels/tiles.cuh")),
    ("../cache.cuh", include_str!("../kernels/cache.cuh")),
    ("../turns.cuh", include_str!("../kernels/turns.cuh")),
    ("../wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
    ("formats.cuh", include_str!("../kernels/mma/formats.cuh")),
    ("cluster.cuh", include_str!("../kernels/mma/cluster.cuh")),
    ("stage.cuh", include_str!("../kernels/fast/stage.cuh")),
    ("attend.cuh", include_str!("../kernels/fast/attend.cuh")),
    ("room.cuh", include_str!("../kernels/tape/room.cuh")),
    ("dense.cuh", include_str!("../kernels/tape/dense.cuh")),
    ("deep.cuh", include_str!("../kernels/tape/deep.cuh")),
    ("boxes.cuh", include_str!("../kernels/tape/boxes.cuh")),
    ("heads.cuh", include_str!("../kernels/tape/heads.cuh")),
    ("links.cuh", include_str!("../kernels/tape/links.cuh")),
    ("forms.cuh", include_str!("../kernels/tape/forms.cuh")),
];

/// A constant that a fast kernel is compiled with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Define {
    name: &'static str,
    value: Cow<'static, str>,
}

impl Define {
    pub(crate) fn number(name: &'static str, value: u32) -> Define {
        Define { name, value: value.to_string().into() }
    }

    pub(crate) fn text(name: &'static str, value: &'static str) -> Define {
        Define { name, value: value.into() }
    }

    /// The format of keys and values, as all kernels of attention call it.
    pub(crate) fn cache(ty: KvType) -> Define {
        let value = match ty {
            KvType::F32 => "KvF32",
            KvType::F16 => "KvF16",
            KvType::Q8_0 => "KvQ8_0",
        };
        Define::text("Kv", value)
    }

    /// A format that has planes, as planes.cuh calls it.
    pub(crate) fn planes(name: &'static str, ty: TensorType) -> Define {
        Define { name, value: format!("P_{}", ty.name()).into() }
    }
}

/// The fast kernels, by name.
static FAST: &[(&str, &str)] = &[
    ("retile", include_str!("../kernels/fast/retile.cu")),
    ("decode", include_str!("../kernels/fast/decode.cu")),
    ("rows", include_str!("../kernels/fast/rows.cu")),
    ("lay", include_str!("../kernels/tape/lay.cu")),
    ("tape", include_str!("../kernels/tape/tape.cu")),
    ("round", include_str!("../kernels/mma/round.cu")),
    ("products", include_str!("../kernels/mma/products.cu")),
    ("turn", include_str!("../kernels/mma/turn.cu")),
    ("few", include_str!("../kernels/mma/few.cu")),
    ("many", include_str!("../kernels/prefill/many.cu")),
    ("expand", include_str!("../kernels/prefill/expand.cu")),
    ("gemm", include_str!("../kernels/prefill/gemm.cu")),
];

/// What a timing of the ways to decode depends on.
pub(crate) fn decoding_sources() -> Vec<&'static str> {
    let decodes = |name: &str| ["decode", "tape", "products", "few"].contains(&name);
    let sources = FAST.iter().filter(|f| decodes(f.0)).map(|f| f.1);
    sources.chain(HEADERS.iter().map(|h| h.1)).collect()
}

/// Every source by its name, as it is in the file.
#[cfg(test)]
pub(crate) fn sources() -> impl Iterator<Item = (&'static str, &'static str)> {
    families().iter().map(|f| (f.name, f.source)).chain(FAST.iter().copied())
}

/// The source of a fast kernel with these formats and constants.
pub(crate) fn fast_source(name: &str, types: &[TensorType], defines: &[Define]) -> String {
    let list: Vec<String> = types
        .iter()
        .map(|ty| {
            let (upper, number) = (ty.name(), planes::number(*ty).unwrap_or_default());
            format!("M({upper}, {}, {number})", upper.to_ascii_lowercase())
        })
        .collect();
    let mut text = format!("#define EACH_PLANED(M) {}\n", list.join(" "));
    for d in defines {
        text.push_str(&format!("#define {} {}\n", d.name, d.value));
    }
    if name == "tape" {
        text.push_str(TAPE_RING);
    }
    let body = FAST.iter().find(|f| f.0 == name).map_or("", |f| f.1);
    text.push_str("#line 1\n");
    text.push_str(body);
    text
}

/// As many pieces as shared memory has room for; the kernel says what it needs then.
const TAPE_RING: &str = "\
#define RING ((SHARED_LIMIT - AT_RING) / SLOT_STRIDE)
#define SLOTS (RING < 28 ? RING : 28)
";

/// A fast kernel as some models need it: its name, formats and constants.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The source's name.
    pub name: &'static str,
    types: Vec<TensorType>,
    defines: Vec<Define>,
}

impl Variant {
    pub(crate) fn of(name: &'static str, types: &[TensorType], defines: &[Define]) -> Variant {
        Variant { name, types: types.to_vec(), defines: defines.to_vec() }
    }

    /// Whether its instructions are those of GPUs of this architecture.
    pub fn runs_on(&self, arch: u32) -> bool {
        !["gemm", "tape"].contains(&self.name) || arch == 90
    }

    /// What tells it from its like.
    pub fn label(&self) -> String {
        let types: Vec<&str> = self.types.iter().map(|ty| ty.name()).collect();
        let defines: Vec<String> =
            self.defines.iter().map(|d| format!("{}={}", d.name, d.value)).collect();
        let types = if types.len() > 3 { "all formats".to_string() } else { types.join("+") };
        format!("{} {types} {}", self.name, defines.join(" "))
    }
}

/// The constants of whole steps.
pub(crate) fn decode_defines(
    (dim, share): (u32, u32),
    kv: KvType,
    (rows, depth): (u32, u32),
    types: &[TensorType],
) -> [Define; 7] {
    [
        Define::number("THREADS_AT_ONCE", THREADS),
        Define::number("DIM", dim),
        Define::number("HEADS_PER_KV", share),
        Define::cache(kv),
        Define::number("ROWS_AT_ONCE", rows),
        Define::number("DEPTH", depth),
        Define::number("SLOT_BYTES", slot(types)),
    ]
}

/// Bytes of a chunk of the largest of these formats.
pub(crate) fn slot(types: &[TensorType]) -> u32 {
    types.iter().map(|ty| planes::slot_bytes(*ty)).max().unwrap_or(576)
}

/// The constants of the kernel for any number of rows.
pub(crate) fn rows_defines(rows: u32, depth: u32) -> [Define; 4] {
    [
        Define::number("ROWS_AT_ONCE", rows),
        Define::number("THREADS_AT_ONCE", ROWS_THREADS),
        Define::number("DEPTH", depth),
        Define::number("SLOT_BYTES", slot(planes::PLANED)),
    ]
}

/// The fast kernels of common models: what is compiled ahead, and what the checks compile.
pub fn variants() -> Vec<Variant> {
    use TensorType::{Q4_0, Q4_K, Q6_K, Q8_0};
    let all = || planes::PLANED.to_vec();
    let mut list = vec![
        Variant { name: "retile", types: all(), defines: Vec::new() },
        Variant { name: "rows", types: all(), defines: rows_defines(8, 4).to_vec() },
    ];
    let sets = [vec![Q8_0], vec![Q4_K, Q6_K], vec![Q4_K], vec![Q4_0]];
    for (types, shape, kv, rows) in [
        (0, (128, 2), KvType::F16, (1, 16)),
        (0, (128, 2), KvType::Q8_0, (1, 16)),
        (0, (128, 4), KvType::F16, (1, 16)),
        (0, (64, 4), KvType::F16, (1, 16)),
        (0, (64, 3), KvType::F16, (1, 16)),
        (0, (64, 7), KvType::F16, (1, 16)),
        (0, (256, 4), KvType::F16, (1, 16)),
        (0, (128, 2), KvType::F32, (4, 16)),
        (1, (128, 4), KvType::F16, (1, 16)),
        (2, (128, 4), KvType::F16, (1, 16)),
        (2, (64, 4), KvType::F16, (1, 16)),
        (3, (128, 2), KvType::F16, (1, 16)),
    ] {
        let defines = decode_defines(shape, kv, rows, &sets[types]).to_vec();
        list.push(Variant { name: "decode", types: sets[types].clone(), defines });
    }
    list.push(Variant { name: "lay", types: all(), defines: Vec::new() });
    list.extend(tape::variants());
    list.extend(rows::variants());
    list
}

impl Compiler {
    /// Compiles a fast kernel; returns the bytes of its machine code.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub fn compile_variant(&self, variant: &Variant, arch: u32) -> Result<usize> {
        let Variant { name, types, defines } = variant;
        Ok(self.cubin(&format!("{name}.cu"), &fast_source(name, types, defines), arch)?.len())
    }
}

/// A fast kernel with these formats and constants, compiled and loaded.
pub(crate) fn load(
    gpu: &Arc<Gpu>,
    compiler: &Compiler,
    name: &str,
    types: &[TensorType],
    defines: &[Define],
) -> Result<Arc<Module>> {
    let code =
        compiler.cubin(&format!("{name}.cu"), &fast_source(name, types, defines), gpu.arch)?;
    gpu.module(&code)
}

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
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::IQ2_XXS,
    TensorType::IQ2_XS,
    TensorType::IQ2_S,
    TensorType::IQ3_XXS,
    TensorType::IQ3_S,
    TensorType::IQ1_S,
    TensorType::IQ1_M,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
    TensorType::TQ1_0,
    TensorType::TQ2_0,
    TensorType::NVFP4,
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
            entries: &[("select_rows", Suffix::None)],
        },
        Family {
            name: "moe",
            source: include_str!("../kernels/moe/moe.cu"),
            entries: &[
                ("moe_route", Suffix::None),
                ("moe_product", W),
                ("moe_act", Suffix::None),
                ("moe_sum", Suffix::None),
            ],
        },
        Family {
            name: "conv",
            source: include_str!("../kernels/conv/conv.cu"),
            entries: &[("short_conv", Suffix::None)],
        },
        Family {
            name: "convert",
            source: include_str!("../kernels/convert/convert.cu"),
            entries: &[("round_rows", Suffix::None), ("activate_rows", Suffix::None)],
        },
        Family {
            name: "sample",
            source: include_str!("../kernels/sample/sample.cu"),
            entries: &[
                ("note_tokens", Suffix::None),
                ("survey", Suffix::None),
                ("penalise", Suffix::None),
                ("gather", Suffix::None),
                ("draw_token", Suffix::None),
                ("pick", Suffix::None),
            ],
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
        let kv = [TensorType::F32, TensorType::F16, TensorType::Q8_0];
        let names = |(kernel, suffix): &(&str, Suffix)| match suffix {
            Suffix::None => vec![(*kernel).to_string()],
            Suffix::Weight => types.iter().map(|ty| entry(kernel, *ty)).collect(),
            Suffix::Kv => kv.iter().map(|ty| entry(kernel, *ty)).collect(),
        };
        self.entries.iter().flat_map(names).collect()
    }
}
