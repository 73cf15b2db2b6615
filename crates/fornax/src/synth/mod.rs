//! Models of random weights in the shapes of known ones, as GGUF bytes: for speed, where the answer does not matter.
//! Knows no device and runs nothing.

mod fill;
mod shape;
mod vocabulary;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::Write;

use anyhow::{Context, Result, bail};
use fornax_gguf::{GgufWriter, Metadata, TensorType};

use self::fill::{Pool, Rng};
use self::shape::{SHAPES, Shape};
use crate::convert;

/// The same weights for everybody.
const SEED: u64 = 0x666f_726e_6178;
/// Matrix types that a synthetic model can have.
const TYPES: &[TensorType] = {
    use TensorType::{BF16, F16, Q4_0, Q4_1, Q4_K, Q8_0};
    &[Q8_0, Q4_K, Q4_0, Q4_1, F16, BF16]
};

/// A shape and the type of its matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synthetic {
    shape: &'static Shape,
    ty: TensorType,
}

/// One tensor to write.
struct Tensor {
    name: String,
    dims: Vec<u64>,
    ty: TensorType,
    content: Content,
}

enum Content {
    /// Normal with this standard deviation.
    Random(f32),
    Given(Vec<f32>),
}

impl Synthetic {
    /// Reads `SHAPE:TYPE`.
    ///
    /// # Errors
    /// Lists what there is where the text names none of it.
    pub(crate) fn parse(text: &str) -> Result<Synthetic> {
        let names = || SHAPES.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
        let types = || TYPES.iter().map(|t| t.name().to_lowercase()).collect::<Vec<_>>().join(", ");
        let Some((shape, ty)) = text.split_once(':') else {
            bail!("{text:?} is no SHAPE:TYPE; shapes are {}, types {}", names(), types());
        };
        let shape = SHAPES
            .iter()
            .find(|s| s.name == shape)
            .with_context(|| format!("there is no shape {shape:?}; there are {}", names()))?;
        let ty = TensorType::parse(ty).filter(|ty| TYPES.contains(ty)).with_context(|| {
            format!("a synthetic model has no type {ty:?}; there are {}", types())
        })?;
        Ok(Synthetic { shape, ty })
    }

    /// `smollm2-135m:q8_0`.
    pub(crate) fn name(self) -> String {
        format!("{}:{}", self.shape.name, self.ty.name().to_lowercase())
    }

    /// Writes the file.
    ///
    /// # Errors
    /// When `out` fails.
    pub(crate) fn write<W: Write>(self, out: W) -> Result<W> {
        let metadata = self.metadata();
        let tensors = self.tensors();
        let mut writer = GgufWriter::new(&metadata)?;
        for t in &tensors {
            writer.tensor(&t.name, t.ty, &t.dims)?;
        }
        let mut data = writer.begin(out)?;
        let mut rng = Rng(SEED);
        let mut pools: HashMap<(TensorType, u32), Pool> = HashMap::new();
        for t in &tensors {
            match &t.content {
                Content::Given(values) => {
                    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    data.write(&bytes)?;
                }
                Content::Random(deviation) => {
                    let key = (t.ty, deviation.to_bits());
                    let pool = match pools.entry(key) {
                        Entry::Occupied(made) => made.into_mut(),
                        Entry::Vacant(gap) => gap.insert(Pool::new(t.ty, *deviation, &mut rng)?),
                    };
                    let len = t.ty.row_bytes(t.dims[0]).context("rows are no whole blocks")?
                        * t.dims[1..].iter().product::<u64>();
                    pool.pour(len, &mut rng, |bytes| Ok(data.write(bytes)?))?;
                }
            }
        }
        Ok(data.finish()?)
    }

    fn metadata(self) -> Metadata {
        let s = self.shape;
        let mut m = Metadata::new();
        m.set("general.architecture", s.family);
        m.set("general.type", "model");
        m.set("general.name", format!("{} with random weights", s.name));
        if let Some(number) = convert::file_type(self.ty) {
            m.set("general.file_type", number);
        }
        m.set("general.quantization_version", 2_u32);
        let mut set =
            |key: &str, value: fornax_gguf::Value| m.set(&format!("{}.{key}", s.family), value);
        set("vocab_size", s.vocab.into());
        set("block_count", s.layers.into());
        set("context_length", s.context.into());
        set("embedding_length", s.width.into());
        set("feed_forward_length", s.ff_width.into());
        set("attention.head_count", s.heads.into());
        set("attention.head_count_kv", s.kv_heads.into());
        set("attention.key_length", s.head_width.into());
        set("attention.value_length", s.head_width.into());
        set("attention.layer_norm_rms_epsilon", s.norm_epsilon.into());
        set("rope.dimension_count", s.head_width.into());
        set("rope.freq_base", s.rope_base.into());
        if let Some(window) = s.window {
            set("attention.sliding_window", window.into());
        }
        vocabulary::describe(&mut m, s.vocab, s.pre);
        m
    }

