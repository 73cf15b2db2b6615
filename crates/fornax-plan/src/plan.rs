//! The flat plan of a model: its ops in order, the values between them, and what they read.
//! It knows nothing of files, families or devices.

use std::fmt;
use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType};

use crate::ids::{RopeId, StateId, ValueId, WeightId};
use crate::op::{KvRef, Linear, Op};

/// Which rows a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSpace {
    /// One row per token of the step.
    Tokens,
    /// One row per wanted row of the step.
    Wanted,
}

/// The element type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// 32-bit float.
    F32,
    /// 32-bit unsigned integer (expert ids).
    U32,
}

/// A value: a matrix of activations, written by one op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueSpec {
    /// What it is, for dumps and profiles.
    pub name: String,
    /// Its rows.
    pub rows: RowSpace,
    /// Its columns.
    pub width: u32,
    /// Its element type.
    pub ty: ValueType,
}

/// A weight: bytes in their GGUF format inside a shared map, never copied on the way here.
#[derive(Clone)]
pub struct WeightRef {
    /// The tensor's name in the file.
    pub name: String,
    /// The block format.
    pub ty: TensorType,
    /// Elements of one row, the fastest dimension.
    pub cols: u32,
    /// Rows of one expert.
    pub rows: u32,
    /// 1 for an ordinary matrix; experts are stored one after the other.
    pub experts: u32,
    /// The map that holds the bytes.
    pub data: Arc<Mapping>,
    /// Byte offset of the first block in the map.
    pub offset: usize,
}

impl WeightRef {
    /// A weight of plain floats in memory of its own (computed tables, tests).
    pub fn from_f32(name: &str, rows: u32, cols: u32, values: &[f32]) -> WeightRef {
        assert_eq!(values.len(), rows as usize * cols as usize, "{name}: shape against values");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        WeightRef {
            name: name.to_string(),
            ty: TensorType::F32,
            cols,
            rows,
            experts: 1,
            data: Arc::new(Mapping::from_vec(bytes)),
            offset: 0,
        }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols as usize / self.ty.block_len() * self.ty.block_bytes()
    }

    /// Bytes of the whole weight.
    pub fn len_bytes(&self) -> usize {
        self.row_bytes() * self.rows as usize * self.experts as usize
    }

    /// All bytes, experts one after the other.
    pub fn bytes(&self) -> &[u8] {
        &self.data.bytes()[self.offset..self.offset + self.len_bytes()]
    }

    /// The bytes of row `row` of expert `expert`.
    pub fn row(&self, expert: usize, row: usize) -> &[u8] {
        let at = (expert * self.rows as usize + row) * self.row_bytes();
        &self.bytes()[at..at + self.row_bytes()]
    }

    /// Every element as f32, experts one after the other; for small weights and for oracles.
    pub fn to_f32(&self) -> Vec<f32> {
        let n = self.cols as usize * self.rows as usize * self.experts as usize;
        let mut out = vec![0.0; n];
        fornax_gguf::blocks::dequantize(self.ty, self.bytes(), &mut out)
            .expect("invariant: len_bytes and element count agree");
        out
    }
}

impl fmt::Debug for WeightRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WeightRef { name, ty, cols, rows, experts, .. } = self;
        write!(f, "{name}: {ty:?} {experts}x{rows}x{cols}")
    }
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements 2i and 2i + 1 (Llama files).
    Adjacent,
    /// Elements i and i + n/2 (the NeoX order).
    Halves,
}

/// Rotary positions, every scaling rule already folded into the frequencies by the family.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Which elements form a pair.
    pub pairs: RopePairs,
    /// Radians per position of each pair; twice as many elements are rotated, the rest pass.
    pub inv_freq: Vec<f32>,
    /// Factor on sine and cosine (yarn's attention factor; else 1).
    pub magnitude: f32,
}

/// The layers that share one KV pool geometry and one block table per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// The model's layer numbers.
    pub layers: Vec<u32>,
    /// Keys a row may see, its own included; all of them where absent.
    pub window: Option<u32>,
    /// Key/value heads.
    pub heads: u32,
    /// Elements of one key head.
    pub k_width: u32,
    /// Elements of one value head.
    pub v_width: u32,
}

