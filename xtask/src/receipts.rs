//! The page on speed, from the receipts under `bench/receipts`. A figure that has no receipt is not on it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Every receipt as a row for each test, in the order of the files' names.
pub(crate) fn page(root: &Path) -> Result<String> {
    let folder = root.join("bench/receipts");
    let mut files = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut page = String::from(HEAD);
    for file in files {
        let text = fs::read_to_string(&file)?;
        let receipt: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is no JSON", file.display()))?;
        rows(&mut page, &receipt).with_context(|| format!("in {}", file.display()))?;
    }
    let counts = root.join("bench/arm-instructions.txt");
    if counts.is_file() {
        page.push_str(ARM);
        counted(&mut page, &fs::read_to_string(&counts)?)
            .with_context(|| format!("in {}", counts.display()))?;
    }
    Ok(page)
}

const ARM: &str = "
## Arm

No Arm machine has run this: the tiers are held to the reference under an emulator, whose time says nothing. What can be said is
how many instructions the kernels run for 32 products of a weight and an activation, scaling and sums included
(`scripts/count-arm.sh > bench/arm-instructions.txt`), with so many rows of activations.

";

/// What `scripts/count-arm.sh` prints, as a table.
fn counted(page: &mut String, text: &str) -> Result<()> {
    let mut lines = text.lines();
    let titles = lines.next().context("no titles")?.replace(" rows", "\u{a0}rows");
    let titles: Vec<&str> = titles.split_ascii_whitespace().collect();
    writeln!(page, "| {} |\n|{}", titles.join(" | "), " --- |".repeat(titles.len()))?;
    for line in lines {
        let cells: Vec<&str> = line.split_ascii_whitespace().collect();
        let numbers = cells.iter().skip(2).all(|c| c.parse::<f64>().is_ok_and(|n| n > 0.0));
        if cells.len() != titles.len() || !numbers {
            bail!("{line:?}: expected a type, a tier and {} counts", titles.len() - 2);
        }
        writeln!(page, "| {} |", cells.join(" | "))?;
    }
    Ok(())
}

const HEAD: &str = "# Speed beside llama.cpp

Written by `cargo xtask docs` from `bench/receipts/*.json`, which `fornax bench --against llama.cpp --receipt FILE` writes
(`scripts/bench-table.sh` makes all of them). Both engines read the same file and run in turns within one sitting, the same
number of threads each; medians of the rounds, and the spread from lowest to highest. llama.cpp is built by clang 19.
The bound of generation is that of reading the weights once for each token at the rate of a read-only stream by the same
threads over a buffer of their size, \"cached\" where that fits the last-level cache; the stream passes once after every token
of a run that is for this alone. That of a prompt is what the same threads multiply and add of 8-bit integers in registers, with
VNNI and with AMX, before every round.

| model | test | fornax, tokens/s | llama.cpp | ratio | of the bound | machine |
| --- | --- | --- | --- | --- | --- | --- |
";

fn rows(page: &mut String, receipt: &Value) -> Result<()> {
    let word = |of: &Value, key: &str| -> Result<String> {
        Ok(of[key].as_str().with_context(|| format!("no {key:?}"))?.to_owned())
    };
    let model = word(receipt, "model")?;
    let tier = word(receipt, "fornax")?;
    let machine = &receipt["machine"];
    let place = format!(
        "{}, {} threads, {}",
        word(machine, "processor")?,
        receipt["threads"],
        tier.rsplit(' ').next().unwrap_or_default()
    );
    let read = median(&list(&receipt["read_gb_per_s"])?) * 1e9;
    let bytes = receipt["weight_bytes_per_token"].as_f64().context("no weight bytes")?;
    for test in receipt["tests"].as_array().context("no tests")? {
        let (ours, theirs) = (list(&test["fornax"])?, list(&test["peer"])?);
        let name = word(test, "name")?;
        let depth = match test["depth"].as_u64() {
            None | Some(0) => String::new(),
            Some(depth) => format!(" at depth {depth}"),
        };
        let cached = if receipt["read_from_cache"] == true { ", cached" } else { "" };
        let share = match name.as_str() {
            "generation" => match &receipt["read_share"] {
                // Receipts from before tokens and passes took turns.
                Value::Null => format!("{:.0} %{cached}", 100.0 * median(&ours) * bytes / read),
                shares => format!("{:.0} %{cached}", 100.0 * median(&list(shares)?)),
            },
            "prompt" => of_probes(receipt, median(&ours))?,
            _ => String::new(),
        };
        let times = match test["sequences"].as_u64() {
            None | Some(1) => String::new(),
            Some(n) => format!("{n} x "),
        };
        let kv = test["kv_type"].as_str().map_or(String::new(), |kv| format!(", {kv} cache"));
        writeln!(
            page,
            "| {model} | {name} {times}{}{depth}{kv} | {} | {} | {:.2} | {share} | {place} |",
            test["tokens"],
            spread(&ours),
            spread(&theirs),
            median(&ours) / median(&theirs)
        )?;
    }
    Ok(())
}

