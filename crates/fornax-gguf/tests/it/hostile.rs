//! Files that other engines crashed on, and what this one says. It must not know the parser's insides.

use std::time::{Duration, Instant};

use fornax_gguf::{Array, Gguf, StrArray, Value};

use crate::bytes::{header, kv, kv_array, kv_u32, string, t, tensor, valid, with_data};
use crate::oracle::{accepted, refused, refused_naming};

fn one_tensor(dims: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    [header(3, 1, 0), tensor("t", dims, type_id, offset)].concat()
}

fn one_key(kv: &[u8]) -> Vec<u8> {
    [&header(3, 0, 1), kv].concat()
}

#[test]
fn dimensions_of_zero_and_counts_out_of_bounds() {
    assert_eq!(one_tensor(&[4, 0], 0, 0).len(), 65);
    for n in 1..=4 {
        for at in 0..n {
            let mut dims = vec![4; n];
            dims[at] = 0;
            refused_naming(&with_data(one_tensor(&dims, 0, 0), 32, &[0; 4096]), "\"t\"");
        }
    }
    refused(&one_tensor(&[4, 0], 0, 0));
    for n_dims in [0u32, 5, u32::MAX] {
        let mut bytes = with_data(one_tensor(&[1], 0, 0), 32, &[0; 4096]);
        bytes[24 + 9..24 + 13].copy_from_slice(&n_dims.to_le_bytes());
        refused_naming(&bytes, &format!("{n_dims} dimensions"));
    }
}

#[test]
fn names_have_to_be_there() {
    refused_naming(&one_key(&kv_u32("", 7)), "key 0");
    refused_naming(
        &with_data([header(3, 1, 0), tensor("", &[4], 0, 0)].concat(), 32, &[0; 16]),
        "tensor 0",
    );
    let twice = [header(3, 0, 2), kv_u32("k", 7), kv_u32("k", 7)].concat();
    refused_naming(&twice, "\"k\"");
    let twice = [header(3, 2, 0), tensor("t", &[8], 0, 0), tensor("t", &[8], 0, 32)].concat();
    refused_naming(&with_data(twice, 32, &[0; 64]), "\"t\"");
    let not_utf8 = [&header(3, 0, 1), &*string(b"\xFF"), &t::U32.to_le_bytes(), &[0; 4]].concat();
    refused_naming(&not_utf8, "UTF-8");
}

#[test]
fn sizes_that_wrap() {
    let wrapping: [&[u64]; 6] = [
        &[1 << 31, 1 << 31, 4],
        &[(1 << 63) - 1, 2],
        &[1 << 62],
        &[(1 << 62) - 1],
        &[u64::MAX],
        &[u64::MAX, u64::MAX, u64::MAX, u64::MAX],
    ];
    for dims in wrapping {
        refused_naming(&with_data(one_tensor(dims, 0, 0), 32, &[0; 256]), "\"t\"");
    }
    // Only the sum of both wraps.
    let two = [header(3, 2, 0), tensor("s", &[1 << 61], 0, 0), tensor("t", &[1 << 61], 0, 1 << 63)];
    refused_naming(&with_data(two.concat(), 32, &[0; 256]), "\"s\"");
    for (n_tensors, n_kv) in
        [((1 << 63) - 1, 0), (1 << 56, 0), (0, u64::MAX), (u64::MAX, u64::MAX), (0, 1), (1, 0)]
    {
        refused(&header(3, n_tensors, n_kv));
        refused(&[header(3, n_tensors, n_kv), vec![0; 12]].concat());
    }
}

#[test]
fn alignment_is_a_u32_and_a_bounded_power_of_two() {
    let wrong: [(u32, Vec<u8>); 10] = [
        (t::U32, 0u32.to_le_bytes().into()),
        (t::U32, 1u32.to_le_bytes().into()),
        (t::U32, 3u32.to_le_bytes().into()),
        (t::U32, 24u32.to_le_bytes().into()),
        (t::U32, (1u32 << 17).to_le_bytes().into()),
        (t::U32, (1u32 << 31).to_le_bytes().into()),
        (t::I32, 32i32.to_le_bytes().into()),
        (t::U64, 32u64.to_le_bytes().into()),
        (t::STRING, string(b"32")),
        (t::F32, 32f32.to_le_bytes().into()),
    ];
    for (type_id, value) in wrong {
        let head =
            [header(3, 1, 1), kv("general.alignment", type_id, &value), tensor("t", &[8], 0, 0)];
        refused_naming(&with_data(head.concat(), 32, &[0; 32]), "general.alignment");
    }
    for alignment in [8, 16, 32, 64, 65536] {
        let head = [
            header(3, 2, 1),
            kv_u32("general.alignment", alignment as u32),
            tensor("s", &[2], 0, 0),
            tensor("t", &[2], 0, alignment as u64),
        ];
        let mut data = vec![0; alignment + 8];
        data[alignment] = 7;
        let gguf = accepted(&with_data(head.concat(), alignment, &data));
        assert_eq!(gguf.alignment() as usize, alignment);
        assert_eq!(gguf.data(gguf.tensor("t").unwrap()), [7, 0, 0, 0, 0, 0, 0, 0]);
        assert!(gguf.tensor("t").unwrap().offset.is_multiple_of(alignment as u64));
    }
    refused_naming(&with_data(one_tensor(&[8], 0, 33), 32, &[0; 128]), "\"t\"");
}

