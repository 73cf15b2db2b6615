//! What stays out of memory: weight pages at opening, released pages after. It must not know the format.

use std::fs::File;
use std::path::Path;

use fornax_gguf::{Gguf, Mapping};

use crate::bytes::{header, kv_array, t, tensor, valid};
use crate::oracle::{Folder, peak_of};

/// Bytes of the mapping of `path` that are in this process's memory, where the system tells (Linux).
fn resident(path: &Path) -> Option<usize> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let rss = lines.find_map(|line| line.strip_prefix("Rss:"))?;
    rss.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok().map(|kb| kb * 1024)
}

#[test]
fn opening_touches_no_weight_page() {
    const WEIGHTS: u64 = 1 << 30;
    let folder = Folder::new();
    let head = [header(3, 1, 0), tensor("t", &[WEIGHTS / 4], 0, 0)].concat();
    let path = folder.write("large.gguf", &head);
    // Sparse: it has a length and, but for its head, no content.
    File::options().write(true).open(&path).unwrap().set_len(96 + WEIGHTS).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.data(&gguf.tensors()[0]).len() as u64, WEIGHTS);
    assert!(gguf.mapping(&gguf.tensors()[0]).is_file());
    if cfg!(target_os = "linux") {
        // The system maps pages around the first, 64 KiB in all.
        let resident = resident(&path).expect("a line of /proc/self/smaps");
        assert!(resident <= 256 * 1024, "{resident} bytes");
    }
}

#[test]
fn a_head_without_end_is_refused() {
    // The file has the length that its array asks for, and no content there.
    let folder = Folder::new();
    for (element, count) in [(t::U8, 1u64 << 33), (t::U64, 1 << 30), (t::STRING, 1 << 30)] {
        let path = folder
            .write("sparse.gguf", &[header(3, 0, 1), kv_array("k", element, count, &[])].concat());
        File::options().write(true).open(&path).unwrap().set_len(1 << 34).unwrap();
        let (result, peak) = peak_of(|| Gguf::open(&path));
        let error = result.unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("\"k\""), "{error:?}");
        assert!(peak < 1 << 20, "{peak} bytes allocated");
    }
}

#[test]
fn released_pages_leave_memory_and_keep_their_content() {
    const LEN: usize = 8 << 20;
    let folder = Folder::new();
    let content: Vec<u8> = (0..LEN).map(|i| (i / 4096 + i) as u8).collect();
    let path = folder.write("pages", &content);
    let mapping = Mapping::open(&path).unwrap();
    assert!(mapping.bytes() == content);
    let before = resident(&path);
    mapping.release(10..LEN - 10);
    if cfg!(target_os = "linux") {
        let (before, after) = (before.unwrap(), resident(&path).unwrap());
        assert!(before >= LEN && after <= 64 * 1024, "{before} bytes, then {after}");
    }
    mapping.will_need(0..LEN);
    assert!(mapping.bytes() == content);
    // Ranges without a whole page, inverted or past the end.
    mapping.release(1..4096);
    #[allow(clippy::reversed_empty_ranges)]
    mapping.release(50_000..3);
    mapping.release(0..usize::MAX);
    mapping.release(usize::MAX..usize::MAX);
    mapping.will_need(LEN..usize::MAX);
    assert!(mapping.bytes() == content);
}

#[test]
fn owned_memory_is_aligned_and_stays() {
    for len in [0, 1, 4096, 70_000] {
        let content: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let mapping = Mapping::from_vec(content.clone());
        mapping.release(0..len);
        assert_eq!(mapping.bytes(), content);
        assert_eq!((mapping.len(), mapping.is_empty(), mapping.is_file()), (len, len == 0, false));
        assert_eq!(mapping.bytes().as_ptr() as usize % Mapping::OWNED_ALIGN, 0);
    }
}

#[test]
fn a_mapping_outlives_its_file_name_and_crosses_threads() {
    let folder = Folder::new();
    let path = folder.write("model.gguf", &valid(3));
    let gguf = Gguf::open(&path).unwrap();
    drop(folder);
    let gguf = std::thread::spawn(move || {
        assert_eq!(gguf.data(gguf.tensor("b").unwrap())[0], 96);
        gguf
    })
    .join()
    .unwrap();
    let mapping = gguf.mapping(&gguf.tensors()[0]).clone();
    let offset = gguf.tensors()[0].offset as usize;
    drop(gguf);
    assert_eq!(mapping.bytes()[offset..][..3], [0, 1, 2]);
}