    fn tensors(self) -> Vec<Tensor> {
        let s = self.shape;
        let (width, ff) = (u64::from(s.width), u64::from(s.ff_width));
        let q = u64::from(s.heads * s.head_width);
        let kv = u64::from(s.kv_heads * s.head_width);
        let mut all = vec![self.matrix("token_embd.weight".into(), width, s.vocab.into())];
        if let Some(factor) = s.rope_stretch {
            all.push(ones("rope_freqs.weight".into(), stretch(s, factor)));
        }
        for layer in 0..s.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            all.push(norm(name("attn_norm"), s.width));
            all.push(self.matrix(name("attn_q"), width, q));
            all.push(self.matrix(name("attn_k"), width, kv));
            all.push(self.matrix(name("attn_v"), width, kv));
            if s.head_norms {
                all.push(norm(name("attn_q_norm"), s.head_width));
                all.push(norm(name("attn_k_norm"), s.head_width));
            }
            all.push(self.matrix(name("attn_output"), q, width));
            if s.result_norms {
                all.push(norm(name("post_attention_norm"), s.width));
                all.push(norm(name("post_ffw_norm"), s.width));
            }
            all.push(norm(name("ffn_norm"), s.width));
            all.push(self.matrix(name("ffn_gate"), width, ff));
            all.push(self.matrix(name("ffn_up"), width, ff));
            all.push(self.matrix(name("ffn_down"), ff, width));
        }
        all.push(norm("output_norm.weight".into(), s.width));
        if !s.tied {
            all.push(self.matrix("output.weight".into(), width, s.vocab.into()));
        }
        all
    }

    /// A matrix whose products of unit vectors are of the size of one.
    fn matrix(self, name: String, cols: u64, rows: u64) -> Tensor {
        let is_output = convert::is_output(&name, !self.shape.tied);
        let dims = vec![cols, rows];
        let ty = convert::target(&name, &dims, is_output, self.ty).unwrap_or(TensorType::F32);
        Tensor { name, dims, ty, content: Content::Random(1.0 / (cols as f32).sqrt()) }
    }
}

fn norm(name: String, width: u32) -> Tensor {
    ones(name, vec![1.0; width as usize])
}

fn ones(name: String, values: Vec<f32>) -> Tensor {
    let dims = vec![values.len() as u64];
    Tensor { name, dims, ty: TensorType::F32, content: Content::Given(values) }
}

/// Divisors of the rotary frequencies as Llama 3.1 defines them: 1 for fast pairs, `factor` for slow
/// ones, a ramp between wavelengths of 2048 and 8192 positions.
fn stretch(shape: &Shape, factor: f32) -> Vec<f32> {
    const TRAINED: f32 = 8192.0;
    const LOW: f32 = 1.0;
    const HIGH: f32 = 4.0;
    let n = shape.head_width;
    (0..n / 2)
        .map(|i| {
            let frequency = shape.rope_base.powf(-(2.0 * i as f32) / n as f32);
            let turns = TRAINED * frequency / std::f32::consts::TAU;
            let fast = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
            1.0 / ((1.0 - fast) / factor + fast)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use fornax_engine::Model;
    use fornax_gguf::Gguf;

    use super::*;

    #[test]
    fn names_are_shapes_and_types() {
        assert_eq!(Synthetic::parse("llama-8b:q4_k").unwrap().name(), "llama-8b:q4_k");
        for bad in ["llama-8b", "llama-9b:q8_0", "llama-8b:q2_k", ":"] {
            assert!(Synthetic::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shapes_have_the_published_numbers_of_parameters() {
        for (name, millions) in [
            ("smollm2-135m:q8_0", 134.5),
            ("smollm2-360m:q8_0", 361.8),
            ("qwen3-0.6b:q8_0", 596.0),
            // Less the biases.
            ("qwen2.5-0.5b:q8_0", 494.0),
            ("gemma-3-270m:q8_0", 268.1),
            ("llama-1b:q8_0", 1235.8),
            ("llama-8b:q8_0", 8030.3),
        ] {
            let tensors = Synthetic::parse(name).unwrap().tensors();
            let count: u64 = tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum();
            let off = (count as f64 / 1e6 - millions).abs();
            assert!(off < 0.1, "{name} has {count} parameters");
        }
    }

    #[test]
    fn a_written_file_opens() {
        let bytes = Synthetic::parse("smollm2-135m:q4_k").unwrap().write(Vec::new()).unwrap();
        let file = Gguf::from_bytes(bytes).unwrap();
        assert_eq!(file.metadata().require_u32("llama.block_count").unwrap(), 30);
        assert_eq!(file.tensors().len(), 30 * 9 + 2);
        let ty = |name| file.tensor(name).unwrap().ty;
        assert_eq!(ty("blk.3.attn_q.weight"), TensorType::Q5_0);
        assert_eq!(ty("blk.3.ffn_down.weight"), TensorType::Q4_K);
        assert_eq!(ty("token_embd.weight"), TensorType::Q8_0);
    }

    #[test]
    fn gemma_looks_back_on_a_window_in_five_layers_of_six() {
        let bytes = Synthetic::parse("gemma-3-270m:q4_k").unwrap().write(Vec::new()).unwrap();
        let model = Model::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap();
        let layers = |window| {
            let group = model.plan().kv.iter().find(|g| g.window == window);
            group.map_or(0, |g| g.layers.len())
        };
        assert_eq!((layers(Some(512)), layers(None)), (15, 3));
    }

    #[test]
    fn stretched_frequencies_are_those_of_llama_3() {
        let f = stretch(Synthetic::parse("llama-1b:f16").unwrap().shape, 32.0);
        assert_eq!((f.len(), f[0], f[31]), (32, 1.0, 32.0));
        assert!(f.windows(2).all(|w| w[0] <= w[1]));
    }
}