#[test]
fn trailing_padding_is_fine() {
    for n in 0..=63 {
        let gguf = accepted(&[valid(3), vec![0; n]].concat());
        assert_eq!(gguf.tensors().len(), 2);
    }
}

#[test]
fn a_file_cut_anywhere() {
    let whole = valid(3);
    accepted(&whole);
    for len in 0..whole.len() {
        refused(&whole[..len]);
    }
}

#[test]
fn tensors_past_the_end_or_on_top_of_each_other() {
    let data = [0; 256];
    for offset in [256, 0u64.wrapping_sub(32), 1 << 63, 288] {
        refused_naming(&with_data(one_tensor(&[8], 0, offset), 32, &data), "\"t\"");
    }
    let file = with_data(one_tensor(&[64], 0, 0), 32, &data);
    accepted(&file);
    refused_naming(&file[..file.len() - 1], "\"t\"");
    refused_naming(&with_data(one_tensor(&[8], 0, file.len() as u64), 32, &data), "\"t\"");
    let overlap = |b: u64| {
        let head = [header(3, 2, 0), tensor("a", &[16], 0, 0), tensor("b", &[8], 0, b)].concat();
        with_data(head, 32, &data)
    };
    refused_naming(&overlap(0), "\"b\"");
    refused_naming(&overlap(32), "\"b\"");
    accepted(&overlap(64));
    // The order of the table is not the order of the data.
    let head = [header(3, 2, 0), tensor("a", &[8], 0, 64), tensor("b", &[8], 0, 0)].concat();
    accepted(&with_data(head, 32, &data));
}

#[test]
fn rows_have_to_be_whole_blocks_of_a_known_type() {
    refused_naming(&with_data(one_tensor(&[31], 8, 0), 32, &[0; 64]), "\"t\"");
    refused_naming(&with_data(one_tensor(&[16, 2], 8, 0), 32, &[0; 64]), "\"t\"");
    for id in [4, 5, 31, 36, 41, 1000, u32::MAX] {
        let error = refused_naming(&with_data(one_tensor(&[32], id, 0), 32, &[0; 128]), "\"t\"");
        assert!(error.is_unsupported(), "{error:?}");
        assert!(error.to_string().contains(&id.to_string()));
    }
}

#[test]
fn lengths_far_past_the_end() {
    refused(&[header(3, 0, 1), ((1u64 << 48) - 1).to_le_bytes().to_vec()].concat());
    refused(&[header(3, 0, 1), ((1u64 << 48) - 1).to_le_bytes().to_vec(), vec![b'k'; 64]].concat());
    refused_naming(&one_key(&kv("k", t::STRING, &(1u64 << 63).to_le_bytes())), "\"k\"");
    refused_naming(&one_key(&kv("k", t::STRING, &u64::MAX.to_le_bytes())), "\"k\"");
    refused_naming(&one_key(&kv_array("k", t::U32, 1 << 60, &[])), "\"k\"");
    refused_naming(&one_key(&kv_array("k", t::U64, 1 << 61, &[0; 64])), "\"k\"");
    refused_naming(&one_key(&kv_array("k", t::STRING, 1 << 40, &[])), "\"k\"");
    refused_naming(&one_key(&kv_array("k", t::ARRAY, 1 << 40, &[0; 64])), "\"k\"");
}

