//! What a plan must hold so that no thread runs past an end: the shapes that [`Plan::validate`]
//! leaves to the device. It computes nothing.

use fornax_plan::{Error, KvRef, Op, Plan, Result, ValueId, WeightId};

/// Checks every op.
///
/// # Errors
/// `is_malformed`, naming the op and the two sizes that disagree.
pub(crate) fn check(plan: &Plan) -> Result<()> {
    for (at, op) in plan.ops.iter().enumerate() {
        let told = |what| Error::malformed(format!("cpu: plan op {at} ({}): {what}", op.name()));
        fits(plan, op).map_err(told)?;
    }
    Ok(())
}

fn same(what: &str, have: usize, want: usize) -> std::result::Result<(), String> {
    if have == want { Ok(()) } else { Err(format!("{what} is {have}, expected {want}")) }
}

fn at_most(what: &str, have: usize, most: usize) -> std::result::Result<(), String> {
    if have <= most { Ok(()) } else { Err(format!("{what} is {have}, expected at most {most}")) }
}

fn fits(plan: &Plan, op: &Op) -> std::result::Result<(), String> {
    let width = |v: ValueId| plan.width(v) as usize;
    let elements = |w: WeightId| {
        let w = &plan.weights[w.ix()];
        w.rows as usize * w.cols as usize * w.experts as usize
    };
    let vocab = plan.hyper.vocab as usize;
    match *op {
        Op::Embed { table, .. } => {
            at_most("the vocabulary", vocab, plan.weights[table.ix()].rows as usize)
        }
        Op::RmsNorm { x, residual, out, .. } => {
            same("the result's width", width(out), width(x))?;
            residual.map_or(Ok(()), |r| same("the residual's width", width(r), width(x)))
        }
        Op::MatMul { residual: Some(r), out, .. } => {
            same("the residual's width", width(r), width(out))
        }
        Op::SelectRows { x, out } => same("the result's width", width(out), width(x)),
        Op::QkNormRope { q, k, q_norm, k_norm, rope, dim, q_out, k_out, .. } => {
            let dim = dim as usize;
            same("the rotated queries' width", width(q_out), width(q))?;
            same("the rotated keys' width", width(k_out), width(k))?;
            same("what is left of the queries", width(q) % dim.max(1), 0)?;
            same("what is left of the keys", width(k) % dim.max(1), 0)?;
            for norm in [q_norm, k_norm].into_iter().flatten() {
                same("the head norm's length", elements(norm), dim)?;
            }
            let Some(rope) = rope else { return Ok(()) };
            let table = plan.ropes.get(rope.ix()).ok_or("its rotary table does not exist")?;
            at_most("the rotated part of a head", 2 * table.inv_freq.len(), dim)
        }
        Op::KvWrite { k, v, kv } => {
            let g = group(plan, kv)?;
            same("the keys' width", width(k), g.heads as usize * g.k_width as usize)?;
            same("the values' width", width(v), g.heads as usize * g.v_width as usize)
        }
        Op::Attention { kv, heads, sinks, out, .. } => {
            let g = group(plan, kv)?;
            same("the result's width", width(out), heads as usize * g.v_width as usize)?;
            sinks.map_or(Ok(()), |s| same("the number of sinks", elements(s), heads as usize))
        }
        Op::ShortConv { x, kernel, state, out } => {
            let kernel = &plan.weights[kernel.ix()];
            same("the input's width", width(x), 3 * width(out))?;
            same("the kernel's channels", kernel.rows as usize, width(out))?;
            let state = plan.states.get(state.ix()).ok_or("its state does not exist")?;
            let taps = (kernel.cols as usize).checked_sub(1).ok_or("its kernel has no taps")?;
            same("the state's length", state.len as usize, taps * width(out))
        }
        Op::MoeRoute { x, router, top_k, ids, weights, .. } => {
            let w = &plan.weights[router.weight.ix()];
            same("the router's width", w.cols as usize, width(x))?;
            same("the ids' width", width(ids), top_k as usize)?;
            same("the weights' width", width(weights), top_k as usize)?;
            at_most("the experts of a row", top_k as usize, w.rows as usize)?;
            at_most("no experts", 1, top_k as usize)
        }
        Op::MoeMlp { x, ids, weights, gate, up, down, residual, out, .. } => {
            same("the weights' width", width(weights), width(ids))?;
            let [g, u, d] = [gate, up, down].map(|l| &plan.weights[l.weight.ix()]);
            for (w, cols, rows) in [(g, width(x), g.rows as usize), (u, width(x), g.rows as usize)]
                .into_iter()
                .chain([(d, g.rows as usize, width(out))])
            {
                same(&format!("the width of {}", w.name), w.cols as usize, cols)?;
                same(&format!("the rows of {}", w.name), w.rows as usize, rows)?;
                same(&format!("the experts of {}", w.name), w.experts as usize, routed(plan, ids))?;
            }
            residual.map_or(Ok(()), |r| same("the residual's width", width(r), width(out)))
        }
        _ => Ok(()),
    }
}

fn group(plan: &Plan, kv: KvRef) -> std::result::Result<&fornax_plan::KvGroup, String> {
    let group = plan.kv.get(kv.group as usize).ok_or("its KV group does not exist")?;
    match group.layers.get(kv.layer as usize) {
        Some(_) if group.heads > 0 => Ok(group),
        Some(_) => Err("its KV group has no heads".into()),
        None => Err("its layer of the KV group does not exist".into()),
    }
}

/// Experts that the router of these ids chooses among.
fn routed(plan: &Plan, ids: ValueId) -> usize {
    let router = plan.ops.iter().find_map(|op| match op {
        Op::MoeRoute { router, ids: made, .. } if *made == ids => Some(router.weight),
        _ => None,
    });
    router.map_or(0, |w| plan.weights[w.ix()].rows as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn every_case_fits_and_a_bent_one_is_named() {
        let cases = conformance::cases();
        for case in &cases {
            check(&case.plan).unwrap();
        }
        let bend = |name: &str, by: fn(&mut Plan)| {
            let case = cases.iter().find(|c| c.name.starts_with(name)).unwrap();
            let mut plan = case.plan.clone();
            by(&mut plan);
            let e = check(&plan).unwrap_err();
            assert!(e.is_malformed(), "{e}");
            e.to_string()
        };
        let e = bend("embed/F32", |p| p.hyper.vocab += 1);
        assert!(e.contains("(embed): the vocabulary is 65, expected at most 64"), "{e}");
        let e = bend("short_conv", |p| p.states[0].len -= 1);
        assert!(e.contains("the state's length"), "{e}");
        let e = bend("moe", |p| {
            let router = p.weights.iter_mut().find(|w| w.name == "router").unwrap();
            router.rows -= 1;
        });
        assert!(e.contains("the experts of gate is 5, expected 4"), "{e}");
        let e = bend("proof", |p| p.ropes[0].inv_freq.push(1.0));
        assert!(e.contains("the rotated part of a head is 34, expected at most 32"), "{e}");
    }
}
