//! Attention: how many query heads a threadgroup takes together, and in how many shares the keys go. It knows no product.

use fornax_gguf::TensorType;
use fornax_plan::{Op, Plan, Result};

use super::{Bench, CACHES, Call, filled};
use crate::api::{Access, Buffer, Grid};
use crate::args::{AppendArgs, AttentionArgs};
use crate::feed::ROW;
use crate::library::{entry, pieced};
use crate::pieces::PIECES_MAX;
use crate::policy::{APPEND_SIMDS, Heads, Shares, TILE_ROWS};
use crate::prepare::attention::heads_of;
use crate::prepare::{KV_BLOCK, pool_words};
use crate::profile::Profile;

/// Layers that a timed command buffer goes through at most: each has keys of its own.
const LAYERS_MAX: usize = 8;
/// Rows of attention in shares.
const SPLIT_ROWS: u32 = 8;

/// The heads of a plan's attention, each once.
pub(super) fn trials(plan: &Plan) -> Vec<Heads> {
    let mut all = Vec::new();
    for op in &plan.ops {
        if let Op::Attention { kv, heads, .. } = op {
            let heads = heads_of(*heads, &plan.kv[kv.group as usize]);
            if !all.contains(&heads) {
                all.push(heads);
            }
        }
    }
    all
}

/// Each shape with the types of cache that can store it.
fn cached(plan: &Plan) -> impl Iterator<Item = (Heads, TensorType)> {
    let whole = |h: &Heads, ty: TensorType| {
        [h.k_width, h.v_width].iter().all(|w| (*w as usize).is_multiple_of(ty.block_len()))
    };
    trials(plan).into_iter().flat_map(move |h| {
        CACHES.into_iter().filter(move |ty| whole(&h, *ty)).map(move |ty| (h, ty))
    })
}

fn name(heads: Heads, ty: TensorType) -> String {
    let Heads { heads, kv_heads, k_width, v_width } = heads;
    let ty = ty.name().to_ascii_lowercase();
    format!("attention_{ty} {heads} heads on {kv_heads}, {k_width} and {v_width} wide")
}

pub(super) fn listing(plan: &Plan) -> Vec<String> {
    let text = |s: Shares| format!("{}x{}", s.together, s.splits);
    let line = |(heads, ty): (Heads, TensorType)| {
        let append: Vec<String> = heads.appended().map(text).collect();
        let split: Vec<String> = heads.split().map(text).collect();
        let tiled: Vec<String> = heads.together().map(|n| n.to_string()).collect();
        format!(
            "{}: append {}; split {}; tiled {}",
            name(heads, ty),
            append.join(" "),
            split.join(" "),
            tiled.join(" ")
        )
    };
    cached(plan).map(line).collect()
}

pub(super) fn tune(
    bench: &mut Bench<'_>,
    plan: &Plan,
    profile: &mut Profile,
    say: &mut impl FnMut(&str),
) -> Result<()> {
    for (heads, ty) in cached(plan) {
        let scene = Scene::new(bench, heads, ty)?;
        let append = best(heads.appended(), |s| scene.append(bench, s))?;
        let split = best(heads.split(), |s| scene.split(bench, s))?;
        let tiled = best(heads.together(), |n| scene.tiled(bench, n))?;
        let text = |s: Option<Shares>| {
            s.map_or("none".into(), |s| format!("{} heads in {} shares", s.together, s.splits))
        };
        let prompts = tiled.map_or("none".into(), |n| format!("{n} heads"));
        if let Some(shares) = append {
            profile.set_append(ty, heads, shares);
        }
        if let Some(shares) = split {
            profile.set_split(ty, heads, shares);
        }
        if let Some(together) = tiled {
            profile.set_tiled(ty, heads, together);
        }
        say(&format!(
            "{}: append {}; split {}; tiled {prompts}",
            name(heads, ty),
            text(append),
            text(split)
        ));
        scene.release(bench);
    }
    Ok(())
}

