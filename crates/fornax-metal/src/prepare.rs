//! A plan's ops as commands: which kernel, which buffers, which constants. Everything that can be
//! decided before the first token is decided here, and what cannot be done is refused by name.
//! It knows no step.

use fornax_gguf::TensorType;
use fornax_plan::liveness::{self, Buffers};
use fornax_plan::{
    ActMode, Activation, Error, KvRef, KvType, Limits, Linear, Op, Plan, Refusal, Result,
    RopePairs, RowSpace, ValueId, ValueType, WeightId,
};

use crate::api::{Buffer, Device, Form};
use crate::args::{
    ArgmaxArgs, AttentionArgs, CopyArgs, EmbedArgs, GatedArgs, KvWriteArgs, MatmulArgs, NormArgs,
    RopeArgs, SelectArgs,
};
use crate::encode::{Axis, Command, Extent, Place, Span};
use crate::feed::Shape;
use crate::hazard::Access::{self, Read, Write};
use crate::{library, stub};

mod lower;

/// Tokens of one KV block.
pub(crate) const KV_BLOCK: u32 = 32;

/// What this form of the device does not do, by name.
pub(crate) fn refusals(plan: &Plan, limits: &Limits, form: Form) -> Vec<Refusal> {
    let (types, wide) = match form {
        Form::Recorded => (stub::WEIGHT_TYPES, u32::MAX),
        Form::Emulated | Form::System => (library::WEIGHT_TYPES, lower::HEAD_WIDTH_MAX),
    };
    let mut all = Vec::new();
    let mut refuse = |what: String, why: String, help: &str| {
        let refusal = Refusal { what, why, help: help.to_string() };
        if !all.contains(&refusal) {
            all.push(refusal);
        }
    };
    if limits.act == Some(ActMode::Q8) {
        let why = "this form computes with 32-bit activations alone".to_string();
        refuse("activations q8".to_string(), why, "ask for f32 activations");
    }
    if stored_as(limits.kv_type, form).is_none() {
        let why = format!("{:?} is not stored by this form", limits.kv_type);
        refuse("kv type".to_string(), why, "use --kv-type f16 or f32, or --device cpu");
    }
    for g in plan.kv.iter().filter(|g| g.k_width.max(g.v_width) > wide) {
        let what = format!("attention heads of {} and {}", g.k_width, g.v_width);
        refuse(what, format!("the kernels hold at most {wide}"), "use --device cpu");
    }
    for op in &plan.ops {
        if matches!(op, Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. }) {
            let why = "this form has no kernel for it".to_string();
            refuse(op.name().to_string(), why, "use --device cpu");
            continue;
        }
        let table = if let Op::Embed { table, .. } = op { Some(*table) } else { None };
        for id in op.linears().iter().map(|l| l.weight).chain(table) {
            let ty = plan.weights[id.ix()].ty;
            if !types.contains(&ty) {
                let what = format!("{} of {ty}", op.name());
                refuse(what, "no kernel reads the type".to_string(), "use --device cpu");
            }
        }
        if let Op::GatedMlp { gate, up, .. } = op {
            let types = [gate, up].map(|l| plan.weights[l.weight.ix()].ty);
            if types[0] != types[1] {
                let what = format!("gated_mlp of {} and {}", types[0], types[1]);
                let why = "gate and up must have one type".to_string();
                refuse(what, why, "use --device cpu");
            }
        }
        let matrices: Vec<WeightId> = op.linears().iter().map(|l| l.weight).chain(table).collect();
        for id in op.weights().into_iter().filter(|id| !matrices.contains(id)) {
            let w = &plan.weights[id.ix()];
            if w.ty != TensorType::F32 {
                let what = format!("{} with {} of {}", op.name(), w.name, w.ty);
                refuse(what, "vectors are read as F32".to_string(), "use --device cpu");
            }
        }
    }
    all
}

/// Everything that a program keeps on the device.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) commands: Vec<Command>,
    /// By group, then by layer: keys and values.
    pub(crate) pools: Vec<Vec<(Buffer, Buffer)>>,
    /// The token that every slot chose last.
    pub(crate) last: Buffer,
    /// The ticket up to which every slot is to stop.
    pub(crate) stop: Buffer,
    pub(crate) scratch_bytes: u64,
    /// The type of what the pools hold.
    pub(crate) kv_type: TensorType,
}

