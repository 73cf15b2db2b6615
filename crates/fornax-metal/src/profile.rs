//! What was measured on one GPU: for shapes of matrices the fastest tile, as a small text file. It knows no device.

use std::collections::BTreeMap;
use std::fmt;

use fornax_gguf::TensorType;
use fornax_plan::{Error, Result};

use crate::policy::Tile;

const HEAD: &str = "fornax metal profile 1";

/// Tiles by type, outputs and columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    gpu: String,
    tiles: BTreeMap<(String, u32, u32), (u32, u32)>,
}

impl Profile {
    /// An empty one for the GPU of that name.
    pub(crate) fn new(gpu: &str) -> Profile {
        Profile { gpu: gpu.to_string(), tiles: BTreeMap::new() }
    }

    /// Reads what [`Profile`]'s `Display` wrote.
    ///
    /// # Errors
    /// `is_malformed` naming the line; `is_unsupported` for another GPU's.
    pub(crate) fn parse(text: &str, gpu: &str) -> Result<Profile> {
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, line)| line) != Some(HEAD) {
            return Err(Error::malformed(format!("metal profile: the first line is not {HEAD:?}")));
        }
        let of = lines.next().and_then(|(_, line)| line.strip_prefix("gpu ")).unwrap_or_default();
        if of != gpu {
            return Err(Error::unsupported(format!(
                "metal profile: measured on {of:?}, this is {gpu:?}; run `fornax tune` again"
            )));
        }
        let mut profile = Profile::new(gpu);
        for (at, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let (key, tile) = matvec(line).ok_or_else(|| {
                let at = at + 1;
                Error::malformed(format!(
                    "metal profile: line {at} is {line:?}, expected: matvec TYPE OUTPUTS COLUMNS OUTPUTS_EACH SIMDGROUPS"
                ))
            })?;
            profile.tiles.insert(key, tile);
        }
        Ok(profile)
    }

    pub(crate) fn insert(&mut self, ty: TensorType, outs: u32, cols: u32, tile: Tile) {
        self.tiles.insert((name(ty), outs, cols), (tile.outs, tile.simds));
    }

    pub(crate) fn tile(&self, ty: TensorType, outs: u32, cols: u32) -> Option<Tile> {
        let found = self.tiles.get(&(name(ty), outs, cols));
        found.map(|(outs, simds)| Tile { outs: *outs, simds: *simds })
    }
}

fn name(ty: TensorType) -> String {
    ty.name().to_ascii_lowercase()
}

type Measured = ((String, u32, u32), (u32, u32));

fn matvec(line: &str) -> Option<Measured> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["matvec", ty, numbers @ ..] = &words[..] else { return None };
    let numbers: Vec<u32> = numbers.iter().map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [outs, cols, outs_each, simds] = numbers[..] else { return None };
    // A file may not make a kernel run out of its bounds.
    let tile = Tile { outs: outs_each, simds };
    tile.fits().then(|| (((*ty).to_string(), outs, cols), (outs_each, simds)))
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}\ngpu {}", self.gpu)?;
        for ((ty, outs, cols), (outs_each, simds)) in &self.tiles {
            writeln!(f, "matvec {ty} {outs} {cols} {outs_each} {simds}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut profile = Profile::new("Apple M4 Max");
        profile.insert(TensorType::Q4_K, 4096, 14_336, Tile { outs: 2, simds: 8 });
        profile.insert(TensorType::Q8_0, 1024, 3072, Tile { outs: 4, simds: 2 });
        let text = profile.to_string();
        assert_eq!(Profile::parse(&text, "Apple M4 Max").unwrap(), profile);
        assert!(Profile::parse(&text, "Apple M1").unwrap_err().is_unsupported());
    }

    #[test]
    fn what_no_kernel_could_run_is_refused_by_line() {
        let head = "fornax metal profile 1\ngpu M\n";
        for bad in [
            "matvec q8_0 1 2 3",
            "matvec q8_0 1024 1024 8 4",
            "matvec q8_0 1024 1024 0 4",
            "matvec q8_0 1024 1024 4 64",
            "matvec q8_0 1024 x 4 8",
            "matmul q8_0 1024 1024 4 8",
        ] {
            let e = Profile::parse(&format!("{head}{bad}\n"), "M").unwrap_err();
            assert!(e.is_malformed() && e.to_string().contains("line 3"), "{e}");
        }
        assert!(Profile::parse("something else", "M").unwrap_err().is_malformed());
        assert!(Profile::parse("", "M").unwrap_err().is_malformed());
    }
}
