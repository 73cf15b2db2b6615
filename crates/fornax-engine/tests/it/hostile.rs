//! Model files that lie about themselves: every hyperparameter removed or set to nonsense must
//! be a typed error at load that names the key, never a panic or a wild allocation.

use fornax_engine::arch;
use fornax_gguf::{Gguf, GgufWriter, Metadata, TensorInfo, Value};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{ActMode, KvType};

use crate::fixture::{Fixture, Runner, testdata};

fn open(model: &str) -> Gguf {
    Gguf::open(&testdata().join("models").join(model).join("model.gguf")).unwrap()
}

/// The file with its metadata changed and only the tensors that `keep` accepts, by what name.
fn rewrite(
    gguf: &Gguf,
    change: impl FnOnce(&mut Metadata),
    keep: impl Fn(&TensorInfo) -> Vec<String>,
) -> Gguf {
    let mut meta = gguf.metadata().clone();
    change(&mut meta);
    let kept: Vec<(String, &TensorInfo)> =
        gguf.tensors().iter().flat_map(|t| keep(t).into_iter().map(move |n| (n, t))).collect();
    let mut writer = GgufWriter::new(&meta).unwrap();
    for (name, t) in &kept {
        writer.tensor(name, t.ty, &t.dims).unwrap();
    }
    let mut data = writer.begin(Vec::new()).unwrap();
    for (_, t) in &kept {
        data.write(gguf.data(t)).unwrap();
    }
    Gguf::from_bytes(data.finish().unwrap()).unwrap()
}

fn same_name(t: &TensorInfo) -> Vec<String> {
    vec![t.name.clone()]
}

/// Loads and, where the plan is accepted, prepares and runs it: neither may panic.
fn load(gguf: &Gguf) -> Result<(), String> {
    let plan = arch::plan(gguf).map_err(|e| {
        assert!(e.is_malformed() || e.is_unsupported(), "{e}");
        e.to_string()
    })?;
    let mut r = Runner::new(&ReferenceDevice::default(), &plan, ActMode::F32, KvType::F32, 1, 32);
    r.logits(&[1, 2], 2, plan.hyper.vocab as usize);
    Ok(())
}

/// Keys of the family that a model cannot do without.
const REQUIRED: [&str; 5] = [
    "block_count",
    "embedding_length",
    "attention.head_count",
    "context_length",
    "attention.layer_norm_rms_epsilon",
];

#[test]
fn a_missing_hyperparameter_is_named() {
    let gguf = open("llama3-q8_0");
    for key in REQUIRED {
        let key = format!("llama.{key}");
        let broken = rewrite(&gguf, |m| drop(m.remove(&key)), same_name);
        let e = load(&broken).unwrap_err();
        assert!(e.contains(&key), "{key}: {e}");
    }
    for key in ["feed_forward_length", "general.architecture"] {
        let full = if key.contains('.') { key.to_string() } else { format!("llama.{key}") };
        let e = load(&rewrite(&gguf, |m| drop(m.remove(&full)), same_name)).unwrap_err();
        assert!(e.contains(&full), "{key}: {e}");
    }
}

#[test]
fn nonsense_hyperparameters_are_errors() {
    let gguf = open("llama3-q8_0");
    let integers = [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "feed_forward_length",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "context_length",
        "rope.dimension_count",
    ];
    for key in integers {
        for value in [
            Value::U32(0),
            Value::U32(1 << 31),
            Value::I32(-1),
            Value::U64(u64::MAX),
            Value::U32(7),
        ] {
            let full = format!("llama.{key}");
            // A context of any size above 0 is only a number.
            let harmless = key == "context_length" && matches!(value, Value::U32(7 | 0x8000_0000));
            let e = load(&rewrite(&gguf, |m| m.set(&full, value.clone()), same_name));
            assert_eq!(e.is_ok(), harmless, "{key} = {value:?}: {e:?}");
        }
    }
    let floats = ["attention.layer_norm_rms_epsilon", "rope.freq_base"];
    for key in floats {
        for value in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
            let full = format!("llama.{key}");
            let e =
                load(&rewrite(&gguf, |m| m.set(&full, Value::F32(value)), same_name)).unwrap_err();
            assert!(e.contains("llama.") || e.contains("rope base"), "{key} = {value}: {e}");
        }
    }
}

#[test]
fn heads_must_divide_and_arrays_must_have_a_value_per_layer() {
    let gguf = open("llama3-q8_0");
    let kv =
        |v: Value| load(&rewrite(&gguf, |m| m.set("llama.attention.head_count_kv", v), same_name));
    assert!(kv(Value::U32(3)).unwrap_err().contains("multiple"));
    kv(Value::Array(fornax_gguf::Array::I32(vec![2; 3]))).unwrap();
    let e = kv(Value::Array(fornax_gguf::Array::I32(vec![2; 4]))).unwrap_err();
    assert!(e.contains("head_count_kv"), "{e}");
    // Absent, it is the number of query heads, which this file's tensors contradict.
    let e = load(&rewrite(&gguf, |m| drop(m.remove("llama.attention.head_count_kv")), same_name))
        .unwrap_err();
    assert!(e.contains("attn_k"), "{e}");
}