struct Builder<'a> {
    device: &'a Device,
    plan: &'a Plan,
    shape: &'a Shape,
    values: Buffers,
    buffers: Vec<Buffer>,
    weights: Vec<Buffer>,
    ropes: Vec<Buffer>,
    kv_type: TensorType,
    /// Partial results between the two stages of attention and of the choice, by name.
    stages: Vec<(&'static str, Buffer)>,
    /// The most rows of a step or a round.
    rows_max: usize,
    out: Prepared,
}

/// Resolves every op of the plan.
///
/// # Errors
/// `is_malformed` for a plan that contradicts itself, `is_unsupported` for what [`refusals`] names.
pub(crate) fn prepare(
    device: &Device,
    plan: &Plan,
    limits: &Limits,
    shape: &Shape,
) -> Result<Prepared> {
    plan.validate()?;
    if let Some(r) = refusals(plan, limits, device.form()).first() {
        return Err(Error::unsupported(format!("metal: {}: {}; {}", r.what, r.why, r.help)));
    }
    let kv_type = stored_as(limits.kv_type, device.form())
        .ok_or_else(|| Error::unsupported("metal: kv type".to_string()))?;
    let values = liveness::assign(plan);
    let rows = |space| if space == RowSpace::Tokens { limits.rows } else { limits.wanted };
    let chained = limits.slots;
    let words = |b: &liveness::BufferSpec| rows(b.rows).max(chained) as usize * b.width as usize;
    let scratch: usize = values.specs.iter().map(words).sum();
    let buffers = values.specs.iter().map(|b| device.buffer("value", words(b)));
    let weights = plan.weights.iter().map(|w| device.wrap(&w.data, w.offset, w.len_bytes()));
    let ropes = plan.ropes.iter().map(|r| {
        let words: Vec<u32> = r.inv_freq.iter().map(|f| f.to_bits()).collect();
        filled(device, "frequencies", &words)
    });
    let slots = vec![0; limits.slots as usize];
    let mut builder = Builder {
        device,
        plan,
        shape,
        buffers: buffers.collect::<Result<_>>()?,
        values,
        weights: weights.collect::<Result<_>>()?,
        ropes: ropes.collect::<Result<_>>()?,
        kv_type,
        stages: Vec::new(),
        rows_max: limits.rows.max(limits.wanted).max(limits.slots) as usize,
        out: Prepared {
            commands: Vec::new(),
            pools: pools(device, plan, limits, kv_type)?,
            last: filled(device, "last tokens", &slots)?,
            stop: filled(device, "stop tickets", &slots)?,
            scratch_bytes: 4 * scratch as u64,
            kv_type,
        },
    };
    match device.form() {
        Form::Recorded => {
            for (at, op) in plan.ops.iter().enumerate() {
                builder.op(at as u32, op)?;
            }
        }
        Form::Emulated | Form::System => builder.lower()?,
    }
    Ok(builder.out)
}

fn filled(device: &Device, label: &str, words: &[u32]) -> Result<Buffer> {
    let buffer = device.buffer(label, words.len())?;
    device.write(buffer, 0, words);
    Ok(buffer)
}

/// Keys and values by group, then by layer.
fn pools(
    device: &Device,
    plan: &Plan,
    limits: &Limits,
    kv: TensorType,
) -> Result<Vec<Vec<(Buffer, Buffer)>>> {
    let pool = |label, width: u32| {
        let elements = limits.kv_blocks as usize * (KV_BLOCK * width) as usize;
        device.buffer(label, elements * kv.block_bytes() / 4)
    };
    let pair = |g: &fornax_plan::KvGroup| {
        Ok((pool("keys", g.heads * g.k_width)?, pool("values", g.heads * g.v_width)?))
    };
    plan.kv.iter().map(|g| g.layers.iter().map(|_| pair(g)).collect()).collect()
}

/// How a form stores keys and values; none where it cannot.
fn stored_as(kv: KvType, form: Form) -> Option<TensorType> {
    match (kv, form) {
        (KvType::F32, _) => Some(TensorType::F32),
        (KvType::F16, Form::Emulated | Form::System) => Some(TensorType::F16),
        _ => None,
    }
}

type Arg = Option<(Place, Access)>;

