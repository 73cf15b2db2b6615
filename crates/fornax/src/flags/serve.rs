//! What may be typed after `serve`, and what `bench --serve` takes. Must not look at the machine or a file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Flags of `fornax serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// What to serve: a path, an alias of `fornax list`, or hf:OWNER/REPO[:FILE]; with NAME= clients
    /// call it NAME. May be given several times [default: smollm2-135m-instruct]
    #[arg(short, long, value_name = "[NAME=]MODEL")]
    pub(crate) model: Vec<String>,
    /// Address to listen on; others than this machine's own need a key file to be safe
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 is any that is free
    #[arg(long, value_name = "N", default_value = "8080")]
    pub(crate) port: u16,
    /// Answer only requests with one of the keys in this file, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_running: u32,
    /// Requests that wait for a place; one more gets 429
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) max_queue: u32,
    /// Room for N tokens of prompt and answer in one request [default: what the model was trained
    /// for, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx: Option<u32>,
    /// Memory for keys and values, of those that run and those kept to be found again, such as 2G or
    /// 512M [default: room for --max-running requests of --ctx tokens, within a quarter of the memory
    /// that is available on the CPU, half of it on Metal, nine tenths on CUDA]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) kv_memory: Option<u64>,
    /// Let pages of this origin use the server, such as http://localhost:3000; * is all. May be given
    /// several times
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors: Vec<String>,
    /// Milliseconds that a step may take while answers are being generated
    #[arg(long, value_name = "MS", default_value = "30", value_parser = milliseconds)]
    pub(crate) step_ms_busy: f32,
    /// Milliseconds that a step may take while there are only prompts to read
    #[arg(long, value_name = "MS", default_value = "250", value_parser = milliseconds)]
    pub(crate) step_ms_idle: f32,
    /// How the log on stderr reads
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// A request that takes longer than S seconds fails [default: none does]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub(crate) request_timeout: Option<u64>,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Flags of `bench` that belong to `--serve`.
#[derive(Debug, Args)]
pub(crate) struct BenchServe {
    /// Measure a server instead, at this base URL such as http://127.0.0.1:8080: any that speaks
    /// OpenAI's protocol
    #[arg(long, value_name = "URL", conflicts_with_all = ["synthetic", "d", "r"])]
    pub(crate) serve: Option<String>,
    /// With --serve: requests in all
    #[arg(long, value_name = "N", default_value = "64", requires = "serve", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) requests: u32,
    /// With --serve: requests that begin each second, at random times, whatever the server does
    /// [default: all at once]
    #[arg(long, value_name = "R", requires = "serve", value_parser = rate)]
    pub(crate) rate: Option<f64>,
    /// With --serve: once all of them get tokens, one more begins with a prompt of N tokens; the gaps are
    /// those of the others
    #[arg(long, value_name = "N", requires = "serve", conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) mixed: Option<u32>,
    /// With --serve: seed of those times and of the prompts
    #[arg(long, value_name = "S", default_value = "1", requires = "serve")]
    pub(crate) seed: u64,
    /// With --serve: send the key in this file
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub(crate) api_key_file: Option<PathBuf>,
}

/// A number of bytes, with K, M or G for powers of 1,024.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let power = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => 64,
    };
    let n = digits.parse::<u64>().ok().filter(|n| *n > 0);
    let all = n.and_then(|n| n.checked_mul(1_u64.checked_shl(power)?));
    all.ok_or_else(|| "must be a number of bytes, such as 2G, 512M or 1000000".into())
}

fn milliseconds(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(ms) if (0.01..=1e6).contains(&ms) => Ok(ms),
        _ => Err("must be a number from 0.01 to 1000000, such as 30".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("must be a number from 0.001 to 1000000, such as 2.5".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_numbers_with_a_unit() {
        for (text, n) in [("1", 1), ("64k", 65_536), ("512M", 512 << 20), ("2GiB", 2 << 30)] {
            assert_eq!(bytes(text), Ok(n), "{text}");
        }
        for text in ["", "0", "-1", "G", "1.5G", "2T", "2 G", "20000000000G", "1e9", "é"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
