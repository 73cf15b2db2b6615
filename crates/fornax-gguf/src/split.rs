//! Models split into several files: which files belong together and whether they agree. It must not know
//! what is in the tensors.
//!
//! `split.no` counts from 0, file names count from 1; `split.count` is in every file,
//! `split.tensors.count` is the total; the other keys need to be in the first file only.

use std::path::{Path, PathBuf};

use crate::error::quoted;
use crate::file::Shard;
use crate::{Error, Metadata};

const KEY_NO: &str = "split.no";
const KEY_COUNT: &str = "split.count";
const KEY_TENSORS: &str = "split.tensors.count";

/// All files of the set that `opened` belongs to, in order, checked against each other.
pub(crate) fn complete(opened: Shard) -> Result<Vec<Shard>, Error> {
    let count = split_count(&opened.header.metadata).map_err(|e| named(e, &opened))?;
    if count == 1 {
        return Ok(vec![opened]);
    }
    let Some(path) = opened.path.clone() else {
        return Err(Error::missing(format!(
            "opening one of {count} files of a split model from memory: its fellows cannot be found; open \
             the first by its path"
        )));
    };
    let name = ShardName::of(&path, count)?;
    let mut opened = Some(opened);
    let mut shards = Vec::with_capacity(usize::from(count));
    for no in 0..count {
        let shard = match opened.take_if(|_| no == name.no) {
            Some(shard) => shard,
            None => open_fellow(&name.path(no), no, count)?,
        };
        check(&shard, no, count).map_err(|e| named(e, &shard))?;
        shards.push(shard);
    }
    check_total(&shards).map_err(|e| named(e, &shards[0]))?;
    Ok(shards)
}

fn split_count(metadata: &Metadata) -> Result<u16, Error> {
    match metadata.u32(KEY_COUNT)? {
        None => Ok(1),
        Some(count) => match u16::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Error::malformed(format!(
                "reading metadata key \"{KEY_COUNT}\": found {count}, expected 1 to 65535"
            ))),
        },
    }
}

fn open_fellow(path: &Path, no: u16, count: u16) -> Result<Shard, Error> {
    if !path.exists() {
        return Err(Error::missing(format!(
            "opening file {} of {count} of a split model: it is not there; put all {count} files into one folder",
            no + 1
        ))
        .in_file(path));
    }
    Shard::open(path)
}

/// Checks what one file says of its place in the set.
fn check(shard: &Shard, no: u16, count: u16) -> Result<(), Error> {
    let metadata = &shard.header.metadata;
    let found = metadata.require_u32(KEY_COUNT)?;
    if found != u32::from(count) {
        return Err(Error::malformed(format!(
            "reading metadata key \"{KEY_COUNT}\": found {found}, but this is one of {count} files by its name \
             or its fellows; the files are of different sets"
        )));
    }
    let found = metadata.require_u32(KEY_NO)?;
    if found != u32::from(no) {
        return Err(Error::malformed(format!(
            "reading metadata key \"{KEY_NO}\": found {found}, expected {no} by the file's name (names count from \
             1, the key from 0); the file was renamed"
        )));
    }
    // A first file with metadata alone is common; one later without tensors has lost them.
    if no > 0 && shard.header.tensors.is_empty() {
        return Err(Error::malformed(format!(
            "reading file {} of {count} of a split model: it holds no tensors",
            no + 1
        )));
    }
    Ok(())
}

fn check_total(shards: &[Shard]) -> Result<(), Error> {
    let total: u64 = shards.iter().map(|s| s.header.tensors.len() as u64).sum();
    shards[0].header.metadata.require_u32(KEY_TENSORS)?;
    for shard in shards {
        if let Some(said) = shard.header.metadata.u64(KEY_TENSORS).map_err(|e| named(e, shard))?
            && said != total
        {
            return Err(named(
                Error::malformed(format!(
                    "reading metadata key \"{KEY_TENSORS}\": found {said}, but the {} files hold {total} tensors; \
                     the files are of different sets",
                    shards.len()
                )),
                shard,
            ));
        }
    }
    Ok(())
}

fn named(error: Error, shard: &Shard) -> Error {
    match &shard.path {
        Some(path) => error.in_file(path),
        None => error,
    }
}

/// A file name of the form `PREFIX-00002-of-00003.gguf`, taken apart.
struct ShardName {
    folder: PathBuf,
    prefix: String,
    no: u16,
    count: u16,
}

impl ShardName {
    fn of(path: &Path, count: u16) -> Result<ShardName, Error> {
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let parsed = parse_name(&file).filter(|&(_, no, of)| of == count && (1..=of).contains(&no));
        let Some((prefix, no, _)) = parsed else {
            return Err(Error::malformed(format!(
                "opening a split model: {} is one of {count} files, expected a name of the form \
                 NAME-00001-of-{count:05}.gguf; give the files their names back and open the first",
                quoted(&file)
            ))
            .in_file(path));
        };
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(ShardName { folder, prefix: prefix.to_owned(), no: no - 1, count })
    }

    fn path(&self, no: u16) -> PathBuf {
        self.folder.join(format!("{}-{:05}-of-{:05}.gguf", self.prefix, no + 1, self.count))
    }
}

/// Prefix, number from 1, and count.
fn parse_name(file: &str) -> Option<(&str, u16, u16)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        if plain { digits.parse().ok() } else { None }
    };
    Some((prefix, number(no)?, number(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(parse_name("m-00002-of-00003.gguf"), Some(("m", 2, 3)));
        assert_eq!(parse_name("a-of-b-00001-of-00010.gguf"), Some(("a-of-b", 1, 10)));
        for name in [
            "m.gguf",
            "m-2-of-3.gguf",
            "m-00002-of-00003",
            "00001-of-00002.gguf",
            "m-0000é-of-00003.gguf",
            "m-+0002-of-00003.gguf",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }
}
