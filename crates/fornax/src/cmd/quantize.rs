//! `fornax quantize`: the same model with its matrices in another type.
//! Which tensor gets which type is decided in `convert`.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result, bail};
use fornax_gguf::{Gguf, GgufWriter, TensorInfo, TensorType, blocks};

use super::pull::size;
use crate::convert;
use crate::flags::high::Config;
use crate::flags::low::Quantize;
use crate::store::Store;
use crate::{machine, output};

/// Weights that one thread converts between two writes.
const SLAB: usize = 1 << 20;

/// Writes the file, whole or not at all.
///
/// # Errors
/// When the input is no GGUF file, the type has no quantiser, or the output cannot be written.
pub(crate) fn quantize(config: &Config, flags: &Quantize) -> Result<()> {
    let to = TensorType::parse(&flags.to).filter(|&ty| blocks::can_quantize(ty));
    let Some(to) = to else {
        let known = TensorType::ALL.iter().filter(|&&ty| blocks::can_quantize(ty));
        let known: Vec<String> = known.map(|ty| ty.name().to_lowercase()).collect();
        return Err(super::Usage(format!(
            "no quantiser for {:?}; there are {}",
            flags.to,
            known.join(", ")
        ))
        .into());
    };
    let input = Store::open(config)?.file(&flags.input)?;
    let gguf = Gguf::open(&input)?;
    let threads = config.threads.unwrap_or_else(machine::cores);
    super::whole_file(&flags.output, |part| write(config, &gguf, to, threads, part))
        .with_context(|| format!("could not write {}", flags.output.display()))?;
    let bytes = fs::metadata(&flags.output)?.len();
    let line = format!(
        "{}: {} from {}, {:.2} bits per weight",
        flags.output.display(),
        size(bytes),
        size(gguf.file_bytes()),
        bytes as f64 * 8.0 / gguf.n_elements() as f64
    );
    output::note(config, &line);
    Ok(())
}

fn write(config: &Config, gguf: &Gguf, to: TensorType, threads: usize, part: &Path) -> Result<()> {
    let mut metadata = gguf.metadata().clone();
    // The parts of a split file become one.
    for key in ["split.no", "split.count", "split.tensors.count"] {
        metadata.remove(key);
    }
    if let Some(number) = convert::file_type(to) {
        metadata.set("general.file_type", number);
    }
    metadata.set("general.quantization_version", 2_u32);
    let has_output = gguf.tensor("output.weight").is_some();
    let target = |t: &TensorInfo| {
        let output = convert::is_output(&t.name, has_output);
        convert::target(&t.name, &t.dims, output, to).unwrap_or(t.ty)
    };
    let mut writer = GgufWriter::new(&metadata)?;
    for t in gguf.tensors() {
        let ty = target(t);
        if ty != to && ty != t.ty {
            output::detail(config, &format!("{}: {ty}", t.name));
        }
        writer.tensor(&t.name, ty, &t.dims)?;
    }
    let file = File::create(part)?;
    let mut data = writer.begin(BufWriter::with_capacity(4 << 20, file))?;
    for t in gguf.tensors() {
        let ty = target(t);
        if ty == t.ty {
            data.write(gguf.data(t))?;
        } else {
            convert_tensor(gguf, t, ty, threads, |bytes| Ok(data.write(bytes)?))
                .with_context(|| format!("converting {} from {} to {ty}", t.name, t.ty))?;
        }
    }
    data.finish()?.into_inner().map_err(|e| e.into_error())?.sync_all()?;
    Ok(())
}

/// Converts whole rows, a slab a thread at a time, and hands the bytes out in order.
fn convert_tensor(
    gguf: &Gguf,
    t: &TensorInfo,
    to: TensorType,
    threads: usize,
    mut out: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let Some(row_bytes) = to.row_bytes(t.cols()) else {
        bail!("rows of {} are no whole blocks", t.cols())
    };
    let rows_each = (SLAB / t.cols() as usize).max(1);
    let slabs: Vec<&[u8]> = gguf.data(t).chunks(rows_each * t.row_bytes() as usize).collect();
    for group in slabs.chunks(threads) {
        let done: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let running: Vec<_> = group
                .iter()
                .map(|slab| scope.spawn(|| convert_rows(t, slab, to, row_bytes as usize)))
                .collect();
            let crashed = |_| Err(anyhow::anyhow!("a thread died"));
            running.into_iter().map(|thread| thread.join().unwrap_or_else(crashed)).collect()
        });
        for bytes in done {
            out(&bytes?)?;
        }
    }
    Ok(())
}

fn convert_rows(t: &TensorInfo, slab: &[u8], to: TensorType, row_bytes: usize) -> Result<Vec<u8>> {
    let rows = slab.len() / t.row_bytes() as usize;
    let mut weights = vec![0.0; rows * t.cols() as usize];
    blocks::dequantize(t.ty, slab, &mut weights)?;
    if weights.iter().any(|w| !w.is_finite()) {
        bail!("it has weights that are not finite; the file is damaged");
    }
    let mut bytes = vec![0; rows * row_bytes];
    blocks::quantize(to, &weights, &mut bytes)?;
    Ok(bytes)
}
