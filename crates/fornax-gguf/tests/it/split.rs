//! Models in several files: which sets open and which are refused. It must not know the tensors' contents.

use std::path::{Path, PathBuf};

use fornax_gguf::{Error, Gguf, GgufWriter, Metadata, TensorType};

use crate::oracle::Folder;

/// What a shard says of itself; the tensors are `t<n>`, 8 floats of value `n`.
struct Shard {
    no: u16,
    count: u16,
    total: i32,
    tensors: Vec<u32>,
}

impl Shard {
    fn bytes(&self) -> Vec<u8> {
        let mut m = Metadata::new();
        if self.no == 0 {
            m.set("general.architecture", "test");
        }
        m.set("split.no", self.no);
        m.set("split.count", self.count);
        m.set("split.tensors.count", self.total);
        let mut writer = GgufWriter::new(&m).unwrap();
        for n in &self.tensors {
            writer.tensor(&format!("t{n}"), TensorType::F32, &[8]).unwrap();
        }
        let mut data = writer.begin(Vec::new()).unwrap();
        for n in &self.tensors {
            data.write(&(*n as f32).to_le_bytes().repeat(8)).unwrap();
        }
        data.finish().unwrap()
    }
}

/// Three shards of two, two and one tensors.
fn three() -> [Shard; 3] {
    [vec![0, 1], vec![2, 3], vec![4]]
        .into_iter()
        .enumerate()
        .map(|(no, tensors)| Shard { no: no as u16, count: 3, total: 5, tensors })
        .collect::<Vec<_>>()
        .try_into()
        .unwrap_or_else(|_| panic!("three"))
}

fn name(n: u32) -> String {
    format!("m-{n:05}-of-00003.gguf")
}

/// Writes the shards in the order 2, 1, 3, so that a folder's own order is of no help.
fn write(shards: &[Shard; 3]) -> Folder {
    let folder = Folder::new();
    for n in [2, 1, 3] {
        folder.write(&name(n), &shards[n as usize - 1].bytes());
    }
    folder
}

fn check(gguf: &Gguf) {
    assert_eq!(gguf.n_shards(), 3);
    assert_eq!(gguf.metadata().str("general.architecture").unwrap(), Some("test"));
    let names: Vec<_> = gguf.tensors().iter().map(|t| (t.name.as_str(), t.shard)).collect();
    assert_eq!(names, [("t0", 0), ("t1", 0), ("t2", 1), ("t3", 1), ("t4", 2)]);
    for n in 0..5 {
        let tensor = gguf.tensor(&format!("t{n}")).unwrap();
        assert_eq!(gguf.data(tensor), (n as f32).to_le_bytes().repeat(8));
    }
    let paths: Vec<_> = gguf.paths().map(|p| p.file_name().unwrap().to_owned()).collect();
    assert_eq!(paths, [name(1), name(2), name(3)].map(std::ffi::OsString::from));
}

/// Opens shard 1 and asserts that the error names the file `n`.
#[track_caller]
fn refused(folder: &Folder, n: u32) -> Error {
    let error = Gguf::open(&folder.path().join(name(1))).unwrap_err();
    assert_eq!(error.path(), Some(&*folder.path().join(name(n))), "{error}");
    error
}

#[test]
fn any_shard_opens_the_set() {
    let folder = write(&three());
    for n in 1..=3 {
        check(&Gguf::open(&folder.path().join(name(n))).unwrap());
    }
}

#[test]
fn a_relative_path_opens_the_set() {
    let folder = write(&three());
    let cwd = std::env::current_dir().unwrap();
    let up: PathBuf = cwd.components().skip(1).map(|_| "..").collect();
    let relative = up.join(folder.path().strip_prefix("/").unwrap()).join(name(2));
    assert!(relative.is_relative());
    check(&Gguf::open(&relative).unwrap());
}

