//! How long a command takes on the slowest chip, by rows, bytes and keys: what command buffers are cut by. Coarse, and corrected
//! by what is measured. It knows no queue.

use fornax_gguf::TensorType;
use fornax_plan::{Op, Plan};

/// Bytes that the slowest chip (M1) reads in a second.
const BYTES_PER_S: f64 = 60e9;
/// Weight bytes times rows that it multiplies in a second, as matrices of 8-bit blocks.
const ROW_BYTES_PER_S: f64 = 600e9;
/// Products of a query's element with a key's, or of a weight with a value's, that it adds up in a second.
const PRODUCTS_PER_S: f64 = 500e9;

/// What one row of a command asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Bytes of weights.
    pub(crate) bytes: u64,
    /// What it does for every key that it sees.
    pub(crate) keys: Option<Keys>,
}

/// A row's work for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    /// Bytes of the key and its value, of all heads.
    pub(crate) bytes: u64,
    /// Multiplications, of all query heads.
    pub(crate) products: u64,
    /// The most keys that a row sees.
    pub(crate) window: Option<u32>,
    /// Rows that share a key that was read.
    pub(crate) shared_by: u32,
}

impl Work {
    /// A row's work for an op in one command, with a cache of this type.
    pub(crate) fn of(plan: &Plan, op: &Op, kv_type: TensorType) -> Work {
        let keys = match op {
            Op::Attention { kv, heads, .. } => {
                let g = &plan.kv[kv.group as usize];
                let each = u64::from(g.k_width + g.v_width);
                let (heads, elements) = (u64::from(*heads), u64::from(g.heads) * each);
                let bytes = elements * kv_type.block_bytes() as u64 / kv_type.block_len() as u64;
                let products = heads * each;
                Some(Keys { bytes, products, window: g.window, shared_by: 1 })
            }
            _ => None,
        };
        Work { bytes: plan.op_bytes_per_token(op), keys }
    }

    /// The same where so many rows share a key.
    pub(crate) fn shared_by(self, rows: u32) -> Work {
        Work { keys: self.keys.map(|keys| Keys { shared_by: rows, ..keys }), ..self }
    }

    /// A row's work for a product with so many bytes of weights.
    pub(crate) fn product(bytes: usize) -> Work {
        Work { bytes: bytes as u64, keys: None }
    }

    /// Keys that a row at `pos` sees; 0 where the command looks at none.
    pub(crate) fn seen(&self, pos: u32) -> u64 {
        let seen = |k: Keys| k.window.map_or(pos + 1, |w| w.min(pos + 1));
        self.keys.map_or(0, |k| u64::from(seen(k)))
    }

    /// Different bytes that rows which see `keys` together read.
    pub(crate) fn read(&self, keys: u64) -> u64 {
        self.bytes + self.keys.map_or(0, |k| keys * k.bytes / u64::from(k.shared_by.max(1)))
    }

    /// Seconds for `rows` that see `keys` together.
    pub(crate) fn seconds(&self, rows: usize, keys: u64) -> f64 {
        let again = rows.saturating_sub(1) as f64;
        let weights = self.bytes as f64 * (1.0 / BYTES_PER_S + again / ROW_BYTES_PER_S);
        let of_key = self.keys.map_or(0.0, |k| {
            let read = k.bytes as f64 / (BYTES_PER_S * f64::from(k.shared_by));
            read.max(k.products as f64 / PRODUCTS_PER_S)
        });
        weights + keys as f64 * of_key
    }

    /// The end of the part of the rows from `start` on that takes no more than `most` seconds, a multiple of `grain` rows and
    /// one at least; and the keys that it sees.
    pub(crate) fn part(
        &self,
        (start, rows, grain): (usize, usize, usize),
        most: f64,
        pos: impl Fn(usize) -> u32,
    ) -> (usize, u64) {
        let of = |rows: std::ops::Range<usize>| rows.map(|row| self.seen(pos(row))).sum::<u64>();
        let mut end = (start + grain).min(rows);
        let mut keys = of(start..end);
        while end < rows {
            let next = (end + grain).min(rows);
            let more = keys + of(end..next);
            if self.seconds(next - start, more) > most {
                break;
            }
            (end, keys) = (next, more);
        }
        (end, keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layer of Llama-8B: 32 query heads on 8 of keys, 128 wide.
    const KEYS: Keys = Keys { bytes: 8192, products: 8192, window: None, shared_by: 8 };
    const ATTENTION: Work = Work { bytes: 0, keys: Some(KEYS) };

    fn parts(work: &Work, first: u32, rows: usize, most: f64) -> Vec<(usize, f64)> {
        let mut all = Vec::new();
        let mut start = 0;
        while start < rows {
            let (end, keys) = work.part((start, rows, 8), most, |row| first + row as u32);
            let seconds = work.seconds(end - start, keys);
            assert!(end > start && (end == rows || end % 8 == 0), "{start} to {end}");
            all.push((end - start, seconds));
            start = end;
        }
        assert_eq!(all.iter().map(|p| p.0).sum::<usize>(), rows);
        all
    }

    #[test]
    fn attention_of_a_long_prompt_is_parted_so_that_no_part_is_long() {
        // The last chunk of a prompt of 32,000 and of 128,000 tokens, and the first.
        let long = parts(&ATTENTION, 31_488, 512, 0.1);
        assert!(long.len() > 2 && long.iter().all(|(_, s)| *s <= 0.1), "{long:?}");
        let longer = parts(&ATTENTION, 127_488, 512, 0.1);
        assert!(longer.len() > 8 && longer.iter().all(|(_, s)| *s <= 0.1), "{longer:?}");
        assert_eq!(parts(&ATTENTION, 0, 512, 0.1).len(), 1);
        // Parts of later rows, which see more, are of fewer rows.
        let rising = parts(&ATTENTION, 0, 512, 2e-4);
        assert!(rising[0].0 > rising[rising.len() - 2].0, "{rising:?}");
        // Eight rows are the least; they take a tenth of a second where there are 750,000 keys.
        assert_eq!(parts(&ATTENTION, 0, 64, 0.0).len(), 8);
        assert!(ATTENTION.seconds(8, 8 * 750_000) < 0.11);
    }

    #[test]
    fn a_window_bounds_what_a_row_sees() {
        let work = Work { bytes: 0, keys: Some(Keys { window: Some(1024), ..KEYS }) };
        assert_eq!((work.seen(10), work.seen(1023), work.seen(90_000)), (11, 1024, 1024));
        assert_eq!(parts(&work, 127_488, 512, 0.1).len(), 1);
        assert_eq!(Work::product(100).seen(7), 0);
    }

    #[test]
    fn a_product_is_parted_by_its_weights() {
        // The logits of Llama-8B for 512 rows.
        let work = Work::product(430_000_000);
        let all = parts(&work, 0, 512, 0.1);
        assert!(all.len() > 3 && all.iter().all(|(_, s)| *s <= 0.1), "{all:?}");
        assert_eq!(parts(&work, 0, 1, 0.0).len(), 1);
    }
}