/// A state of fixed size that each sequence keeps on the device (convolution taps).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// What it is, for dumps.
    pub name: String,
    /// f32 elements per sequence, zero at position 0.
    pub len: u32,
}

/// The ops of one layer; layers of the same `shape` differ in their weights alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpan {
    /// First op.
    pub start: u32,
    /// One past the last op.
    pub end: u32,
    /// Equal for layers that a provider may run in one loop.
    pub shape: u32,
}

/// The model's sizes that a device or an engine asks for without reading the ops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hyper {
    /// The family's name, as the file writes it.
    pub family: String,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Width of the residual stream.
    pub width: u32,
    /// Positions the model was made for.
    pub context: u32,
}

/// A whole model as a flat list of ops.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The ops, in an order in which every value is written before it is read.
    pub ops: Vec<Op>,
    /// The values between them.
    pub values: Vec<ValueSpec>,
    /// Spans of ops that belong to one layer.
    pub layers: Vec<LayerSpan>,
    /// What the ops read from the file.
    pub weights: Vec<WeightRef>,
    /// Rotary tables.
    pub ropes: Vec<RopeTable>,
    /// KV pools.
    pub kv: Vec<KvGroup>,
    /// Per-sequence states.
    pub states: Vec<StateSpec>,
    /// The model's sizes.
    pub hyper: Hyper,
}

impl Plan {
    /// An empty plan for a model of these sizes.
    pub fn new(hyper: Hyper) -> Plan {
        Plan {
            ops: Vec::new(),
            values: Vec::new(),
            layers: Vec::new(),
            weights: Vec::new(),
            ropes: Vec::new(),
            kv: Vec::new(),
            states: Vec::new(),
            hyper,
        }
    }

    /// Adds a value with one row per token.
    pub fn value(&mut self, name: &str, width: u32) -> ValueId {
        self.add_value(name, RowSpace::Tokens, width, ValueType::F32)
    }

    /// Adds a value with one row per wanted row.
    pub fn wanted_value(&mut self, name: &str, width: u32) -> ValueId {
        self.add_value(name, RowSpace::Wanted, width, ValueType::F32)
    }

    /// Adds a value of unsigned integers with one row per token.
    pub fn index_value(&mut self, name: &str, width: u32) -> ValueId {
        self.add_value(name, RowSpace::Tokens, width, ValueType::U32)
    }

