//! The committed fuzz corpus, and seeded mutations of it, through everything a caller may do. It must not
//! know which of them are sound.
//!
//! With `FORNAX_BLESS` set in the environment the seeds of the corpus are written anew.

use std::path::{Path, PathBuf};

use fornax_gguf::{Gguf, GgufWriter, Metadata, TensorType};

use crate::bytes::{header, kv, kv_array, kv_u32, string, t, tensor, valid, with_data};
use crate::exercise;
use crate::oracle::{ALLOCATION_MAX, peak_of};

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// A tensor of every type, one block each.
fn every_tensor_type() -> Vec<u8> {
    let metadata = Metadata::new();
    let mut writer = GgufWriter::new(&metadata).unwrap();
    for ty in TensorType::ALL {
        writer.tensor(ty.name(), *ty, &[ty.block_len() as u64]).unwrap();
    }
    let mut data = writer.begin(Vec::new()).unwrap();
    for ty in TensorType::ALL {
        let bytes: Vec<u8> = (0..ty.block_bytes()).map(|i| (i * 37 + 11) as u8).collect();
        data.write(&bytes).unwrap();
    }
    data.finish().unwrap()
}

/// A value of every type, arrays and arrays of arrays among them.
fn every_value_type() -> Vec<u8> {
    let scalars = (0..=12).filter(|&id| id != t::STRING && id != t::ARRAY);
    let mut keys: Vec<Vec<u8>> = scalars
        .flat_map(|id| {
            let len = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][id as usize];
            let value = vec![1; len];
            [
                kv(&format!("s{id}"), id, &value),
                kv_array(&format!("a{id}"), id, 2, &value.repeat(2)),
            ]
        })
        .collect();
    keys.push(kv("s8", t::STRING, &string(b"text")));
    keys.push(kv_array("a8", t::STRING, 2, &[string(b"x"), string(b"\xFF")].concat()));
    let inner = [&t::U8.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 2]].concat();
    keys.push(kv_array("a9", t::ARRAY, 2, &inner.repeat(2)));
    [header(3, 0, keys.len() as u64), keys.concat()].concat()
}

fn aligned() -> Vec<u8> {
    let head = [header(3, 1, 1), kv_u32("general.alignment", 64), tensor("t", &[4, 2, 2], 1, 0)];
    with_data(head.concat(), 64, &[1; 32])
}

fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("v2.gguf", valid(2)),
        ("v3.gguf", valid(3)),
        ("tensor-types.gguf", every_tensor_type()),
        ("value-types.gguf", every_value_type()),
        ("aligned.gguf", aligned()),
        ("empty.gguf", header(3, 0, 0)),
        ("zero-dimension.gguf", [header(3, 1, 0), tensor("t", &[4, 0], 0, 0)].concat()),
        ("wrapping.gguf", [header(3, 1, 0), tensor("t", &[1 << 31, 1 << 31, 4], 0, 0)].concat()),
        ("big-endian.gguf", valid(0x0300_0000)),
    ]
}

/// One file for each type: its place in the list of types, then a few blocks.
fn block_seeds() -> Vec<(String, Vec<u8>)> {
    let seed = |(index, ty): (usize, &TensorType)| {
        let bytes = (0..2 * ty.block_bytes()).map(|i| (i * 37 + 11) as u8);
        (ty.name().to_owned(), std::iter::once(index as u8).chain(bytes).collect())
    };
    TensorType::ALL.iter().enumerate().map(seed).collect()
}

fn check_seeds<'a>(target: &str, seeds: impl IntoIterator<Item = (&'a str, &'a [u8])>) {
    let folder = corpus(target);
    for (name, bytes) in seeds {
        let path = folder.join(name);
        if std::env::var_os("FORNAX_BLESS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, bytes).unwrap();
        }
        let found = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(found == bytes, "{} is stale; set FORNAX_BLESS to write it anew", path.display());
    }
}

