//! Commands on files: `inspect`, `quantize`, `synth`. Runs no model.

use std::fs;
use std::path::PathBuf;

use fornax_gguf::{Gguf, TensorType, blocks};
use serde_json::Value;

use crate::program::{Folder, fornax, model, ran, ran_with};

#[test]
fn inspect_says_what_is_in_a_file() {
    let home = Folder::new();
    let file = model("llama3-q8_0");
    let text = ran(fornax(&home).arg("inspect").arg(&file)).ok().stdout;
    for word in ["GGUF v3", "llama", "Q8_0", "bits per weight", "llama.block_count = "] {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    assert!(!text.contains("blk.0.attn_q.weight"));
    let more = ran(fornax(&home).args(["inspect", "--tensors"]).arg(&file)).ok().stdout;
    assert!(more.contains("blk.0.attn_q.weight"));
    let json = ran(fornax(&home).args(["inspect", "--json", "--tensors"]).arg(&file)).ok().stdout;
    let json: Value = serde_json::from_str(&json).unwrap();
    let gguf = Gguf::open(&file).unwrap();
    assert_eq!(json["parameters"], gguf.n_elements());
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["tensors"].as_array().unwrap().len(), gguf.tensors().len());
    assert_eq!(json["metadata"]["general.architecture"], "llama");
}

#[test]
fn a_file_cannot_steer_the_terminal() {
    let home = Folder::new();
    let mut metadata = fornax_gguf::Metadata::new();
    metadata.set("general.architecture", "llama");
    metadata.set("general.name", "\x1b[2Jgone\r\nnext");
    metadata.set("tokenizer.chat_template", "{{ a }}\n");
    let bytes = fornax_gguf::GgufWriter::new(&metadata).unwrap().begin(Vec::new()).unwrap();
    let file = home.join("m.gguf");
    fs::write(&file, bytes.finish().unwrap()).unwrap();
    let text = ran(fornax(&home).arg("inspect").arg(&file)).ok().stdout;
    assert!(!text.contains(['\x1b', '\r']), "{text:?}");
    assert!(text.contains("\\u{1b}[2Jgone"), "{text}");
    let template = ran(fornax(&home).args(["inspect", "--template"]).arg(&file)).ok().stdout;
    assert_eq!(template, "{{ a }}\n\n");
}

#[test]
fn a_file_that_is_no_model_is_refused_with_its_name() {
    let home = Folder::new();
    let file = home.join("notes.gguf");
    fs::write(&file, "these are notes").unwrap();
    let out = home.join("out.gguf");
    let inspect = ran(fornax(&home).arg("inspect").arg(&file)).fails(1);
    let quantize = ran(fornax(&home).arg("quantize").args([&file, &out]).arg("q8_0")).fails(1);
    for ran in [inspect, quantize] {
        assert!(ran.stderr.contains("notes.gguf"), "{}", ran.stderr);
        assert!(ran.stdout.is_empty());
    }
    assert!(!out.exists());
}

fn quantized(home: &Folder, from: &str, to: &str) -> PathBuf {
    let out = home.join(&format!("{to}.gguf"));
    ran(fornax(home).arg("quantize").args([&model(from), &out]).arg(to)).ok();
    out
}

#[test]
fn quantize_changes_matrices_and_nothing_else() {
    let home = Folder::new();
    let original = Gguf::open(&model("llama3")).unwrap();
    let q8 = Gguf::open(&quantized(&home, "llama3", "q8_0")).unwrap();
    assert_eq!(q8.tensors().len(), original.tensors().len());
    let mut changed = 0;
    for (a, b) in original.tensors().iter().zip(q8.tensors()) {
        assert_eq!((&a.name, &a.dims), (&b.name, &b.dims));
        if a.ty == b.ty {
            assert_eq!(original.data(a), q8.data(b), "{}", a.name);
            continue;
        }
        changed += 1;
        assert_eq!(b.ty, TensorType::Q8_0, "{}", b.name);
        let values = |gguf: &Gguf, t: &fornax_gguf::TensorInfo| {
            let mut values = vec![0.0; t.n_elements() as usize];
            blocks::dequantize(t.ty, gguf.data(t), &mut values).unwrap();
            values
        };
        let (x, y) = (values(&original, a), values(&q8, b));
        let most = x.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        for (x, y) in x.iter().zip(&y) {
            // A step is the largest weight of a block over 127; rounding costs half of one, f16 scales little.
            assert!((x - y).abs() <= most / 127.0 * 0.51, "{}: {x} became {y}", a.name);
        }
    }
    assert!(changed > 10, "{changed} matrices");
    let keys = |g: &Gguf| {
        let mut keys: Vec<String> = g.metadata().iter().map(|(k, _)| k.to_owned()).collect();
        keys.retain(|k| k != "general.file_type" && k != "general.quantization_version");
        keys
    };
    assert_eq!(keys(&original), keys(&q8));
    assert_eq!(q8.metadata().u32("general.file_type").unwrap(), Some(7));
}

