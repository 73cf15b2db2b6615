//! The CPU as a provider: its options, what it is, what it refuses. It knows no kernel.

use std::sync::{Arc, Mutex};

use fornax_gguf::TensorType;
use fornax_plan::{
    ActMode, Device, DeviceInfo, Error, KvGroup, KvType, Limits, Op, Plan, Program, Refusal, Result,
};

use crate::check::check;
use crate::isa::Isa;
use crate::long_blocks::LongBlocks;
use crate::matrix;
use crate::ops::BLOCK;
use crate::pool::Pool;
use crate::program::{CpuProgram, decodes};
use crate::stream::Stream;
use crate::topology;

/// How the CPU is used; the default leaves everything to the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of a step; one for each physical core where absent.
    pub threads: Option<usize>,
    /// The instruction tier; the best that the processor has where absent.
    pub isa: Option<Isa>,
    /// Whether worker threads are bound to cores; where absent, they are if there are no more
    /// threads than physical cores.
    pub pin: Option<bool>,
    /// Rows of long prompts are multiplied in a form that rounds differently: weights and activations in 8 bits with
    /// one scale for 256 columns. Takes a byte more for each weight of the layers; decoding stays as it is. Only on
    /// the tiers that gain from it.
    pub fast_prompt: bool,
}

/// The CPU, with the threads that all of its programs share.
#[derive(Debug)]
pub struct CpuDevice {
    isa: Isa,
    pool: Arc<Mutex<Pool>>,
    threads: usize,
    /// KV blocks of the kernels that make one block of this device.
    run: u32,
    /// See [`CpuOptions::fast_prompt`].
    fast_prompt: bool,
}

