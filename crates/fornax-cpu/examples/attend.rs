//! Prints what attention reaches on this machine, per tier and type of cache:
//! `cargo run --release -p fornax-cpu --example attend [TIER|all]`.

use fornax_cpu::isa::Isa;
use fornax_cpu::measure::{Look, attention};
use fornax_plan::KvType;

#[allow(clippy::print_stdout, reason = "printing is what it is for")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "all".into());
    let tiers = match name.as_str() {
        "all" => Isa::available(),
        name => vec![Isa::parse(name).ok_or("no such tier")?],
    };
    println!(
        "rows x heads x width at position, one of so many caches: microseconds, GFLOPS, GB/s of cache"
    );
    for isa in tiers {
        for (kv, element) in [(KvType::F16, 2.0), (KvType::Q8_0, 1.0625)] {
            for (rows, heads, width, pos, apart) in [
                (8, 3, 64, 504, 1),
                (3, 7, 64, 504, 1),
                (6, 4, 256, 504, 1),
                (1, 3, 64, 4095, 1),
                (1, 3, 64, 4095, 90),
                (1, 7, 64, 4095, 48),
                (1, 4, 256, 1023, 18),
                (1, 2, 128, 4095, 64),
                (1, 3, 64, 95, 1),
            ] {
                let look = Look { isa, kv, rows, heads, width, pos, apart, runs: 400 };
                let s = attention(&look)?;
                let keys = (pos + rows) as f64;
                let flops = keys * (4 * rows * heads * width) as f64;
                let bytes = keys * (2 * width) as f64 * element;
                println!(
                    "{isa:12} {kv:?} {rows}x{heads}x{width} at {pos}, one of {apart}: {:8.2} us {:6.1} {:6.1}",
                    s * 1e6,
                    flops / s / 1e9,
                    bytes / s / 1e9
                );
            }
        }
    }
    Ok(())
}