#[test]
fn rows_that_fit_no_block_get_a_shorter_one() {
    let home = Folder::new();
    let q4 = Gguf::open(&quantized(&home, "llama3", "q4_k")).unwrap();
    for t in q4.tensors() {
        assert!(t.cols().is_multiple_of(t.ty.block_len() as u64), "{}", t.name);
    }
}

#[test]
fn unknown_types_and_shapes_are_usage_errors() {
    let home = Folder::new();
    let out = home.join("o.gguf");
    let quantize =
        ran(fornax(&home).arg("quantize").args([&model("llama3"), &out]).arg("q9_9")).fails(2);
    assert!(quantize.stderr.contains("q4_k"), "{}", quantize.stderr);
    let shape = ran(fornax(&home).args(["synth", "llama-9b:q8_0"]).arg(&out)).fails(2);
    assert!(shape.stderr.contains("smollm2-360m"), "{}", shape.stderr);
    let ty = ran(fornax(&home).args(["synth", "llama-8b:q2_k"]).arg(&out)).fails(2);
    assert!(ty.stderr.contains("bf16"), "{}", ty.stderr);
    assert!(!out.exists());
}

#[test]
fn synth_writes_the_same_file_each_time() {
    let home = Folder::new();
    let files = ["a.gguf", "b.gguf"].map(|name| home.join(name));
    for file in &files {
        ran(fornax(&home).args(["synth", "smollm2-135m:q4_0"]).arg(file)).ok();
    }
    assert_eq!(fs::read(&files[0]).unwrap(), fs::read(&files[1]).unwrap());
    let gguf = Gguf::open(&files[0]).unwrap();
    assert_eq!(gguf.tensor("blk.29.ffn_down.weight").unwrap().dims, [1536, 576]);
}

#[test]
fn a_disk_that_cannot_be_written_leaves_nothing() {
    let home = Folder::new();
    let out = home.join("no/such/folder/o.gguf");
    let ran = ran_with(fornax(&home).args(["synth", "smollm2-135m:q4_0"]).arg(&out), b"").fails(1);
    assert!(ran.stderr.contains("o.gguf"), "{}", ran.stderr);
}

#[test]
fn what_is_no_plain_file_is_not_replaced_and_a_part_is_not_touched() {
    let home = Folder::new();
    let folder = home.join("folder.gguf");
    fs::create_dir(&folder).unwrap();
    let quantize = |from: &PathBuf, to: &PathBuf| {
        ran(fornax(&home).arg("quantize").args([from, to]).arg("q8_0"))
    };
    let told = quantize(&model("llama3"), &folder).fails(1).stderr;
    assert!(told.contains("folder.gguf") && told.contains("no plain file"), "{told}");
    #[cfg(unix)]
    {
        let socket = home.join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let told = quantize(&model("llama3"), &socket).fails(1).stderr;
        assert!(told.contains("no plain file"), "{told}");
        use std::os::unix::fs::FileTypeExt;
        assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    }
    // The file that is read may have the name that a file being written would have.
    let (part, whole) = (home.join("m.gguf.part"), home.join("m.gguf"));
    fs::copy(model("llama3"), &part).unwrap();
    quantize(&part, &whole).ok();
    assert_eq!(fs::read(&part).unwrap(), fs::read(model("llama3")).unwrap());
    assert!(Gguf::open(&whole).is_ok());
}