/// A prompt's share of what VNNI and AMX multiply and add in registers.
fn of_probes(receipt: &Value, tokens: f64) -> Result<String> {
    let Some(ops) = receipt["ops_per_prompt_token"].as_f64() else { return Ok(String::new()) };
    let mut shares = Vec::new();
    for (name, key) in [("VNNI", "vnni_tops"), ("AMX", "amx_tops")] {
        let tops = list(&receipt[key])?;
        if !tops.is_empty() {
            shares.push(format!("{:.0} % of {name}", tokens * ops / median(&tops) / 1e10));
        }
    }
    Ok(shares.join(", "))
}

fn list(of: &Value) -> Result<Vec<f64>> {
    let all = of.as_array().context("a list is missing")?;
    all.iter().map(|v| v.as_f64().context("not a number")).collect()
}

fn spread(all: &[f64]) -> String {
    let low = all.iter().copied().fold(f64::INFINITY, f64::min);
    let high = all.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({low:.1} to {high:.1})", median(all))
}

/// NaN of nothing.
fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_medians_the_ratio_and_the_share_of_the_bound() -> Result<()> {
        let receipt = json!({
            "model": "m.gguf", "weight_bytes_per_token": 1e9, "fornax": "fornax 1 on avx2", "threads": 2,
            "machine": { "processor": "P", "cores": 2 }, "read_gb_per_s": [10.0, 30.0, 20.0],
            "ops_per_prompt_token": 2e9, "vnni_tops": [0.5], "amx_tops": [],
            "tests": [{ "name": "generation", "tokens": 64, "depth": 0, "fornax": [9.0, 10.0, 11.0],
                        "peer": [4.0, 5.0, 6.0] },
                      { "name": "prompt", "tokens": 512, "depth": 0, "fornax": [150.0], "peer": [50.0] },
                      { "name": "decoding", "tokens": 32, "sequences": 16, "fornax": [40.0], "peer": [20.0] }]
        });
        let mut page = String::new();
        rows(&mut page, &receipt)?;
        let mut beside = receipt.clone();
        beside["read_share"] = json!([0.7, 0.95, 0.9]);
        let mut other = String::new();
        rows(&mut other, &beside)?;
        assert!(other.contains("| 2.00 | 90 % |"), "{other}");
        let expected = "| m.gguf | generation 64 | 10.0 (9.0 to 11.0) | 5.0 (4.0 to 6.0) | 2.00 | 50 % \
                        | P, 2 threads, avx2 |\n\
                        | m.gguf | prompt 512 | 150.0 (150.0 to 150.0) | 50.0 (50.0 to 50.0) | 3.00 | 60 % of VNNI \
                        | P, 2 threads, avx2 |\n\
                        | m.gguf | decoding 16 x 32 | 40.0 (40.0 to 40.0) | 20.0 (20.0 to 20.0) | 2.00 |  \
                        | P, 2 threads, avx2 |\n";
        assert_eq!(page, expected);
        Ok(())
    }

    #[test]
    fn counts_of_instructions_are_a_table_or_refused() -> Result<()> {
        let mut page = String::new();
        super::counted(&mut page, "type tier 1 rows 8 rows\nQ8_0 neon 17.07 14.67\n")?;
        let want = "| type | tier | 1\u{a0}rows | 8\u{a0}rows |\n| --- | --- | --- | --- |\n\
                    | Q8_0 | neon | 17.07 | 14.67 |\n";
        assert_eq!(page, want);
        for bad in ["", "type tier 1 rows\nQ8_0 neon", "type tier 1 rows\nQ8_0 neon -1.0"] {
            assert!(super::counted(&mut String::new(), bad).is_err(), "{bad:?}");
        }
        Ok(())
    }

    #[test]
    fn a_receipt_without_its_repeats_is_refused() {
        let receipt =
            json!({ "model": "m", "fornax": "f", "machine": { "processor": "P" }, "threads": 2 });
        assert!(rows(&mut String::new(), &receipt).is_err());
    }
}
