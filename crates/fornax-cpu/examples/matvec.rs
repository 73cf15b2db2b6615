//! Prints what matrix kernels reach on this machine, per type, tier and number of rows:
//! `cargo run --release -p fornax-cpu --example matvec [TYPE|all] [TIER|all] [ROWSxCOLS] [THREADS] [fast]`.

use fornax_cpu::isa::Isa;
use fornax_cpu::measure::{Case, multiply};
use fornax_cpu::{CpuDevice, CpuOptions};
use fornax_gguf::TensorType;

#[allow(clippy::print_stdout, reason = "printing is what it is for")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |ix: usize, default: &str| args.get(ix).map_or(default, String::as_str).to_string();
    let types: Vec<TensorType> = match arg(0, "all").as_str() {
        "all" => [
            "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K",
            "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32",
        ]
        .iter()
        .filter_map(|name| TensorType::parse(name))
        .collect(),
        name => vec![TensorType::parse(name).ok_or("no such type")?],
    };
    let tiers = match arg(1, "all").as_str() {
        "all" => Isa::available(),
        name => vec![Isa::parse(name).ok_or("no such tier")?],
    };
    let shape = arg(2, "4096x4096");
    let (rows, cols) = shape.split_once('x').ok_or("the shape is ROWSxCOLS")?;
    let (rows, cols): (u32, u32) = (rows.parse()?, cols.parse()?);
    let threads: usize = arg(3, "1").parse()?;
    let fast = arg(4, "") == "fast";
    let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
    let cpu = CpuDevice::new(options)?;
    for (name, rate) in [("VNNI", cpu.vnni_rate()?), ("AMX", cpu.amx_rate()?)] {
        println!("{name} in registers: {:.1} GOPS", rate.unwrap_or(0.0) / 1e9);
    }
    drop(cpu);
    println!("{rows} x {cols}, {threads} threads: GB/s of weights and GOPS at rows of activations");
    for ty in types {
        for &isa in &tiers {
            print!("{:8} {:12}", ty.name(), isa.name());
            for act_rows in [1, 2, 4, 8, 64, 256] {
                if act_rows > 8 && isa == Isa::Scalar {
                    continue;
                }
                let (seconds, pieces) = (0.15, 8);
                let case = Case { ty, rows, cols, act_rows, isa, fast, threads, seconds, pieces };
                let rates = multiply(&case)?;
                print!("  {act_rows:3}: {:6.2} {:6.1}", rates.gigabytes, rates.gigaops);
            }
            println!();
        }
    }
    Ok(())
}
