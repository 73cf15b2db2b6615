//! A plan's ops as commands: which kernel, which buffers, which constants. Everything that can be
//! decided before the first token is decided here, and what cannot be done is refused by name.
//! It knows no step.

use fornax_gguf::TensorType;
use fornax_plan::liveness::{self, Buffers};
use fornax_plan::{
    ActMode, Error, KvGroup, KvType, Limits, Op, Plan, Refusal, Result, RowSpace, ValueId,
    ValueType, WeightId,
};

use crate::api::{Buffer, Device};
use crate::encode::{Command, Extent, Place};
use crate::feed::{CHAIN_MAX, STOPS, Shape};
use crate::hazard::Access::{self, Read};
use crate::library;
use crate::policy::Policy;

mod append;
pub(crate) mod attention;
mod calls;
mod choice;
mod conv;
mod linear;
mod lower;
mod moe;

/// Tokens of one KV block.
pub(crate) const KV_BLOCK: u32 = 32;

/// What the kernels do not do, by name.
pub(crate) fn refusals(plan: &Plan, limits: &Limits) -> Vec<Refusal> {
    let wide = attention::HEAD_WIDTH_MAX;
    let mut all = Vec::new();
    let mut refuse = |what: String, why: String, help: &str| {
        let refusal = Refusal { what, why, help: help.to_string() };
        if !all.contains(&refusal) {
            all.push(refusal);
        }
    };
    if limits.act == Some(ActMode::Q8) {
        let why = "the kernels compute with 32-bit activations alone".to_string();
        refuse("activations q8".to_string(), why, "ask for f32 activations");
    }
    if limits.chain > CHAIN_MAX || limits.stops as usize >= STOPS {
        let what = format!("tickets of {} tokens, {} stop tokens", limits.chain, limits.stops);
        let why = format!("there is room for {CHAIN_MAX} and {}", STOPS - 1);
        refuse(what, why, "ask for shorter tickets");
    }
    let odd = |g: &KvGroup| !g.k_width.is_multiple_of(32) || !g.v_width.is_multiple_of(32);
    if limits.kv_type == KvType::Q8_0 && plan.kv.iter().any(odd) {
        let why = "a head's width is not a multiple of 32".to_string();
        refuse("kv type q8_0".to_string(), why, "use --kv-type f16");
    }
    for g in plan.kv.iter().filter(|g| g.k_width.max(g.v_width) > wide) {
        let what = format!("attention heads of {} and {}", g.k_width, g.v_width);
        refuse(what, format!("the kernels hold at most {wide}"), "use --device cpu");
    }
    for op in &plan.ops {
        if let Op::MoeRoute { router, top_k, .. } = op {
            let experts = plan.weights[router.weight.ix()].rows;
            if experts > moe::EXPERTS_MAX || *top_k > moe::CHOSEN_MAX {
                let what = format!("{top_k} of {experts} experts");
                let most = format!("{} of {}", moe::CHOSEN_MAX, moe::EXPERTS_MAX);
                refuse(what, format!("the kernel holds at most {most}"), "use --device cpu");
            }
        }
        for id in matrices(op) {
            let ty = plan.weights[id.ix()].ty;
            if !library::reads(ty) {
                let what = format!("{} of {ty}", op.name());
                refuse(what, "no kernel reads the type".to_string(), "use --device cpu");
            }
        }
    }
    all
}

/// The weights that an op reads in their own format.
fn matrices(op: &Op) -> Vec<WeightId> {
    let table = if let Op::Embed { table, .. } = op { Some(*table) } else { None };
    op.linears().iter().map(|l| l.weight).chain(table).collect()
}

/// The weights that an op reads as F32: norms, biases, taps.
fn vectors(op: &Op) -> impl Iterator<Item = WeightId> {
    let matrices = matrices(op);
    op.weights().into_iter().filter(move |id| !matrices.contains(id))
}

/// Everything that a program keeps on the device.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) commands: Vec<Command>,
    /// By group, then by layer: keys and values.
    pub(crate) pools: Vec<Vec<[Pool; 2]>>,
    /// By state: what it holds for slot after slot.
    pub(crate) states: Vec<Buffer>,
    /// The token that every slot chose last.
    pub(crate) last: Buffer,
    /// The ticket up to which every slot is to stop.
    pub(crate) stop: Buffer,
    pub(crate) scratch_bytes: u64,
    /// The type of what the pools hold.
    pub(crate) kv_type: TensorType,
}

/// Keys or values of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// As [`crate::pieces`] has them.
    pub(crate) pieces: Vec<Buffer>,
}

/// Words of so many blocks of a pool whose tokens are `width` wide.
pub(crate) fn pool_words(kv: TensorType, blocks: u32, width: u32) -> usize {
    let elements = blocks as usize * (KV_BLOCK * width) as usize;
    elements / kv.block_len() * kv.block_bytes() / 4
}

