//! A plan's ops as commands for the scalar stand-ins: one for each op, or for each of its parts.
//! It knows no kernel source.

use fornax_plan::{Error, Op, Result, ValueId};

use super::calls::Call;
use super::{Arg, Builder};
use crate::args::ArgmaxArgs;
use crate::encode::{Axis, Command, Extent, Place, Span};
use crate::hazard::Access::{Read, Write};
use crate::stub;

impl Builder<'_> {
    /// Resolves every op.
    pub(super) fn record(&mut self) -> Result<()> {
        let plan = self.plan;
        plan.ops.iter().enumerate().try_for_each(|(at, op)| self.record_op(at as u32, op))
    }

    fn push(&mut self, op: u32, name: &str, extent: Extent, (args, constants): Call) -> Result<()> {
        let pipeline = self.device.pipeline(name, &[])?;
        let (when, span) = (0..=u32::MAX, Span { axes: [Axis::Fixed(1); 3], threads: 1 });
        let base_at = None;
        let apart = None;
        let command = Command { op, pipeline, args, constants, base_at, extent, when, apart, span };
        self.out.commands.push(command);
        Ok(())
    }

    fn record_op(&mut self, at: u32, op: &Op) -> Result<()> {
        let ty = |b: &Self, w: fornax_plan::WeightId| b.plan.weights[w.ix()].ty;
        match *op {
            Op::Embed { table, scale, out } => {
                let name = stub::entry("embed", ty(self, table));
                self.push(at, &name, Extent::Rows, self.embed_call(table, scale, out))
            }
            Op::RmsNorm { x, weight, eps, residual, out } => {
                let call = self.norm_call(x, weight, eps, residual, out);
                self.push(at, "rms_norm", self.extent(x), call)
            }
            Op::MatMul { x, linear, residual, out } => {
                let call = self.matmul_call(x, linear, residual, self.value(out, Write), PLAIN);
                self.push(at, &stub::entry("matmul", ty(self, linear.weight)), self.extent(x), call)
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                for (linear, out) in [(q, q_out), (k, k_out), (v, v_out)] {
                    let call = self.matmul_call(x, linear, None, self.value(out, Write), PLAIN);
                    let name = stub::entry("matmul", ty(self, linear.weight));
                    self.push(at, &name, self.extent(x), call)?;
                }
                Ok(())
            }
            Op::QkNormRope { q, k, q_norm, k_norm, q_out, k_out, .. } => {
                let queries = self.rope_call(op, q, q_norm, q_out);
                self.push(at, "norm_rope", Extent::Rows, queries)?;
                let keys = self.rope_call(op, k, k_norm, k_out);
                self.push(at, "norm_rope", Extent::Rows, keys)
            }
            Op::KvWrite { k, v, kv } => {
                self.push(at, "kv_write", Extent::Rows, self.kv_write_call(k, v, kv))
            }
            Op::Attention { sinks, out, .. } => {
                let (mut args, constants) = self.attention_call(op, 1);
                args.extend([self.optional(sinks), self.value(out, Write)]);
                self.push(at, "attention", Extent::Rows, (args, constants))
            }
            Op::GatedMlp { x, gate, up, act, out } => {
                let args = vec![
                    self.weight(gate.weight),
                    self.weight(up.weight),
                    self.value(x, Read),
                    self.optional(gate.bias),
                    self.optional(up.bias),
                    self.value(out, Write),
                ];
                let constants = self.gated_args(gate, up, act, 0.0).words();
                let name = stub::entry("gated_mlp", ty(self, gate.weight));
                self.push(at, &name, self.extent(x), (args, constants))
            }
            Op::SelectRows { x, out } => {
                self.push(at, "select_rows", Extent::Wanted, self.select_call(x, out))
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                let to = self.value(out, Write);
                let call = self.matmul_call(x, linear, None, to, (scale, softcap));
                let name = stub::entry("matmul", ty(self, linear.weight));
                self.push(at, &name, self.extent(x), call)?;
                self.push_copy(at, out, Place::Logits)
            }
            Op::Sample { logits } => self.argmax(at, logits),
            Op::HiddenOut { x } => self.push_copy(at, x, Place::Hidden),
            Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. } => {
                Err(Error::unsupported(format!("metal: no kernel for {}", op.name())))
            }
        }
    }

    fn push_copy(&mut self, at: u32, x: ValueId, to: Place) -> Result<()> {
        self.push(at, "copy", Extent::FirstWanted, self.copy_call(x, to))
    }

    fn argmax(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let from: Arg = self.value(logits, Read);
        let (first, next) = self.shape.out_counts();
        let constants = ArgmaxArgs {
            rows: 0,
            vocab: self.plan.width(logits),
            base: 0,
            out_first: first as u32,
            out_next: next as u32,
            choices: self.shape.choices() as u32,
        };
        let call = (self.choice_args(from), constants.words());
        self.push(at, "argmax", Extent::Wanted, call)?;
        if let Some(command) = self.out.commands.last_mut() {
            command.base_at = Some(2);
        }
        Ok(())
    }
}

/// No factor on the products and no cap.
const PLAIN: (f32, Option<f32>) = (1.0, None);