fn files(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut paths: Vec<_> =
        std::fs::read_dir(corpus(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|p| (p.display().to_string(), std::fs::read(p).unwrap())).collect()
}

/// Runs `f` and asserts that it did not allocate out of proportion.
fn bounded<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let (result, peak) = peak_of(f);
    assert!(peak < ALLOCATION_MAX, "{what}: {peak} bytes allocated");
    result
}

#[test]
fn the_corpus_opens_or_is_refused() {
    let seeds = seeds();
    check_seeds("gguf_open", seeds.iter().map(|(name, bytes)| (*name, &**bytes)));
    let files = files("gguf_open");
    assert!(files.len() >= seeds.len());
    let opened =
        files.iter().filter(|(name, bytes)| bounded(name, || exercise::open(bytes))).count();
    assert!(opened >= 6, "{opened} of {} opened", files.len());
}

#[test]
fn the_corpus_of_blocks_is_decoded() {
    let seeds = block_seeds();
    check_seeds("gguf_blocks", seeds.iter().map(|(name, bytes)| (&**name, &**bytes)));
    let files = files("gguf_blocks");
    assert!(files.len() >= TensorType::ALL.len());
    for (name, bytes) in &files {
        bounded(name, || exercise::blocks(bytes));
    }
}

/// A small generator with a seed (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at which arithmetic turns.
const TURNS: [u64; 12] =
    [0, 1, 9, 13, 255, 65_536, 1 << 31, u32::MAX as u64, 1 << 61, (1 << 62) - 1, 1 << 63, u64::MAX];

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        let len = 1 + random.below(16);
        let end = (at + len).min(bytes.len());
        match random.below(6) {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => {
                let turn = TURNS[random.below(TURNS.len())].to_le_bytes();
                let width = if random.below(2) == 0 { 4 } else { 8 };
                for (b, t) in bytes[at..].iter_mut().zip(&turn[..width]) {
                    *b = *t;
                }
            }
            3 => drop(bytes.drain(at..end)),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => {
                let byte = random.next() as u8;
                bytes[at..end].fill(byte);
            }
        }
    }
}

#[test]
fn mutated_files_open_or_are_refused() {
    let seeds = seeds();
    let (mut opened, total) = (0, 20_000);
    for seed in 1..=total {
        let mut random = Random(seed);
        let mut bytes = seeds[random.below(seeds.len())].1.clone();
        mutate(&mut bytes, &mut random);
        opened += usize::from(bounded(&format!("seed {seed}"), || exercise::open(&bytes)));
    }
    // Enough get through to reach what lies behind the parser, and enough do not.
    println!("{opened} of {total} opened");
    assert!((500..total as usize - 5000).contains(&opened), "{opened} of {total} opened");
}

#[test]
fn mutated_blocks_are_decoded() {
    let seeds = block_seeds();
    for seed in 1..=2_000 {
        let mut random = Random(seed);
        let mut bytes = seeds[random.below(seeds.len())].1.clone();
        mutate(&mut bytes, &mut random);
        bounded(&format!("seed {seed}"), || exercise::blocks(&bytes));
    }
}

#[test]
fn every_test_model_opens_and_decodes() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models");
    let mut n = 0;
    for folder in std::fs::read_dir(models).unwrap() {
        let path = folder.unwrap().path().join("model.gguf");
        let bytes = std::fs::read(&path).unwrap();
        assert!(exercise::open(&bytes), "{}", path.display());
        let whole = Gguf::open(&path).unwrap();
        assert_eq!(whole.version(), 3, "{}", path.display());
        assert!(whole.metadata().require_str("general.architecture").is_ok(), "{}", path.display());
        // Cut within the data: refused, whatever the file.
        assert!(!exercise::open(&bytes[..bytes.len() - 4096]), "{}", path.display());
        n += 1;
    }
    assert!(n >= 10, "{n} models");
}