struct Builder<'a> {
    device: &'a Device,
    policy: &'a Policy,
    plan: &'a Plan,
    shape: &'a Shape,
    values: Buffers,
    buffers: Vec<Buffer>,
    weights: Vec<Buffer>,
    ropes: Vec<Buffer>,
    /// The tokens of every slot by position, for penalties.
    history: Buffer,
    kv_type: TensorType,
    /// Partial results between the two stages of attention and of the choice, by name.
    stages: Vec<(&'static str, Buffer)>,
    /// The most rows of a step or a round.
    rows_max: usize,
    /// The most wanted rows of them.
    wanted_max: usize,
    /// One kernel and one order of sums for every number of rows.
    deterministic: bool,
    /// What [`Command::apart`] is of the commands to come.
    apart: Option<bool>,
    out: Prepared,
}

/// Resolves every op of the plan.
///
/// # Errors
/// `is_malformed` for a plan that contradicts itself, `is_unsupported` for what [`refusals`] names.
pub(crate) fn prepare(
    device: &Device,
    policy: &Policy,
    plan: &Plan,
    limits: &Limits,
    shape: &Shape,
) -> Result<Prepared> {
    plan.validate()?;
    if let Some(r) = refusals(plan, limits).first() {
        return Err(Error::unsupported(format!("metal: {}: {}; {}", r.what, r.why, r.help)));
    }
    let kv_type = stored_as(limits.kv_type);
    let values = liveness::assign(plan);
    let rows = |space| if space == RowSpace::Tokens { limits.rows } else { limits.wanted };
    let chained = limits.slots;
    let words = |b: &liveness::BufferSpec| rows(b.rows).max(chained) as usize * b.width as usize;
    let scratch: usize = values.specs.iter().map(words).sum();
    let buffers = values.specs.iter().map(|b| device.buffer("value", words(b)));
    let small: Vec<WeightId> = plan.ops.iter().flat_map(vectors).collect();
    let weights = (0..).zip(&plan.weights).map(|(id, w)| {
        // Vectors are few enough to be widened.
        if w.ty != TensorType::F32 && small.contains(&WeightId(id)) {
            let words: Vec<u32> = w.to_f32().iter().map(|v| v.to_bits()).collect();
            return filled(device, &w.name, &words);
        }
        device.wrap(&w.data, w.offset, w.len_bytes())
    });
    // A convolution of one tap has a state of nothing.
    let states = plan
        .states
        .iter()
        .map(|s| filled(device, &s.name, &vec![0; (limits.slots * s.len).max(1) as usize]));
    let states = states.collect::<Result<Vec<Buffer>>>()?;
    let history = vec![crate::feed::NONE; limits.slots as usize * shape.remembered];
    let history = filled(device, "histories", &history)?;
    let scratch = scratch + history.len_bytes / 4;
    let scratch = scratch + states.iter().map(|b| b.len_bytes / 4).sum::<usize>();
    let ropes = plan.ropes.iter().map(|r| {
        let words: Vec<u32> = r.inv_freq.iter().map(|f| f.to_bits()).collect();
        filled(device, "frequencies", &words)
    });
    let slots = vec![0; limits.slots as usize];
    let mut builder = Builder {
        device,
        policy,
        plan,
        shape,
        buffers: buffers.collect::<Result<_>>()?,
        values,
        weights: weights.collect::<Result<_>>()?,
        ropes: ropes.collect::<Result<_>>()?,
        history,
        kv_type,
        stages: Vec::new(),
        deterministic: limits.deterministic,
        apart: None,
        rows_max: limits.rows.max(limits.wanted).max(limits.slots) as usize,
        wanted_max: limits.wanted.max(limits.slots) as usize,
        out: Prepared {
            commands: Vec::new(),
            pools: pools(device, plan, limits, kv_type)?,
            states,
            last: filled(device, "last tokens", &slots)?,
            stop: filled(device, "stop tickets", &slots)?,
            scratch_bytes: 4 * scratch as u64,
            kv_type,
        },
    };
    builder.lower()?;
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
) -> Result<Vec<Vec<[Pool; 2]>>> {
    let pool = |label, width: u32| {
        let buffer = device.buffer(label, pool_words(kv, limits.kv_blocks, width))?;
        Ok::<_, Error>(Pool { pieces: vec![buffer] })
    };
    let pair = |g: &KvGroup| {
        Ok([pool("keys", g.heads * g.k_width)?, pool("values", g.heads * g.v_width)?])
    };
    plan.kv.iter().map(|g| g.layers.iter().map(|_| pair(g)).collect()).collect()
}

/// How the kernels store keys and values.
fn stored_as(kv: KvType) -> TensorType {
    match kv {
        KvType::F32 => TensorType::F32,
        KvType::F16 => TensorType::F16,
        KvType::Q8_0 => TensorType::Q8_0,
    }
}

type Arg = Option<(Place, Access)>;

impl Builder<'_> {
    fn value(&self, v: ValueId, access: Access) -> Arg {
        debug_assert_eq!(self.plan.values[v.ix()].ty, ValueType::F32);
        let buffer = self.buffers[self.values.ix(v)];
        Some((Place::Value(buffer, self.plan.width(v) as usize), access))
    }

    fn index(&self, v: ValueId, access: Access) -> Arg {
        debug_assert_eq!(self.plan.values[v.ix()].ty, ValueType::U32);
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
}