#[test]
fn a_large_vocabulary_is_read_fast() {
    let strings = |prefix: &str, n: usize| {
        (0..n).flat_map(|i| string(format!("{prefix}{i}").as_bytes())).collect::<Vec<u8>>()
    };
    let file = [
        header(3, 0, 3),
        kv_array("tokenizer.ggml.tokens", t::STRING, 262_144, &strings("▁token", 262_144)),
        kv_array("tokenizer.ggml.scores", t::F32, 262_144, &vec![0; 4 * 262_144]),
        kv_array("tokenizer.ggml.merges", t::STRING, 500_000, &strings("Ġlong merge", 500_000)),
    ]
    .concat();
    let start = Instant::now();
    let gguf = Gguf::from_bytes(file.clone()).unwrap();
    let took = start.elapsed();
    println!("{} bytes of vocabulary in {took:?}", file.len());
    // Measured: 0.07 s on a busy core. A step per element that asks the system anything takes far longer.
    assert!(took < Duration::from_secs(1), "{took:?}");
    let tokens = gguf.metadata().require_str_array("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens.get(262_143)), (262_144, Some("▁token262143")));
    let merges = gguf.metadata().require_str_array("tokenizer.ggml.merges").unwrap();
    assert_eq!(merges.iter().next_back(), Some("Ġlong merge499999"));
}

#[test]
fn arrays_nest_to_a_bound() {
    let level = [t::ARRAY.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
    let nested = |outer: usize| {
        let leaf = [&t::U8.to_le_bytes()[..], &1u64.to_le_bytes(), &[5]].concat();
        one_key(&kv("x", t::ARRAY, &[level.repeat(outer), leaf].concat()))
    };
    for levels in [16, 17, 100, 20_000] {
        refused_naming(&nested(levels), "\"x\"");
    }
    let gguf = accepted(&nested(15));
    let Some(Value::Array(mut array)) = gguf.metadata().get("x").cloned() else { panic!("no x") };
    for _ in 0..15 {
        let Array::Nested(inner) = array else { panic!("{array:?}") };
        array = inner.into_iter().next().unwrap();
    }
    assert_eq!(array, Array::U8(vec![5]));
    // Wide instead of deep: many empty arrays in arrays.
    let empties = [&t::U8.to_le_bytes()[..], &0u64.to_le_bytes()].concat().repeat(10_000);
    accepted(&one_key(&kv_array("x", t::ARRAY, 10_000, &empties)));
}

#[test]
fn unknown_types_do_not_lose_the_place() {
    for element in [13, 255, u32::MAX] {
        refused_naming(&one_key(&kv_array("k", element, 1, &[0; 64])), "\"k\"");
        refused_naming(&one_key(&kv_array("k", element, 0, &[])), "\"k\"");
        refused_naming(&one_key(&kv("k", element, &[0; 64])), "\"k\"");
    }
    refused_naming(&one_key(&kv("k", t::BOOL, &[2])), "\"k\"");
    refused_naming(&one_key(&kv_array("k", t::BOOL, 3, &[0, 1, 2])), "\"k\"");
}

#[test]
fn versions_and_magics() {
    for version in [2, 3] {
        let gguf = accepted(&valid(version));
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.tensors().len(), 2);
    }
    assert_eq!(accepted(&valid(2)).metadata(), accepted(&valid(3)).metadata());
    let versioned = |version: u32| refused(&valid(version)).to_string();
    assert!(versioned(0x0300_0000).contains("version 3 of a big-endian file"));
    assert!(versioned(0x0200_0000).contains("version 2 of a big-endian file"));
    assert!(versioned(1).contains("V1"));
    for version in [0, 4, u32::MAX] {
        assert!(versioned(version).contains(&format!("unsupported version {version},")));
    }
    for (magic, hint) in [
        (b"ggml".as_slice(), "before GGUF"),
        (b"FUGG", "swapped"),
        (b"\xEF\xBB\xBFGGUF", "byte order mark"),
        (b"gguf", "expected \"GGUF\""),
        (b"\0\0\0\0", "expected \"GGUF\""),
    ] {
        let mut file = valid(3);
        file.splice(..4, magic.iter().copied());
        let error = refused_naming(&file, hint);
        assert!(error.is_unsupported(), "{error:?}");
    }
    refused_naming(b"", "empty");
    refused(b"GGUF");
}

#[test]
fn strings_that_are_not_utf8_are_kept_and_named() {
    let file = [
        header(3, 0, 3),
        kv("s", t::STRING, &string(b"a\xFF")),
        kv_array("a", t::STRING, 2, &[string(b"ok"), string(b"\xC3")].concat()),
        // Together these are UTF-8, one by one they are not.
        kv_array("b", t::STRING, 2, &[string(b"\xC3"), string(b"\xA9")].concat()),
    ]
    .concat();
    let gguf = accepted(&file);
    let metadata = gguf.metadata();
    assert_eq!(metadata.get("s"), Some(&Value::Bytes(b"a\xFF".as_slice().into())));
    assert!(metadata.str("s").unwrap_err().to_string().contains("UTF-8"));
    assert!(metadata.str_array("a").unwrap_err().to_string().contains("entry 1"));
    assert!(metadata.str_array("b").unwrap_err().to_string().contains("entry 0"));
    let Some(Value::Array(Array::Bytes(b))) = metadata.get("b") else { panic!("no b") };
    assert_eq!(b.iter().collect::<Vec<_>>(), [b"\xC3", b"\xA9"]);
    assert_eq!(StrArray::from_iter(["x", ""]).iter().collect::<Vec<_>>(), ["x", ""]);
}