#[test]
fn a_set_of_one_is_a_file() {
    let folder = Folder::new();
    let shard = Shard { no: 0, count: 1, total: 1, tensors: vec![7] };
    let path = folder.write("m-00001-of-00001.gguf", &shard.bytes());
    assert_eq!(Gguf::open(&path).unwrap().n_shards(), 1);
    // Nothing needs the name either.
    let path = folder.write("renamed.gguf", &shard.bytes());
    assert_eq!(Gguf::open(&path).unwrap().tensors().len(), 1);
}

#[test]
fn a_missing_shard_is_named() {
    let folder = write(&three());
    std::fs::remove_file(folder.path().join(name(3))).unwrap();
    assert!(refused(&folder, 3).is_missing());
    std::fs::remove_file(folder.path().join(name(1))).unwrap();
    let error = Gguf::open(&folder.path().join(name(2))).unwrap_err();
    assert!(error.is_missing() && error.to_string().contains(&name(1)), "{error}");
}

#[test]
fn swapped_shards_are_refused() {
    let folder = write(&three());
    let (two, three) = (folder.path().join(name(2)), folder.path().join(name(3)));
    let bytes = std::fs::read(&two).unwrap();
    std::fs::rename(&three, &two).unwrap();
    std::fs::write(&three, bytes).unwrap();
    assert!(refused(&folder, 2).to_string().contains("split.no"));
}

#[test]
fn counts_have_to_agree() {
    let mut shards = three();
    shards[1].count = 4;
    assert!(refused(&write(&shards), 2).to_string().contains("split.count"));
    for total in [4, 6] {
        let mut shards = three();
        shards.iter_mut().for_each(|s| s.total = total);
        assert!(refused(&write(&shards), 1).to_string().contains("split.tensors.count"));
    }
    let mut shards = three();
    shards[2].total = 6;
    assert!(refused(&write(&shards), 3).to_string().contains("split.tensors.count"));
    let mut shards = three();
    shards[0].total = -1;
    assert!(refused(&write(&shards), 1).to_string().contains("split.tensors.count"));
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let mut shards = three();
    shards[2].tensors = vec![1];
    assert!(refused(&write(&shards), 3).to_string().contains("\"t1\""));
}

#[test]
fn only_the_first_shard_may_be_without_tensors() {
    let mut shards = three();
    shards[0].tensors.clear();
    shards.iter_mut().for_each(|s| s.total = 3);
    assert_eq!(Gguf::open(&write(&shards).path().join(name(1))).unwrap().tensors().len(), 3);
    let mut shards = three();
    shards[1].tensors.clear();
    shards.iter_mut().for_each(|s| s.total = 3);
    refused(&write(&shards), 2);
}

#[test]
fn a_shard_needs_its_name() {
    let folder = write(&three());
    for wrong in
        ["m.gguf", "m-00001-of-00004.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf"]
    {
        let path = folder.write(wrong, &three()[0].bytes());
        let error = Gguf::open(&path).unwrap_err();
        assert!(error.to_string().contains(wrong), "{error}");
        assert!(error.to_string().contains("00001-of-00003"), "{error}");
    }
    let error = Gguf::from_bytes(three()[0].bytes()).unwrap_err();
    assert!(error.is_missing(), "{error:?}");
}

#[test]
fn a_broken_shard_is_named() {
    let folder = write(&three());
    let bytes = three()[1].bytes();
    folder.write(&name(2), &bytes[..bytes.len() - 1]);
    assert!(refused(&folder, 2).is_malformed());
    folder.write(&name(2), b"");
    assert!(refused(&folder, 2).is_malformed());
}

#[test]
fn paths_that_are_no_files() {
    let folder = Folder::new();
    let device = Path::new("/dev/null");
    for path in [folder.path(), &folder.path().join("absent.gguf"), Path::new(""), device] {
        let error = Gguf::open(path).unwrap_err();
        assert!(error.is_io(), "{error:?}");
        assert_eq!(error.path(), Some(path));
    }
}
