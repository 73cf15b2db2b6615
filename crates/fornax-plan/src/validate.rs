//! What makes a plan whole: a device takes a validated plan's ids, rows and widths on trust. It
//! knows no device; what one device alone relies on, that device checks.

use crate::error::{Error, Result};
use crate::ids::WeightId;
use crate::op::{Linear, Op};
use crate::plan::{Plan, RowSpace, ValueType};

impl Plan {
    /// Checks that the plan is whole: every value written once and before it is read, every
    /// matrix of the width that its op gives it.
    ///
    /// # Errors
    /// `is_malformed`, naming the op and the two sizes that disagree.
    pub fn validate(&self) -> Result<()> {
        let mut written = vec![false; self.values.len()];
        for (at, op) in self.ops.iter().enumerate() {
            let place = |what: &str| format!("plan op {at} ({}): {what}", op.name());
            for v in op.inputs().iter() {
                if !written.get(v.ix()).copied().unwrap_or(false) {
                    return Err(Error::malformed(place(&format!(
                        "reads value {} before it is written",
                        v.0
                    ))));
                }
            }
            if let Some(v) = op.outputs().iter().find(|v| v.ix() >= self.values.len()) {
                return Err(Error::malformed(place(&format!("value {} does not exist", v.0))));
            }
            for w in op.weights() {
                self.check_weight(w).map_err(|what| Error::malformed(place(&what)))?;
            }
            self.check_wires(op).map_err(|what| Error::malformed(place(&what)))?;
            self.check_shapes(op).map_err(|what| Error::malformed(place(&what)))?;
            for v in op.outputs().iter() {
                if std::mem::replace(&mut written[v.ix()], true) {
                    return Err(Error::malformed(place(&format!(
                        "writes value {} a second time",
                        v.0
                    ))));
                }
            }
        }
        Ok(())
    }

    /// A weight lies inside its map, counted wide enough for any numbers.
    fn check_weight(&self, id: WeightId) -> std::result::Result<(), String> {
        let Some(w) = self.weights.get(id.ix()) else {
            return Err(format!("weight {} does not exist", id.0));
        };
        if w.cols == 0 || w.rows == 0 || w.experts == 0 {
            return Err(format!("{w:?} is empty"));
        }
        if !(w.cols as usize).is_multiple_of(w.ty.block_len()) {
            return Err(format!("{w:?} has rows of no whole blocks of {}", w.ty.block_len()));
        }
        let rows = u128::from(w.rows) * u128::from(w.experts);
        let end = w.offset as u128 + rows * w.row_bytes() as u128;
        let have = w.data.bytes().len();
        if end > have as u128 {
            return Err(format!("{} ends past its map, at {end} of {have} bytes", w.name));
        }
        Ok(())
    }

    /// Every value of an op has the rows and the element type that the op gives it, and every
    /// table, cache and state that it names is there: what a kernel takes on trust.
    fn check_wires(&self, op: &Op) -> std::result::Result<(), String> {
        let ids = match *op {
            Op::MoeRoute { ids, .. } | Op::MoeMlp { ids, .. } => Some(ids),
            _ => None,
        };
        let first = op.outputs().iter().next().or_else(|| op.inputs().iter().next());
        let rows = match op {
            Op::Embed { .. } | Op::KvWrite { .. } | Op::Attention { .. } | Op::ShortConv { .. } => {
                RowSpace::Tokens
            }
            Op::Sample { .. } | Op::HiddenOut { .. } => RowSpace::Wanted,
            _ => first.map_or(RowSpace::Tokens, |v| self.values[v.ix()].rows),
        };
        let outputs = op.outputs();
        let all = op.inputs();
        let reads = all.iter().map(|v| (v, matches!(op, Op::SelectRows { .. })));
        for (v, selected) in reads.chain(outputs.iter().map(|v| (v, false))) {
            let value = &self.values[v.ix()];
            let want = if selected { RowSpace::Tokens } else { rows };
            if value.rows != want {
                let have = value.rows;
                return Err(format!("{} has {have:?} rows, expected {want:?}", value.name));
            }
            let want = if ids == Some(v) { ValueType::U32 } else { ValueType::F32 };
            if value.ty != want {
                return Err(format!("{} is {:?}, expected {want:?}", value.name, value.ty));
            }
        }
        if let Op::SelectRows { out, .. } = op
            && self.values[out.ix()].rows != RowSpace::Wanted
        {
            return Err("selects token rows into token rows, expected wanted rows".into());
        }
        if let Op::KvWrite { kv, .. } | Op::Attention { kv, .. } = op {
            let group = self.kv.get(kv.group as usize);
            let Some(group) = group.filter(|g| kv.layer < g.layers.len() as u32) else {
                return Err(format!("kv {}.{} does not exist", kv.group, kv.layer));
            };
            if group.heads == 0 || group.k_width == 0 || group.v_width == 0 {
                return Err(format!("kv {} has no heads or empty ones", kv.group));
            }
        }
        if let Op::QkNormRope { rope: Some(rope), .. } = op
            && rope.ix() >= self.ropes.len()
        {
            return Err(format!("rotary table {} does not exist", rope.0));
        }
        if let Op::ShortConv { state, .. } = op
            && state.ix() >= self.states.len()
        {
            return Err(format!("state {} does not exist", state.0));
        }
        Ok(())
    }

    fn check_linear(&self, l: Linear, x: u32, out: u32) -> std::result::Result<(), String> {
        let w = &self.weights[l.weight.ix()];
        if w.cols != x || w.rows != out {
            return Err(format!(
                "{} is {} x {} where its op maps width {x} to {out}",
                w.name, w.rows, w.cols
            ));
        }
        self.check_bias(l)
    }