/// A llama of zeros with one layer for each number of key/value heads.
fn zeros(width: u32, heads: u32, kv_heads: &[u32], key: u32, value: u32) -> Gguf {
    const FF: u64 = 8;
    const VOCAB: u64 = 4;
    let mut meta = Metadata::new();
    meta.set("general.architecture", "llama");
    let integers = [
        ("block_count", kv_heads.len() as u32),
        ("embedding_length", width),
        ("attention.head_count", heads),
        ("attention.key_length", key),
        ("attention.value_length", value),
        ("feed_forward_length", FF as u32),
        ("context_length", 32),
    ];
    for (name, number) in integers {
        meta.set(&format!("llama.{name}"), Value::U32(number));
    }
    meta.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    let per_layer = fornax_gguf::Array::U32(kv_heads.to_vec());
    meta.set("llama.attention.head_count_kv", Value::Array(per_layer));
    let w = u64::from(width);
    let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
    let mut tensors = vec![
        ("token_embd.weight".to_string(), vec![w, VOCAB]),
        ("output_norm.weight".to_string(), vec![w]),
    ];
    for (layer, kv) in kv_heads.iter().enumerate() {
        let of_layer = [
            ("attn_norm", vec![w]),
            ("attn_q", vec![w, wide(heads, key)]),
            ("attn_k", vec![w, wide(*kv, key)]),
            ("attn_v", vec![w, wide(*kv, value)]),
            ("attn_output", vec![(heads.wrapping_mul(value)).max(1).into(), w]),
            ("ffn_norm", vec![w]),
            ("ffn_gate", vec![w, FF]),
            ("ffn_up", vec![w, FF]),
            ("ffn_down", vec![FF, w]),
        ];
        tensors.extend(of_layer.map(|(n, dims)| (format!("blk.{layer}.{n}.weight"), dims)));
    }
    let mut writer = GgufWriter::new(&meta).unwrap();
    for (name, dims) in &tensors {
        writer.tensor(name, fornax_gguf::TensorType::F32, dims).unwrap();
    }
    let mut data = writer.begin(Vec::new()).unwrap();
    for (_, dims) in &tensors {
        data.write(&vec![0; 4 * dims.iter().product::<u64>() as usize]).unwrap();
    }
    Gguf::from_bytes(data.finish().unwrap()).unwrap()
}

#[test]
fn more_kinds_of_cache_than_a_step_lists_are_refused() {
    let session = |kinds: u32| {
        let kv_heads: Vec<u32> = (0..kinds).map(|i| 1 << i).collect();
        let plan = arch::plan(&zeros(4, 1 << 9, &kv_heads, 2, 2)).unwrap();
        let options = fornax_engine::SessionOptions::default();
        fornax_engine::Session::new(&ReferenceDevice::default(), &plan, &options)
    };
    session(8).unwrap();
    let e = session(9).unwrap_err();
    assert!(e.is_unsupported(), "{e}");
    assert!(e.to_string().contains("9 kinds of key/value cache"), "{e}");
}

#[test]
fn heads_whose_values_are_too_wide_together_are_an_error() {
    // 2^19 heads of 2^13 elements wrap 32 bits to 0.
    let e = load(&zeros(1, 1 << 19, &[1], 2, 1 << 13)).unwrap_err();
    assert!(e.contains("524288 heads of width 8192 are too wide"), "{e}");
}

#[test]
fn unknown_architectures_are_named_with_the_known() {
    let gguf = open("llama3-q8_0");
    for name in ["", "mamba", "LLAMA"] {
        let set = |m: &mut Metadata| m.set("general.architecture", Value::Str(name.into()));
        let e = load(&rewrite(&gguf, set, same_name)).unwrap_err();
        assert!(e.contains(&format!("{name:?}")) && e.contains("llama, qwen2"), "{e}");
    }
}

#[test]
fn every_missing_tensor_is_named() {
    let gguf = open("llama3-q8_0");
    for t in gguf.tensors() {
        let without =
            rewrite(&gguf, |_| {}, |u| if u.name == t.name { vec![] } else { same_name(u) });
        match load(&without) {
            // Tied head, plain rope: the file says the same model without them.
            Ok(()) => assert!(
                ["output.weight", "rope_freqs.weight"].contains(&t.name.as_str()),
                "{}",
                t.name
            ),
            Err(e) => assert!(e.contains(&t.name), "{}: {e}", t.name),
        }
    }
}

#[test]
fn a_tied_head_and_its_copy_give_the_same_bits() {
    for model in ["llama-tied", "qwen3", "gemma2", "lfm2"] {
        let tied = open(model);
        assert!(tied.tensor("output.weight").is_none(), "{model} is not tied");
        let copied = rewrite(
            &tied,
            |_| {},
            |t| {
                let mut names = same_name(t);
                if t.name == "token_embd.weight" {
                    names.push("output.weight".into());
                }
                names
            },
        );
        let f = Fixture::load(model);
        let rows = |plan: &fornax_plan::Plan| {
            let mut r =
                Runner::new(&ReferenceDevice::default(), plan, ActMode::F32, KvType::F32, 1, 64);
            r.logits(&f.prompts[1].tokens, 64, plan.hyper.vocab as usize)
        };
        assert_eq!(
            rows(&arch::plan(&tied).unwrap()),
            rows(&arch::plan(&copied).unwrap()),
            "{model}"
        );
    }
}