impl Builder<'_> {
    fn value(&self, v: ValueId, access: Access) -> Arg {
        debug_assert_eq!(self.plan.values[v.ix()].ty, ValueType::F32);
        let buffer = self.buffers[self.values.ix(v)];
        Some((Place::Value(buffer, self.plan.width(v) as usize), access))
    }

    fn weight(&self, id: WeightId) -> Arg {
        Some((Place::Fixed(self.weights[id.ix()].all()), Read))
    }

    fn optional(&self, id: Option<WeightId>) -> Arg {
        id.and_then(|id| self.weight(id))
    }

    fn extent(&self, v: ValueId) -> Extent {
        match self.plan.values[v.ix()].rows {
            RowSpace::Tokens => Extent::Rows,
            RowSpace::Wanted => Extent::Wanted,
        }
    }

    fn push(
        &mut self,
        op: u32,
        name: &str,
        extent: Extent,
        args: Vec<Arg>,
        constants: Vec<u32>,
    ) -> Result<()> {
        let pipeline = self.device.pipeline(name, &[])?;
        let (when, span) = (0..=u32::MAX, Span { axes: [Axis::Fixed(1); 3], threads: 1 });
        let base_at = None;
        let command = Command { op, pipeline, args, constants, base_at, extent, when, span };
        self.out.commands.push(command);
        Ok(())
    }

    fn op(&mut self, at: u32, op: &Op) -> Result<()> {
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let args = vec![
                    self.weight(table),
                    Some((Place::Rows, Read)),
                    Some((Place::Fixed(self.out.last.all()), Read)),
                    self.value(out, Write),
                ];
                let constants = EmbedArgs { rows: 0, width: w.cols, vocab: w.rows, scale }.words();
                self.push(at, &stub::entry("embed", w.ty), Extent::Rows, args, constants)
            }
            Op::RmsNorm { x, weight, eps, residual, out } => {
                let args = vec![
                    self.value(x, Read),
                    self.weight(weight),
                    residual.and_then(|r| self.value(r, Read)),
                    self.value(out, Write),
                ];
                let residual = u32::from(residual.is_some());
                let width = self.plan.width(x);
                let constants = NormArgs { rows: 0, width, eps, residual }.words();
                self.push(at, "rms_norm", self.extent(x), args, constants)
            }
            Op::MatMul { x, linear, residual, out } => {
                self.matmul(at, x, linear, residual, out, (1.0, None))
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                self.matmul(at, x, q, None, q_out, (1.0, None))?;
                self.matmul(at, x, k, None, k_out, (1.0, None))?;
                self.matmul(at, x, v, None, v_out, (1.0, None))
            }
            Op::QkNormRope { q, k, q_norm, k_norm, q_out, k_out, .. } => {
                self.norm_rope(at, op, q, q_norm, q_out)?;
                self.norm_rope(at, op, k, k_norm, k_out)
            }
            Op::KvWrite { k, v, kv } => self.kv_write(at, k, v, kv),
            Op::Attention { .. } => self.attention(at, op),
            Op::GatedMlp { x, gate, up, act, out } => self.gated(at, x, [gate, up], act, out),
            Op::SelectRows { x, out } => {
                let x_arg = match self.value(x, Read) {
                    // Any row may be chosen, so the whole buffer is read.
                    Some((Place::Value(buffer, _), access)) => {
                        Some((Place::Fixed(buffer.all()), access))
                    }
                    other => other,
                };
                let args = vec![x_arg, Some((Place::Wanted, Read)), self.value(out, Write)];
                let constants = SelectArgs { rows: 0, width: self.plan.width(x) }.words();
                self.push(at, "select_rows", Extent::Wanted, args, constants)
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                self.matmul(at, x, linear, None, out, (scale, softcap))?;
                self.copy(at, out, Place::Logits)
            }
            Op::Sample { logits } => self.argmax(at, logits),
            Op::HiddenOut { x } => self.copy(at, x, Place::Hidden),
            Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. } => {
                Err(Error::unsupported(format!("metal: no kernel for {}", op.name())))
            }
        }
    }

    fn matmul(
        &mut self,
        at: u32,
        x: ValueId,
        linear: Linear,
        residual: Option<ValueId>,
        out: ValueId,
        (scale, softcap): (f32, Option<f32>),
    ) -> Result<()> {
        let w = &self.plan.weights[linear.weight.ix()];
        let args = vec![
            self.weight(linear.weight),
            self.value(x, Read),
            self.optional(linear.bias),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let constants = MatmulArgs {
            rows: 0,
            cols: w.cols,
            outs: w.rows,
            bias: u32::from(linear.bias.is_some()),
            residual: u32::from(residual.is_some()),
            scale,
            softcap: softcap.unwrap_or(0.0),
        };
        let name = stub::entry("matmul", w.ty);
        self.push(at, &name, self.extent(x), args, constants.words())
    }

    fn gated(
        &mut self,
        at: u32,
        x: ValueId,
        [gate, up]: [Linear; 2],
        act: Activation,
        out: ValueId,
    ) -> Result<()> {
        let w = &self.plan.weights[gate.weight.ix()];
        let args = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x, Read),
            self.optional(gate.bias),
            self.optional(up.bias),
            self.value(out, Write),
        ];
        let (act, alpha, limit) = match act {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
        };
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let (cols, outs) = (w.cols, w.rows);
        let constants =
            GatedArgs { rows: 0, cols, outs, bias, act, alpha, limit, eps: 0.0 }.words();
        self.push(at, &stub::entry("gated_mlp", w.ty), self.extent(x), args, constants)
    }

    fn norm_rope(
        &mut self,
        at: u32,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Result<()> {
        let Op::QkNormRope { eps, rope, dim, .. } = *op else { return Ok(()) };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let args = vec![
            self.value(x, Read),
            self.optional(norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            self.value(out, Write),
        ];
        let constants = RopeArgs {
            rows: 0,
            heads: self.plan.width(x) / dim,
            dim,
            norm: u32::from(norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
        };
        self.push(at, "norm_rope", Extent::Rows, args, constants.words())
    }

    fn kv_write(&mut self, at: u32, k: ValueId, v: ValueId, kv: KvRef) -> Result<()> {
        let (keys, values) = self.out.pools[kv.group as usize][kv.layer as usize];
        let args = vec![
            self.value(k, Read),
            self.value(v, Read),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
            Some((Place::Fixed(keys.all()), Write)),
            Some((Place::Fixed(values.all()), Write)),
        ];
        let constants = KvWriteArgs {
            rows: 0,
            k_width: self.plan.width(k),
            v_width: self.plan.width(v),
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
        };
        self.push(at, "kv_write", Extent::Rows, args, constants.words())
    }

    fn attention(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = *op else {
            return Ok(());
        };
        let group = &self.plan.kv[kv.group as usize];
        let (keys, values) = self.out.pools[kv.group as usize][kv.layer as usize];
        let args = vec![
            self.value(q, Read),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
            Some((Place::Fixed(keys.all()), Read)),
            Some((Place::Fixed(values.all()), Read)),
            self.optional(sinks),
            self.value(out, Write),
        ];
        let constants = AttentionArgs {
            rows: 0,
            heads,
            kv_heads: group.heads,
            k_width: group.k_width,
            v_width: group.v_width,
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
            window: group.window.unwrap_or(0),
            scale,
            softcap: softcap.unwrap_or(0.0),
            sinks: u32::from(sinks.is_some()),
            splits: 1,
        };
        self.push(at, "attention", Extent::Rows, args, constants.words())
    }

    fn argmax(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let args = vec![
            self.value(logits, Read),
            Some((Place::Wanted, Read)),
            Some((Place::AllRows, Write)),
            Some((Place::Fixed(self.out.last.all()), Write)),
            Some((Place::Stops, Read)),
            Some((Place::Fixed(self.out.stop.all()), Read)),
            Some((Place::Out, Write)),
        ];
        let (first, next) = self.shape.out_counts();
        let constants = ArgmaxArgs {
            rows: 0,
            vocab: self.plan.width(logits),
            base: 0,
            out_first: first as u32,
            out_next: next as u32,
        };
        self.push(at, "argmax", Extent::Wanted, args, constants.words())?;
        if let Some(command) = self.out.commands.last_mut() {
            command.base_at = Some(2);
        }
        Ok(())
    }

    fn copy(&mut self, at: u32, x: ValueId, to: Place) -> Result<()> {
        let args = vec![self.value(x, Read), Some((to, Write))];
        let constants = CopyArgs { rows: 0, width: self.plan.width(x) }.words();
        self.push(at, "copy", Extent::FirstWanted, args, constants)
    }
}
