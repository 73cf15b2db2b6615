//! Typed getters: absent, of the wrong type, out of range. It must not know real keys' meanings.

use fornax_gguf::{Metadata, PerLayer, Value};

use crate::bytes::{header, kv, kv_array, kv_u32, t};
use crate::oracle::accepted;

fn integers() -> Metadata {
    let mut m = Metadata::new();
    m.set("u8", 7u8);
    m.set("i8", -7i8);
    m.set("u16", 7u16);
    m.set("i16", 7i16);
    m.set("u32", u32::MAX);
    m.set("i32", -1i32);
    m.set("u64", 1u64 << 32);
    m.set("i64", 7i64);
    m.set("f32", 1.5f32);
    m.set("f64", 0.25f64);
    m.set("bool", true);
    m.set("string", "text");
    m.set("u8s", vec![1u8, 2]);
    m.set("i32s", vec![3i32, 4]);
    m.set("f32s", vec![0.5f32, 2.0]);
    m.set("bools", vec![true, false]);
    m
}

#[test]
fn integers_widen_and_are_checked() {
    let m = integers();
    for key in ["u8", "u16", "i16", "i64"] {
        assert_eq!(m.u32(key).unwrap(), Some(7), "{key}");
        assert_eq!(m.u64(key).unwrap(), Some(7), "{key}");
        assert_eq!(m.i32(key).unwrap(), Some(7), "{key}");
    }
    assert_eq!(m.u32("u32").unwrap(), Some(u32::MAX));
    assert_eq!(m.i32("i32").unwrap(), Some(-1));
    assert_eq!(m.u64("u64").unwrap(), Some(1 << 32));
    assert_eq!(m.u32("absent").unwrap(), None);
    for (key, found) in [("i8", "-7"), ("i32", "-1"), ("u64", "4294967296")] {
        let error = m.u32(key).unwrap_err();
        assert!(error.is_malformed());
        assert!(error.to_string().contains(key) && error.to_string().contains(found), "{error}");
    }
    for key in ["f32", "bool", "string", "u8s"] {
        assert!(m.u32(key).unwrap_err().to_string().contains(&format!("{key:?}")), "{key}");
    }
    assert!(m.require_u32("absent").unwrap_err().is_missing());
    assert_eq!(m.require_u32("u8").unwrap(), 7);
}

#[test]
fn other_scalars() {
    let m = integers();
    assert_eq!(m.f32("f32").unwrap(), Some(1.5));
    assert_eq!(m.f32("f64").unwrap(), Some(0.25));
    assert!(m.f32("u8").is_err());
    assert_eq!(m.bool("bool").unwrap(), Some(true));
    assert!(m.bool("u8").is_err());
    assert_eq!(m.str("string").unwrap(), Some("text"));
    assert_eq!(m.str("absent").unwrap(), None);
    assert!(m.str("u8").is_err());
    assert_eq!(m.require_f32("f32").unwrap(), 1.5);
    assert_eq!(m.require_str("string").unwrap(), "text");
    assert!(m.require_f32("absent").unwrap_err().is_missing());
    assert!(m.require_str("absent").unwrap_err().is_missing());
    assert!(m.require_str_array("absent").unwrap_err().is_missing());
}

#[test]
fn arrays_are_checked_for_their_type() {
    let m = integers();
    assert_eq!(m.u32_array("u8s").unwrap(), Some(vec![1, 2]));
    assert_eq!(m.u32_array("i32s").unwrap(), Some(vec![3, 4]));
    assert_eq!(m.i32_array("i32s").unwrap(), Some(vec![3, 4]));
    assert_eq!(m.f32_array("f32s").unwrap(), Some([0.5, 2.0].as_slice()));
    assert_eq!(m.bool_array("bools").unwrap(), Some([true, false].as_slice()));
    assert_eq!(m.u32_array("absent").unwrap(), None);
    // Scores stored as bytes, tokens stored as numbers: never read as what they are not.
    assert!(m.f32_array("u8s").unwrap_err().to_string().contains("array of u8"));
    assert!(m.str_array("i32s").unwrap_err().to_string().contains("array of i32"));
    assert!(m.u32_array("f32s").is_err());
    assert!(m.u32_array("u8").is_err());
    let mut negative = Metadata::new();
    negative.set("k", vec![1i32, -1]);
    assert!(negative.u32_array("k").unwrap_err().to_string().contains("-1"));
}

#[test]
fn one_value_for_all_layers_or_one_for_each() {
    let m = integers();
    assert_eq!(m.per_layer_u32("u8", 9).unwrap(), Some(PerLayer::Same(7)));
    assert_eq!(m.per_layer_u32("i32s", 2).unwrap(), Some(PerLayer::Each([3, 4].into())));
    assert_eq!(m.per_layer_u32("i32s", 2).unwrap().unwrap().get(1), 4);
    assert_eq!(m.per_layer_f32("f32s", 2).unwrap().unwrap().get(0), 0.5);
    assert_eq!(m.per_layer_f32("f32", 3).unwrap(), Some(PerLayer::Same(1.5)));
    assert!(!m.per_layer_bool("bools", 2).unwrap().unwrap().get(1));
    assert_eq!(m.per_layer_bool("bool", 2).unwrap(), Some(PerLayer::Same(true)));
    assert_eq!(m.per_layer_u32("absent", 2).unwrap(), None);
    for n_layers in [0, 1, 3] {
        let error = m.per_layer_u32("i32s", n_layers).unwrap_err().to_string();
        assert!(error.contains("i32s") && error.contains(&format!("{n_layers} layers")), "{error}");
    }
    assert!(m.per_layer_u32("f32s", 2).is_err());
    // A count of layers that a file made up costs nothing.
    assert_eq!(m.per_layer_u32("u8", 1 << 31).unwrap(), Some(PerLayer::Same(7)));
}

#[test]
fn keys_keep_the_order_of_the_file() {
    let file = [
        header(3, 0, 4),
        kv_u32("z", 1),
        kv("a", t::F64, &0.5f64.to_le_bytes()),
        kv("m", t::U16, &3u16.to_le_bytes()),
        kv_array("b", t::I8, 2, &[0xFF, 1]),
    ]
    .concat();
    let gguf = accepted(&file);
    let mut m = gguf.metadata().clone();
    assert_eq!(m.iter().map(|(k, _)| k).collect::<Vec<_>>(), ["z", "a", "m", "b"]);
    assert_eq!(m.get("b"), Some(&Value::from(vec![-1i8, 1])));
    m.set("a", 1u8);
    m.set("new", 2u8);
    assert_eq!(m.remove("z"), Some(Value::U32(1)));
    assert_eq!(m.remove("z"), None);
    assert_eq!(m.iter().map(|(k, _)| k).collect::<Vec<_>>(), ["a", "m", "b", "new"]);
    assert_eq!((m.u32("a").unwrap(), m.u32("new").unwrap(), m.len()), (Some(1), Some(2), 4));
    assert_eq!(m.u32("m").unwrap(), Some(3));
}
