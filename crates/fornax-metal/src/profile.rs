//! What was measured on one GPU: for shapes of matrices and of attention the fastest variant, as a small text file. It
//! knows no device.

use std::collections::BTreeMap;
use std::fmt;

use fornax_gguf::TensorType;
use fornax_plan::{Error, Result};

use crate::policy::{Heads, Shares, Tile, small_rows_fit};

const HEAD: &str = "fornax metal profile 2";

/// What a line is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// A matrix's type, outputs and columns: outputs and simdgroups of a threadgroup.
    Matvec(String, [u32; 2]),
    /// The same: rows up to which the small product is the faster.
    Small(String, [u32; 2]),
    /// A cache's type and heads: query heads of a threadgroup, and shares, of the append.
    Append(String, Heads),
    /// The same of attention of few rows.
    Split(String, Heads),
    /// Query heads of a threadgroup of attention of many rows.
    Tiled(String, Heads),
}

/// The fastest variants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    gpu: String,
    lines: BTreeMap<Key, Vec<u32>>,
}

impl Profile {
    /// An empty one for the GPU of that name.
    pub(crate) fn new(gpu: &str) -> Profile {
        Profile { gpu: gpu.to_string(), lines: BTreeMap::new() }
    }

    /// Reads what [`Profile`]'s `Display` wrote.
    ///
    /// # Errors
    /// `is_malformed` naming the line; `is_unsupported` for another GPU's.
    pub(crate) fn parse(text: &str, gpu: &str) -> Result<Profile> {
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, line)| line) != Some(HEAD) {
            return Err(Error::malformed(format!(
                "metal profile: the first line is not {HEAD:?}; run `fornax tune` again"
            )));
        }
        let of = lines.next().and_then(|(_, line)| line.strip_prefix("gpu ")).unwrap_or_default();
        if of != gpu {
            return Err(Error::unsupported(format!(
                "metal profile: measured on {of:?}, this is {gpu:?}; run `fornax tune` again"
            )));
        }
        let mut profile = Profile::new(gpu);
        for (at, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let (key, values) = read(line).ok_or_else(|| {
                let at = at + 1;
                Error::malformed(format!(
                    "metal profile: line {at} is {line:?}, which names no variant that there is; run `fornax tune` again"
                ))
            })?;
            profile.lines.insert(key, values);
        }
        Ok(profile)
    }

    pub(crate) fn set_tile(&mut self, ty: TensorType, outs: u32, cols: u32, tile: Tile) {
        self.lines.insert(Key::Matvec(name(ty), [outs, cols]), vec![tile.outs, tile.simds]);
    }

    pub(crate) fn tile(&self, ty: TensorType, outs: u32, cols: u32) -> Option<Tile> {
        let found = self.lines.get(&Key::Matvec(name(ty), [outs, cols]))?;
        Some(Tile { outs: found[0], simds: found[1] })
    }

    pub(crate) fn set_small_rows(&mut self, ty: TensorType, outs: u32, cols: u32, rows: u32) {
        self.lines.insert(Key::Small(name(ty), [outs, cols]), vec![rows]);
    }

    pub(crate) fn small_rows(&self, ty: TensorType, outs: u32, cols: u32) -> Option<u32> {
        self.lines.get(&Key::Small(name(ty), [outs, cols])).map(|found| found[0])
    }

    pub(crate) fn set_append(&mut self, kv: TensorType, heads: Heads, shares: Shares) {
        self.lines.insert(Key::Append(name(kv), heads), vec![shares.together, shares.splits]);
    }

    pub(crate) fn append(&self, kv: TensorType, heads: Heads) -> Option<Shares> {
        self.lines.get(&Key::Append(name(kv), heads)).map(|v| shares(v))
    }

    pub(crate) fn set_split(&mut self, kv: TensorType, heads: Heads, shares: Shares) {
        self.lines.insert(Key::Split(name(kv), heads), vec![shares.together, shares.splits]);
    }

    pub(crate) fn split(&self, kv: TensorType, heads: Heads) -> Option<Shares> {
        self.lines.get(&Key::Split(name(kv), heads)).map(|v| shares(v))
    }

    pub(crate) fn set_tiled(&mut self, kv: TensorType, heads: Heads, together: u32) {
        self.lines.insert(Key::Tiled(name(kv), heads), vec![together]);
    }

    pub(crate) fn tiled(&self, kv: TensorType, heads: Heads) -> Option<u32> {
        self.lines.get(&Key::Tiled(name(kv), heads)).map(|found| found[0])
    }
}

fn shares(found: &[u32]) -> Shares {
    Shares { together: found[0], splits: found[1] }
}

fn name(ty: TensorType) -> String {
    ty.name().to_ascii_lowercase()
}