/// The variant that takes the least.
fn best<V: Copy>(
    variants: impl Iterator<Item = V>,
    mut seconds: impl FnMut(V) -> Result<Option<f64>>,
) -> Result<Option<V>> {
    let mut best: Option<(f64, V)> = None;
    for variant in variants {
        let Some(s) = seconds(variant)? else { continue };
        if best.is_none_or(|(least, _)| s < least) {
            best = Some((s, variant));
        }
    }
    Ok(best.map(|(_, variant)| variant))
}

/// A cache of some layers and rows at its end.
struct Scene {
    heads: Heads,
    ty: TensorType,
    keys: u32,
    /// Keys and values.
    layers: Vec<[Buffer; 2]>,
    /// The most rows' queries, keys and values.
    inputs: [Buffer; 3],
    rows: Buffer,
    table: Buffer,
    out: Buffer,
}

impl Scene {
    fn new(bench: &Bench<'_>, heads: Heads, ty: TensorType) -> Result<Scene> {
        let device = bench.device;
        let keys = bench.effort.keys.max(bench.effort.chunk);
        let blocks = keys.div_ceil(KV_BLOCK);
        let words =
            [heads.k_width, heads.v_width].map(|w| pool_words(ty, blocks, heads.kv_heads * w));
        let layers = (bench.effort.read_bytes / (4 * (words[0] + words[1]))).clamp(1, LAYERS_MAX);
        let layer =
            |_| Ok([filled(device, "keys", words[0], 0)?, filled(device, "values", words[1], 0)?]);
        let rows = bench.effort.chunk;
        let input = |n: u32| filled(device, "inputs", (rows * n) as usize, 0);
        let Heads { heads: n, kv_heads, k_width, v_width } = heads;
        let row = |row| [0, keys - rows + row, 0, 0, 1, 0, row, rows - 1 - row];
        let all: Vec<u32> = (0..rows).flat_map(row).collect();
        debug_assert_eq!(all.len(), rows as usize * ROW);
        let table: Vec<u32> = (0..blocks).collect();
        let written = |label, words: &[u32]| {
            let buffer = device.buffer(label, words.len())?;
            device.write(buffer, 0, words);
            Ok::<_, fornax_plan::Error>(buffer)
        };
        // Shares, or what comes of them.
        let out = (rows * n * (v_width + 2)).max(SPLIT_ROWS * n * 32 * (v_width + 2));
        Ok(Scene {
            heads,
            ty,
            keys,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            inputs: [input(n * k_width)?, input(kv_heads * k_width)?, input(kv_heads * v_width)?],
            rows: written("rows", &all)?,
            table: written("table", &table)?,
            out: device.buffer("out", out as usize)?,
        })
    }

    fn release(self, bench: &Bench<'_>) {
        let layers = self.layers.into_iter().flatten();
        let all = layers.chain(self.inputs).chain([self.rows, self.table, self.out]);
        all.for_each(|buffer| bench.device.release(buffer));
    }

    fn each(&self, together: u32, simds: u32) -> Vec<u32> {
        let Heads { k_width, v_width, .. } = self.heads;
        pieced(&[together, k_width.div_ceil(32), v_width.div_ceil(32), simds], 1)
    }

    /// The pools of a layer among the arguments.
    fn pools(args: &mut Vec<Option<(Buffer, Access)>>, layer: &[Buffer; 2], access: Access) {
        for pool in layer {
            args.push(Some((*pool, access)));
            args.resize(args.len() + PIECES_MAX - 1, None);
        }
    }

    fn append(&self, bench: &mut Bench<'_>, shares: Shares) -> Result<Option<f64>> {
        let Shares { together, splits } = shares;
        let threads = 32 * APPEND_SIMDS;
        let kernel = entry("attention_append", self.ty);
        let own = self.each(together, APPEND_SIMDS);
        let Some(pipeline) = bench.pipeline(&kernel, &own, threads)? else { return Ok(None) };
        let Heads { heads, kv_heads, k_width, v_width } = self.heads;
        let constants = AppendArgs {
            rows: 1,
            heads,
            kv_heads,
            k_width,
            v_width,
            block: KV_BLOCK,
            stride: self.keys.div_ceil(KV_BLOCK),
            window: 0,
            scale: 1.0,
            softcap: 0.0,
            splits,
            part: (heads * splits * (v_width + 2)).next_multiple_of(4),
            q_norm: 0,
            k_norm: 0,
            eps: 0.0,
            pairs: 0,
            halves: 0,
            magnitude: 1.0,
        };
        let calls = self.layers.iter().map(|layer| {
            let mut args: Vec<_> = self.inputs.iter().map(|b| Some((*b, Access::Read))).collect();
            args.extend([None, None, None]);
            args.extend([self.rows, self.table].map(|b| Some((b, Access::Read))));
            Self::pools(&mut args, layer, Access::Write);
            args.push(Some((self.out, Access::Write)));
            let grid = Grid { groups: [splits, heads / together, 1], threads };
            Call { pipeline: &pipeline, args, constants: constants.words(), grid }
        });
        let variant = self.variant("append", shares);
        self.seconds(bench, &variant, &calls.collect::<Vec<_>>()).map(Some)
    }

