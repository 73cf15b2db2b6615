//! Products: the tiles of one row, and from how many rows on the tiled product is faster than the small one. It knows no
//! attention.

use fornax_gguf::TensorType;
use fornax_plan::{Op, Plan, Result, WeightId};

use super::{Bench, Call, filled};
use crate::api::{Access, Buffer, Grid};
use crate::args::MatmulArgs;
use crate::library::typed;
use crate::policy::{FEW_ROWS, MANY_ROWS, MATVEC_ROWS, Policy, Tile};
use crate::profile::Profile;

/// One shape of a plan's matrices, and where the plan has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trial {
    ty: TensorType,
    outs: u32,
    cols: u32,
    pub(super) weights: Vec<WeightId>,
}

/// The shapes that a token reads, each once, in the plan's order.
pub(super) fn trials(plan: &Plan) -> Vec<Trial> {
    let mut all: Vec<Trial> = Vec::new();
    let single = |op: &&Op| !matches!(op, Op::MoeRoute { .. } | Op::MoeMlp { .. });
    for linear in
        plan.ops.iter().filter(single).flat_map(|op| op.linears().iter().collect::<Vec<_>>())
    {
        let w = &plan.weights[linear.weight.ix()];
        let same = |t: &&mut Trial| (t.ty, t.outs, t.cols) == (w.ty, w.rows, w.cols);
        match all.iter_mut().find(same) {
            Some(trial) => trial.weights.push(linear.weight),
            None => all.push(Trial {
                ty: w.ty,
                outs: w.rows,
                cols: w.cols,
                weights: vec![linear.weight],
            }),
        }
    }
    all
}

pub(super) fn listing(plan: &Plan) -> Vec<String> {
    let tiles: Vec<String> = Policy::tiles().map(|t| format!("{}x{}", t.outs, t.simds)).collect();
    let line = |t: Trial| {
        let (name, n, tiles) = (t.name(), t.weights.len(), tiles.join(" "));
        format!("matvec_{name} ({n} matrices): {tiles}; small and tiled products")
    };
    trials(plan).into_iter().map(line).collect()
}

pub(super) fn tune(
    bench: &mut Bench<'_>,
    plan: &Plan,
    profile: &mut Profile,
    say: &mut impl FnMut(&str),
) -> Result<()> {
    for trial in trials(plan) {
        let weights = trial.weights.iter().map(|id| {
            let w = &plan.weights[id.ix()];
            bench.device.wrap(&w.data, w.offset, w.len_bytes())
        });
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let mut best: Option<(f64, Tile)> = None;
        for tile in Policy::tiles() {
            let Some(s) = trial.vector(bench, &weights, tile)? else { continue };
            if best.is_none_or(|(least, _)| s < least) {
                best = Some((s, tile));
            }
        }
        let Some((s, tile)) = best else { continue };
        profile.set_tile(trial.ty, trial.outs, trial.cols, tile);
        let small_rows = trial.small_rows(bench, &weights)?;
        profile.set_small_rows(trial.ty, trial.outs, trial.cols, small_rows);
        let (name, rate) = (trial.name(), weights[0].len_bytes as f64 / s / 1e9);
        say(&format!(
            "matvec_{name}: {} outputs in {} simdgroups, {rate:.1} GB/s; small products up to {small_rows} rows",
            tile.outs, tile.simds
        ));
    }
    Ok(())
}

impl Trial {
    fn name(&self) -> String {
        format!("{} {} x {}", self.ty.name().to_ascii_lowercase(), self.outs, self.cols)
    }

    /// Seconds of one row; none where the pipeline does not take so many threads.
    fn vector(&self, bench: &mut Bench<'_>, weights: &[Buffer], tile: Tile) -> Result<Option<f64>> {
        let variant = format!("matvec {}x{}", tile.outs, tile.simds);
        let own = [tile.outs, 1, tile.simds, 0];
        let grid = Grid { groups: [self.outs.div_ceil(tile.outs), 1, 1], threads: 32 * tile.simds };
        self.seconds(bench, weights, &variant, ("matvec", &own, 1, grid))
    }

    /// The most rows, of those that are tried, up to which the small product is no slower than the tiled one.
    fn small_rows(&self, bench: &mut Bench<'_>, weights: &[Buffer]) -> Result<u32> {
        let mut most = MATVEC_ROWS;
        for &rows in bench.effort.rows {
            let by = |name, outs: u32, each: u32| {
                let groups = [self.outs.div_ceil(outs), rows.div_ceil(each), 1];
                let own: &[u32] = &[];
                (name, own, rows, Grid { groups, threads: 128 })
            };
            let few = by("matmul_small", 8, FEW_ROWS);
            let many = by("matmul_tiled", 64, MANY_ROWS);
            let few = self.seconds(bench, weights, &format!("matmul_small {rows}"), few)?;
            let many = self.seconds(bench, weights, &format!("matmul_tiled {rows}"), many)?;
            match (few, many) {
                (Some(few), Some(many)) if few <= many => most = rows,
                (Some(_), None) => most = rows,
                _ => break,
            }
        }
        Ok(most)
    }

    fn seconds(
        &self,
        bench: &mut Bench<'_>,
        weights: &[Buffer],
        variant: &str,
        (kernel, own, rows, grid): (&str, &[u32], u32, Grid),
    ) -> Result<Option<f64>> {
        let (name, constants) = typed(kernel, &[self.ty], own);
        let Some(pipeline) = bench.pipeline(&name, &constants, grid.threads)? else {
            return Ok(None);
        };
        let (cols, outs) = (self.cols, self.outs);
        let x = filled(bench.device, "x", (rows * cols) as usize, 1f32.to_bits())?;
        let out = bench.device.buffer("out", (rows * outs) as usize)?;
        let args = MatmulArgs { rows, cols, outs, bias: 0, residual: 0, scale: 1.0, softcap: 0.0 };
        let call = |weight: &Buffer| Call {
            pipeline: &pipeline,
            args: vec![
                Some((*weight, Access::Read)),
                Some((x, Access::Read)),
                None,
                None,
                Some((out, Access::Write)),
            ],
            constants: args.words(),
            grid,
        };
        let calls: Vec<Call<'_>> = weights.iter().map(call).collect();
        let products = (bench.effort.read_bytes / weights[0].len_bytes).max(calls.len());
        let seconds = bench.seconds(variant, &calls, products);
        bench.device.release(x);
        bench.device.release(out);
        seconds.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn every_shape_of_a_plan_is_listed_once() {
        let plan = conformance::proof(TensorType::Q8_0).plan;
        let all = trials(&plan);
        for (n, t) in all.iter().enumerate() {
            assert!(!t.weights.is_empty());
            let same = |o: &&Trial| (o.ty, o.outs, o.cols) == (t.ty, t.outs, t.cols);
            assert_eq!(all.iter().position(|o| same(&o)), Some(n), "{t:?} twice");
        }
        let lines = listing(&plan);
        assert_eq!(lines.len(), all.len());
        assert!(lines[0].starts_with("matvec_q8_0 ") && lines[0].contains(" 4x8"), "{}", lines[0]);
    }
}