    /// One bias for each output, experts one after the other.
    fn check_bias(&self, l: Linear) -> std::result::Result<(), String> {
        let Some(b) = l.bias.map(|b| &self.weights[b.ix()]) else { return Ok(()) };
        let w = &self.weights[l.weight.ix()];
        let want = u128::from(w.rows) * u128::from(w.experts);
        let have = u128::from(b.cols) * u128::from(b.rows) * u128::from(b.experts);
        if have == want {
            return Ok(());
        }
        Err(format!("{} has {have} elements, expected {want}", b.name))
    }

    fn check_shapes(&self, op: &Op) -> std::result::Result<(), String> {
        match *op {
            Op::MatMul { x, linear, out, .. } | Op::Logits { x, linear, out, .. } => {
                self.check_linear(linear, self.width(x), self.width(out))
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => [(q, q_out), (k, k_out), (v, v_out)]
                .into_iter()
                .try_for_each(|(l, out)| self.check_linear(l, self.width(x), self.width(out))),
            Op::GatedMlp { x, gate, up, out, .. } => [gate, up]
                .into_iter()
                .try_for_each(|l| self.check_linear(l, self.width(x), self.width(out))),
            Op::RmsNorm { x, weight, .. } => {
                let (w, want) = (&self.weights[weight.ix()], self.width(x));
                let have = u128::from(w.cols) * u128::from(w.rows) * u128::from(w.experts);
                if have == u128::from(want) {
                    Ok(())
                } else {
                    Err(format!("norm of {have} over width {want}"))
                }
            }
            Op::Embed { table, out, .. } => {
                let (have, want) = (self.weights[table.ix()].cols, self.width(out));
                if have == want {
                    Ok(())
                } else {
                    Err(format!("table of width {have} into {want}"))
                }
            }
            Op::Attention { q, kv, heads, .. } => {
                let g = &self.kv[kv.group as usize];
                let want = u64::from(heads) * u64::from(g.k_width);
                if heads == 0 || heads % g.heads != 0 {
                    return Err(format!("{heads} query heads over {} key heads", g.heads));
                }
                if u64::from(self.width(q)) == want {
                    Ok(())
                } else {
                    Err(format!("q of width {}, expected {want}", self.width(q)))
                }
            }
            Op::MoeMlp { gate, up, down, .. } => {
                [gate, up, down].into_iter().try_for_each(|l| self.check_bias(l))
            }
            Op::MoeRoute { router, .. } => self.check_bias(router),
            Op::Sample { logits } if self.width(logits) != self.hyper.vocab => Err(format!(
                "logits of width {}, expected the vocabulary's {}",
                self.width(logits),
                self.hyper.vocab
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;
    use crate::ids::{StateId, ValueId};

    /// What validation says of a conformance plan after a change.
    fn bent(name: &str, by: impl FnOnce(&mut Plan)) -> String {
        let cases = conformance::cases();
        let case = cases.iter().find(|c| c.name.starts_with(name)).expect(name);
        let mut plan = case.plan.clone();
        plan.validate().unwrap();
        by(&mut plan);
        let e = plan.validate().unwrap_err();
        assert!(e.is_malformed(), "{e}");
        e.to_string()
    }

    #[test]
    fn ids_that_name_nothing_are_told() {
        let e = bent("rms_norm", |p| p.values.truncate(1));
        assert!(e.contains("does not exist"), "{e}");
        let e = bent("proof", |p| p.ropes.clear());
        assert!(e.contains("rotary table 0 does not exist"), "{e}");
        let e = bent("proof", |p| p.kv[0].layers.clear());
        assert!(e.contains("kv 0.0 does not exist"), "{e}");
        let e = bent("proof", |p| p.kv[0].heads = 0);
        assert!(e.contains("no heads"), "{e}");
        let e = bent("short_conv", |p| {
            for op in &mut p.ops {
                if let Op::ShortConv { state, .. } = op {
                    *state = StateId(7);
                }
            }
        });
        assert!(e.contains("state 7 does not exist"), "{e}");
    }

    #[test]
    fn sizes_beyond_any_memory_do_not_wrap() {
        for (rows, experts) in [(u32::MAX, u32::MAX), (1 << 31, 2), (1 << 16, 1 << 16)] {
            let e =
                bent("rms_norm", |p| (p.weights[0].rows, p.weights[0].experts) = (rows, experts));
            assert!(e.contains("ends past its map"), "{e}");
        }
        let e = bent("rms_norm", |p| p.weights[0].offset = usize::MAX);
        assert!(e.contains("ends past its map"), "{e}");
        let e = bent("rms_norm", |p| p.weights[0].rows = 0);
        assert!(e.contains("is empty"), "{e}");
    }

    #[test]
    fn rows_and_element_types_must_agree() {
        let value = |p: &mut Plan, v: ValueId, rows| p.values[v.ix()].rows = rows;
        let e = bent("rms_norm", |p| {
            let out = p.ops.iter().find_map(|op| match op {
                Op::RmsNorm { x, .. } => Some(*x),
                _ => None,
            });
            let x = out.expect("a norm");
            let other = match p.values[x.ix()].rows {
                RowSpace::Tokens => RowSpace::Wanted,
                RowSpace::Wanted => RowSpace::Tokens,
            };
            value(p, x, other);
        });
        assert!(e.contains("rows, expected"), "{e}");
        let e = bent("moe", |p| p.values.iter_mut().for_each(|v| v.ty = ValueType::F32));
        assert!(e.contains("expected U32"), "{e}");
    }
}