    fn add_value(&mut self, name: &str, rows: RowSpace, width: u32, ty: ValueType) -> ValueId {
        self.values.push(ValueSpec { name: name.to_string(), rows, width, ty });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds a weight.
    pub fn weight(&mut self, weight: WeightRef) -> WeightId {
        self.weights.push(weight);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// Adds a rotary table.
    pub fn rope(&mut self, table: RopeTable) -> RopeId {
        self.ropes.push(table);
        RopeId(self.ropes.len() as u32 - 1)
    }

    /// Adds a per-sequence state.
    pub fn state(&mut self, name: &str, len: u32) -> StateId {
        self.states.push(StateSpec { name: name.to_string(), len });
        StateId(self.states.len() as u32 - 1)
    }

    /// Files `layer` under the KV group of this geometry, made at first use.
    pub fn kv_layer(&mut self, layer: u32, geometry: &KvGroup) -> KvRef {
        let same = |g: &KvGroup| {
            (g.window, g.heads, g.k_width, g.v_width)
                == (geometry.window, geometry.heads, geometry.k_width, geometry.v_width)
        };
        let group = self.kv.iter().position(same).unwrap_or_else(|| {
            self.kv.push(KvGroup { layers: Vec::new(), ..geometry.clone() });
            self.kv.len() - 1
        });
        self.kv[group].layers.push(layer);
        KvRef { group: group as u32, layer: self.kv[group].layers.len() as u32 - 1 }
    }

    /// Appends an op.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// The width of a value.
    pub fn width(&self, value: ValueId) -> u32 {
        self.values[value.ix()].width
    }

    /// The width of hidden rows as the host gets them; 0 where the plan hands none out.
    pub fn hidden_width(&self) -> u32 {
        let find = |op: &Op| if let Op::HiddenOut { x } = op { Some(self.width(*x)) } else { None };
        self.ops.iter().find_map(find).unwrap_or(0)
    }

    /// The width of logit rows as the host gets them; 0 where the plan samples nothing.
    pub fn logits_width(&self) -> u32 {
        let find =
            |op: &Op| if let Op::Sample { logits } = op { Some(self.width(*logits)) } else { None };
        self.ops.iter().find_map(find).unwrap_or(0)
    }

    /// How many ops read a value.
    pub fn uses(&self, value: ValueId) -> usize {
        self.ops.iter().map(|op| op.inputs().iter().filter(|v| *v == value).count()).sum()
    }

    /// The f32 values of a small weight (norms, biases, kernels).
    pub fn weight_f32(&self, id: WeightId) -> Vec<f32> {
        self.weights[id.ix()].to_f32()
    }

    /// Bytes of weights that decoding one token of one sequence reads: every matrix once, the
    /// chosen experts alone of a mixture, one row of the embedding table.
    pub fn bytes_per_token(&self) -> u64 {
        self.ops.iter().map(|op| self.op_bytes_per_token(op)).sum()
    }

    /// One op's share of [`Plan::bytes_per_token`].
    pub fn op_bytes_per_token(&self, op: &Op) -> u64 {
        let whole = |id: WeightId| self.weights[id.ix()].len_bytes() as u64;
        match *op {
            Op::Embed { table, .. } => self.weights[table.ix()].row_bytes() as u64,
            Op::MoeMlp { gate, up, down, ids, .. } => {
                let chosen = u64::from(self.width(ids));
                [gate, up, down].iter().map(|l| self.expert_bytes(*l) * chosen).sum()
            }
            _ => op.weights().into_iter().map(whole).sum(),
        }
    }

    fn expert_bytes(&self, linear: Linear) -> u64 {
        let w = &self.weights[linear.weight.ix()];
        (w.len_bytes() / w.experts as usize) as u64
    }
}

/// One line per op, in the form that the snapshot tests keep: `out = op(in; weights) extras`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hyper { family, vocab, width, context } = &self.hyper;
        writeln!(f, "{family}: vocab {vocab}, width {width}, context {context}")?;
        for (ix, g) in self.kv.iter().enumerate() {
            writeln!(
                f,
                "kv {ix}: {} layers, {} heads, k {}, v {}, window {}",
                g.layers.len(),
                g.heads,
                g.k_width,
                g.v_width,
                g.window.map_or("none".to_string(), |w| w.to_string())
            )?;
        }
        for op in &self.ops {
            let value = |v: ValueId| self.values[v.ix()].name.clone();
            let list = |ids: Vec<String>| ids.join(", ");
            let outs = list(op.outputs().iter().map(value).collect());
            let ins = list(op.inputs().iter().map(value).collect());
            let weights =
                list(op.weights().into_iter().map(|w| self.weights[w.ix()].name.clone()).collect());
            let arrow = if outs.is_empty() { String::new() } else { format!("{outs} = ") };
            writeln!(f, "{arrow}{}({ins}; {weights}){}", op.name(), op.constants())?;
        }
        Ok(())
    }
}

impl Op {
    /// The constants of the op that a plan dump shows after its wires.
    pub fn constants(&self) -> String {
        match self {
            Op::Embed { scale, .. } if *scale != 1.0 => format!(" scale {scale}"),
            Op::QkNormRope { rope, dim, .. } => {
                format!(" rope {} dim {dim}", rope.map_or("none".to_string(), |r| r.0.to_string()))
            }
            Op::KvWrite { kv, .. } => format!(" kv {}.{}", kv.group, kv.layer),
            Op::Attention { kv, heads, scale, softcap, .. } => {
                let cap = softcap.map_or(String::new(), |c| format!(" softcap {c}"));
                format!(" kv {}.{} heads {heads} scale {scale}{cap}", kv.group, kv.layer)
            }
            Op::GatedMlp { act, .. } => format!(" {act:?}"),
            Op::MoeMlp { act, .. } => format!(" {act:?}"),
            Op::MoeRoute { top_k, gating, .. } => format!(" top {top_k} {gating:?}"),
            Op::Logits { scale, softcap, .. } => {
                let cap = softcap.map_or(String::new(), |c| format!(" softcap {c}"));
                if *scale == 1.0 { cap } else { format!(" scale {scale}{cap}") }
            }
            _ => String::new(),
        }
    }
}