    fn split(&self, bench: &mut Bench<'_>, shares: Shares) -> Result<Option<f64>> {
        let Shares { together, splits } = shares;
        let kernel = entry("attention_split", self.ty);
        let own = self.each(together, 0);
        let Some(pipeline) = bench.pipeline(&kernel, &own, 32)? else { return Ok(None) };
        let rows = SPLIT_ROWS.min(bench.effort.chunk);
        let groups = [splits, self.heads.heads / together, rows];
        let calls = self.calls(&pipeline, (rows, splits), Grid { groups, threads: 32 }, false);
        self.seconds(bench, &self.variant("split", shares), &calls).map(Some)
    }

    fn tiled(&self, bench: &mut Bench<'_>, together: u32) -> Result<Option<f64>> {
        let kernel = entry("attention_tiled", self.ty);
        let own = self.each(together, 0);
        let Some(pipeline) = bench.pipeline(&kernel, &own, 256)? else { return Ok(None) };
        let rows = bench.effort.chunk;
        let groups = [self.heads.heads / together, rows.div_ceil(TILE_ROWS), 1];
        let calls = self.calls(&pipeline, (rows, 1), Grid { groups, threads: 256 }, true);
        let variant = format!("tiled {} {together}", self.ty.name().to_ascii_lowercase());
        self.seconds(bench, &variant, &calls).map(Some)
    }

    /// A call for every layer; what follows the pools are sinks and results, or shares alone.
    fn calls<'a>(
        &self,
        pipeline: &'a crate::api::Pipeline,
        (rows, splits): (u32, u32),
        grid: Grid,
        sinks: bool,
    ) -> Vec<Call<'a>> {
        let Heads { heads, kv_heads, k_width, v_width } = self.heads;
        let constants = AttentionArgs {
            rows,
            heads,
            kv_heads,
            k_width,
            v_width,
            block: KV_BLOCK,
            stride: self.keys.div_ceil(KV_BLOCK),
            window: 0,
            scale: 1.0,
            softcap: 0.0,
            sinks: 0,
            splits,
        };
        let call = |layer: &[Buffer; 2]| {
            let from = [self.inputs[0], self.rows, self.table];
            let mut args = from.map(|b| Some((b, Access::Read))).to_vec();
            Self::pools(&mut args, layer, Access::Read);
            args.extend(sinks.then_some(None));
            args.push(Some((self.out, Access::Write)));
            Call { pipeline, args, constants: constants.words(), grid }
        };
        self.layers.iter().map(call).collect()
    }

    fn variant(&self, kind: &str, shares: Shares) -> String {
        let ty = self.ty.name().to_ascii_lowercase();
        format!("{kind} {ty} {}x{}", shares.together, shares.splits)
    }

    fn seconds(&self, bench: &mut Bench<'_>, variant: &str, calls: &[Call<'_>]) -> Result<f64> {
        let bytes: usize = self.layers[0].iter().map(|b| b.len_bytes).sum();
        let times = (bench.effort.read_bytes / bytes.max(1)).max(calls.len());
        bench.seconds(variant, calls, times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn heads_are_listed_once_for_every_cache() {
        let plan = conformance::proof(TensorType::F32).plan;
        assert_eq!(trials(&plan).len(), 1);
        let lines = listing(&plan);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[0].starts_with("attention_f16 ") && lines[0].contains("split 1x1"),
            "{lines:?}"
        );
    }
}