impl CpuDevice {
    /// Starts the threads.
    ///
    /// # Errors
    /// `is_unsupported` where the processor lacks the tier that was asked for, naming those it
    /// has; `is_out_of_memory` where the system refuses the threads.
    pub fn new(options: CpuOptions) -> Result<CpuDevice> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        if !isa.is_available() {
            let have: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
            return Err(Error::unsupported(format!(
                "cpu: this processor does not run the tier {isa}; it runs {}",
                have.join(", ")
            )));
        }
        if options.fast_prompt && isa.coarse().is_none() {
            let with = Isa::ALL.iter().filter(|isa| isa.is_available() && isa.coarse().is_some());
            let with: Vec<&str> = with.map(|isa| isa.name()).collect();
            let help = match with.is_empty() {
                true => "this processor has none".into(),
                false => format!("those of this processor that have: {}", with.join(", ")),
            };
            return Err(Error::unsupported(format!(
                "cpu: the tier {isa} has no fast form of prompts; {help}"
            )));
        }
        let threads = options.threads.unwrap_or_else(topology::default_threads).max(1);
        let cores = topology::physical_cores();
        let cpus = if options.pin == Some(false) { Vec::new() } else { cores };
        let pool = Pool::new(threads, &cpus).map_err(|e| {
            Error::out_of_memory(format!("cpu: starting {threads} threads: {e}; use fewer"))
        })?;
        Ok(CpuDevice {
            isa,
            pool: Arc::new(Mutex::new(pool)),
            threads,
            run: 1,
            fast_prompt: options.fast_prompt,
        })
    }

    /// The same CPU and threads with KV blocks of at least so many tokens, rounded up to what the kernels work on: a
    /// block of a whole context keeps every sequence in one piece. The numbers do not change.
    #[must_use]
    pub fn with_kv_block(&self, tokens: u32) -> CpuDevice {
        let (pool, run) = (Arc::clone(&self.pool), tokens.div_ceil(BLOCK as u32).max(1));
        let CpuDevice { isa, threads, fast_prompt, .. } = *self;
        CpuDevice { isa, pool, threads, run, fast_prompt }
    }

    /// The tier that kernels run on.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Measures how fast all threads together read `bytes` of memory once, in bytes a second:
    /// the bound on decoding a model whose weights are that large. Takes a few passes.
    ///
    /// # Errors
    /// `is_out_of_memory` where a buffer of that size cannot be had.
    pub fn read_rate(&self, bytes: usize) -> Result<f64> {
        self.stream(bytes)?.rate()
    }

    /// A buffer of `bytes` that all threads together read, pass by pass: for whoever measures
    /// decoding beside it.
    ///
    /// # Errors
    /// `is_out_of_memory` where a buffer of that size cannot be had.
    pub fn stream(&self, bytes: usize) -> Result<Stream> {
        Stream::new(Arc::clone(&self.pool), bytes)
    }

    /// Measures how many multiplications and additions of 8-bit integers all threads together do
    /// a second with the dot products of AVX-512 (VNNI), on registers alone: the bound on prompts
    /// without AMX. Takes some 30 ms. None where the processor has no such instructions.
    ///
    /// # Errors
    /// `is_lost` where a thread failed.
    pub fn vnni_rate(&self) -> Result<Option<f64>> {
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx512Vnni.is_available() {
            // SAFETY: the tier is available.
            let busy = |rounds| unsafe { matrix::avx512::busy(rounds) };
            return crate::stream::op_rate(&self.pool, busy).map(Some);
        }
        Ok(None)
    }

    /// The same with the tiles of AMX, whether this device uses them or not. None where they are
    /// not there, or the system does not grant them.
    ///
    /// # Errors
    /// As there.
    pub fn amx_rate(&self) -> Result<Option<f64>> {
        #[cfg(target_arch = "x86_64")]
        if Isa::Amx.is_available() {
            // SAFETY: the tier is available.
            let busy = |rounds| unsafe { matrix::amx::busy(rounds / 8) };
            return crate::stream::op_rate(&self.pool, busy).map(Some);
        }
        Ok(None)
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let direct = |ty: &TensorType| matrix::is_tiled(*ty);
        DeviceInfo {
            kind: "cpu",
            name: topology::processor_name(),
            tier: self.isa.name().into(),
            threads: self.threads as u32,
            kv_block: self.run.saturating_mul(BLOCK as u32),
            act: ActMode::Q8,
            weight_types: TensorType::ALL.iter().copied().filter(direct).collect(),
            in_flight: 1,
            step_rows: 512,
        }
    }

    fn memory_free(&self) -> Option<u64> {
        crate::memory::free()
    }

    fn memory_unasked(&self) -> Option<u64> {
        crate::memory::unasked()
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        let mut refuse = |what: String, why: String, help: &str| {
            let refusal = Refusal { what, why, help: help.into() };
            if !refusals.contains(&refusal) {
                refusals.push(refusal);
            }
        };
        if limits.act == Some(ActMode::F32) {
            refuse(
                "f32 activations".into(),
                "the kernels of block formats take 8-bit activations".into(),
                "use the reference device for f32 activations",
            );
        }
        if limits.deterministic && self.fast_prompt {
            refuse(
                "the fast form of prompts".into(),
                "it rounds differently with how a prompt is cut into steps".into(),
                "leave out --deterministic or --fast-prompt",
            );
        }
        let odd = |g: &KvGroup| !g.k_width.is_multiple_of(32) || !g.v_width.is_multiple_of(32);
        if limits.kv_type == KvType::Q8_0 && plan.kv.iter().any(odd) {
            refuse(
                "kv type q8_0".into(),
                "a head's width is not a multiple of 32".into(),
                "use --kv-type f16",
            );
        }
        for op in &plan.ops {
            for linear in op.linears().iter() {
                let w = &plan.weights[linear.weight.ix()];
                if !matrix::supports(w.ty) {
                    let why = format!("{} is {}, which nothing here decodes", w.name, w.ty);
                    refuse(op.name().into(), why, "requantise the file to another type");
                }
            }
            if let Op::Embed { table, .. } = op {
                let w = &plan.weights[table.ix()];
                if !decodes(w.ty) {
                    let why = format!("{} is {}, which nothing here decodes", w.name, w.ty);
                    refuse(op.name().into(), why, "requantise the file to another type");
                }
            }
        }
        refusals
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        plan.validate()?;
        check(plan)?;
        if let Some(r) = self.supports(plan, limits).first() {
            return Err(Error::unsupported(format!("cpu: {}: {}; {}", r.what, r.why, r.help)));
        }
        let pool = Arc::clone(&self.pool);
        if self.run == 1 {
            return Ok(Box::new(CpuProgram::new(plan, limits, self.isa, self.fast_prompt, pool)?));
        }
        let kv_blocks = limits.kv_blocks.saturating_mul(self.run);
        let limits = Limits { kv_blocks, ..limits.clone() };
        let program = CpuProgram::new(plan, &limits, self.isa, self.fast_prompt, pool)?;
        Ok(Box::new(LongBlocks { program, run: self.run }))
    }
}