/// A line's key and values, as long as they name a variant that there is: a file may not make a kernel run out of its
/// bounds.
fn read(line: &str) -> Option<(Key, Vec<u32>)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [kind, ty, numbers @ ..] = &words[..] else { return None };
    let numbers: Vec<u32> = numbers.iter().map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let ty = (*ty).to_string();
    let of_heads =
        |n: [u32; 4]| Heads { heads: n[0], kv_heads: n[1], k_width: n[2], v_width: n[3] };
    let (key, values, fits) = match (*kind, &numbers[..]) {
        ("matvec", &[outs, cols, each, simds]) => {
            let tile = Tile { outs: each, simds };
            (Key::Matvec(ty, [outs, cols]), vec![each, simds], tile.fits())
        }
        ("small", &[outs, cols, rows]) => {
            (Key::Small(ty, [outs, cols]), vec![rows], small_rows_fit(rows))
        }
        ("append", &[a, b, c, d, together, splits]) => {
            let (heads, shares) = (of_heads([a, b, c, d]), Shares { together, splits });
            (Key::Append(ty, heads), vec![together, splits], heads.appends(shares))
        }
        ("split", &[a, b, c, d, together, splits]) => {
            let (heads, shares) = (of_heads([a, b, c, d]), Shares { together, splits });
            (Key::Split(ty, heads), vec![together, splits], heads.splits(shares))
        }
        ("tiled", &[a, b, c, d, together]) => {
            let heads = of_heads([a, b, c, d]);
            (Key::Tiled(ty, heads), vec![together], heads.takes(together))
        }
        _ => return None,
    };
    fits.then_some((key, values))
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}\ngpu {}", self.gpu)?;
        for (key, values) in &self.lines {
            match key {
                Key::Matvec(ty, [outs, cols]) => write!(f, "matvec {ty} {outs} {cols}")?,
                Key::Small(ty, [outs, cols]) => write!(f, "small {ty} {outs} {cols}")?,
                Key::Append(ty, heads) => write!(f, "append {ty} {heads}")?,
                Key::Split(ty, heads) => write!(f, "split {ty} {heads}")?,
                Key::Tiled(ty, heads) => write!(f, "tiled {ty} {heads}")?,
            }
            values.iter().try_for_each(|v| write!(f, " {v}"))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { heads: 32, kv_heads: 8, k_width: 128, v_width: 128 };

    #[test]
    fn what_is_written_is_read() {
        let mut profile = Profile::new("Apple M4 Max");
        profile.set_tile(TensorType::Q4_K, 4096, 14_336, Tile { outs: 2, simds: 8 });
        profile.set_tile(TensorType::Q8_0, 1024, 3072, Tile { outs: 4, simds: 2 });
        profile.set_small_rows(TensorType::Q4_K, 4096, 14_336, 32);
        profile.set_append(TensorType::F16, HEADS, Shares { together: 4, splits: 8 });
        profile.set_split(TensorType::F16, HEADS, Shares { together: 2, splits: 32 });
        profile.set_tiled(TensorType::Q8_0, HEADS, 2);
        let text = profile.to_string();
        assert_eq!(text.lines().count(), 2 + 6, "{text}");
        let read = Profile::parse(&text, "Apple M4 Max").unwrap();
        assert_eq!(read, profile);
        assert_eq!(read.small_rows(TensorType::Q4_K, 4096, 14_336), Some(32));
        assert_eq!(read.append(TensorType::F16, HEADS).map(|s| s.splits), Some(8));
        assert_eq!(read.split(TensorType::F16, HEADS).map(|s| s.together), Some(2));
        assert_eq!(read.tiled(TensorType::Q8_0, HEADS), Some(2));
        assert_eq!(read.tiled(TensorType::F16, HEADS), None, "another cache");
        assert!(Profile::parse(&text, "Apple M1").unwrap_err().is_unsupported());
    }

    #[test]
    fn what_no_kernel_could_run_is_refused_by_line() {
        let head = format!("{HEAD}\ngpu M\n");
        for bad in [
            "matvec q8_0 1 2 3",
            "matvec q8_0 1024 1024 8 4",
            "matvec q8_0 1024 1024 0 4",
            "matvec q8_0 1024 1024 4 64",
            "matvec q8_0 1024 x 4 8",
            "matmul q8_0 1024 1024 4 8",
            "small q8_0 1024 1024 3",
            "append f16 32 8 128 128 3 4",
            "append f16 32 8 128 128 4 17",
            "append f16 32 0 128 128 4 4",
            "split f16 32 8 128 128 4 33",
            "split f16 32 8 128 128 0 8",
            "split f16 32 8 512 128 4 8",
            "tiled f16 32 8 128 128 16",
        ] {
            let e = Profile::parse(&format!("{head}{bad}\n"), "M").unwrap_err();
            assert!(e.is_malformed() && e.to_string().contains("line 3"), "{bad}: {e}");
        }
        assert!(Profile::parse("something else", "M").unwrap_err().is_malformed());
        assert!(Profile::parse("", "M").unwrap_err().is_malformed());
    }
}
