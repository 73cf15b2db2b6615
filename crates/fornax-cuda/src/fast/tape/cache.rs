//! Keys and values of an 8-bit cache as boxes: 32 tokens of a KV head, which a kernel has copied to shared memory by one
//! instruction (`kernels/tape/boxes.cuh`). It knows no step.

use fornax_plan::KvType;

use super::Source;
use super::share::Geometry;
use crate::driver::{BoxMap, Boxes};
use crate::fast::decode::Parts;

/// Tokens of a box, and bytes of a line of one.
const TOKENS: u32 = 32;
const LINE: u32 = 64;
/// Keys and values may lie so far apart.
const FAR: u64 = 1 << 40;

/// A layer's keys and values, which come in one box, the pool at the lower address first.
#[derive(Clone, Copy, Debug)]
struct Pools {
    low: u64,
    apart: u64,
    tokens: u64,
    /// Of a token, and of a head of it: numbers, a byte each.
    width: u32,
    head: u32,
}

/// Whether values lie before keys.
pub(super) fn flipped([keys, values]: [u64; 2]) -> bool {
    values < keys
}

/// A map of boxes for every layer, of nothing where the cache has none. Else why there are none.
pub(super) fn boxes(p: &Parts<'_>, source: &Source<'_>, g: &Geometry) -> Result<Vec<u8>, String> {
    let mut all = Vec::with_capacity(source.layers.len() * size_of::<BoxMap>());
    for layer in source.layers {
        let [_, attend, ..] = layer.stages;
        let [keys, values, ..] = source.stages[attend].w;
        let pools = Pools {
            low: keys.min(values),
            apart: keys.abs_diff(values),
            tokens: u64::from(p.limits.kv_blocks) * u64::from(crate::prepare::KV_BLOCK),
            width: g.kv_heads * g.dim,
            head: g.dim,
        };
        let map: BoxMap = match p.limits.kv_type {
            KvType::Q8_0 if pools.apart >= FAR => {
                return Err(format!("keys and values {} bytes apart", pools.apart));
            }
            KvType::Q8_0 => p.gpu.boxes(&pools.boxes()).map_err(|e| e.to_string())?,
            KvType::F16 | KvType::F32 => [0; 128],
        };
        all.extend(map);
    }
    Ok(all)
}

impl Pools {
    /// Lines of a token's head by token, then by line of a token, then by pool.
    fn boxes(&self) -> Boxes {
        Boxes {
            at: self.low,
            sizes: [u64::from(LINE), self.tokens, u64::from(self.width / LINE), 2],
            strides: [u64::from(self.width), u64::from(LINE), self.apart],
            each: [LINE, TOKENS, self.head / LINE, 2],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_what_a_run_of_tokens_has_of_a_head() {
        let pools = |heads, head| Pools {
            low: 4096,
            apart: 1 << 20,
            tokens: 640,
            width: heads * head,
            head,
        };
        let b = pools(8, 128).boxes();
        assert_eq!((b.at, b.sizes, b.each), (4096, [64, 640, 16, 2], [64, 32, 2, 2]));
        assert_eq!(b.strides, [1024, 64, 1 << 20]);
        let b = pools(5, 64).boxes();
        assert_eq!(
            (b.sizes, b.strides, b.each),
            ([64, 640, 5, 2], [320, 64, 1 << 20], [64, 32, 1, 2])
        );
    }
}
