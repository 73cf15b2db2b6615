//! Multiplies so many pieces of a matrix and ends, for whoever counts instructions (`scripts/count-arm.sh`):
//! `pieces TYPE TIER ROWS_OF_ACTIVATIONS PIECES`. Prints products of a weight and an activation in a piece.

use fornax_cpu::isa::Isa;
use fornax_cpu::measure::{Case, multiply};
use fornax_gguf::TensorType;

#[allow(clippy::print_stdout, reason = "printing is what it is for")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [ty, isa, act_rows, pieces] = &args[..] else {
        return Err("usage: pieces TYPE TIER ROWS_OF_ACTIVATIONS PIECES".into());
    };
    let case = Case {
        ty: TensorType::parse(ty).ok_or("no such type")?,
        rows: 256,
        cols: 1024,
        act_rows: act_rows.parse()?,
        isa: Isa::parse(isa).ok_or("no such tier")?,
        fast: false,
        threads: 1,
        seconds: 0.0,
        pieces: pieces.parse::<usize>()?.max(1),
    };
    println!("{}", multiply(&case)?.piece * case.act_rows);
    Ok(())
}
