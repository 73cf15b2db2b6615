//! What was typed, resolved against this machine: environment, cache folder, terminal. Commands take this, not `low`.
//! The only place that reads environment variables.

use std::env;
use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::low::{ActName, DeviceName, KvName, Layout, Shared};

/// Everything that commands share.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) device: DeviceName,
    /// `None`: the device decides.
    pub(crate) threads: Option<usize>,
    pub(crate) cpu_isa: Option<String>,
    /// `None`: the device's own.
    pub(crate) kv_type: Option<KvName>,
    pub(crate) layout: Layout,
    /// `None`: the device's own.
    pub(crate) act: Option<ActName>,
    /// Only devices that give the same numbers in any company.
    pub(crate) deterministic: bool,
    /// Long prompts in the form of the CPU that rounds differently.
    pub(crate) fast_prompt: bool,
    pub(crate) profile: bool,
    pub(crate) timing: bool,
    pub(crate) volume: Volume,
    /// Whether stderr can redraw a line.
    pub(crate) stderr_draws: bool,
    pub(crate) hub: HubConfig,
    /// `$FORNAX_HOME`, or the platform's cache folder for fornax.
    home: Option<PathBuf>,
}

/// How much goes to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Volume {
    Quiet,
    Normal,
    Verbose,
}

/// Where the Hugging Face hub is and who asks.
#[derive(Clone)]
pub(crate) struct HubConfig {
    /// Without a trailing slash.
    pub(crate) endpoint: String,
    pub(crate) token: Option<String>,
}

impl std::fmt::Debug for HubConfig {
    // A token must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubConfig").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Config {
    pub(crate) fn resolve(shared: Shared) -> Config {
        let volume = match (shared.quiet, shared.verbose) {
            (true, _) => Volume::Quiet,
            (_, true) => Volume::Verbose,
            _ => Volume::Normal,
        };
        let dumb = var("TERM").is_some_and(|t| t == "dumb");
        Config {
            device: shared.device,
            threads: shared.threads,
            cpu_isa: shared.cpu_isa.filter(|s| !s.is_empty()),
            kv_type: shared.kv_type,
            layout: shared.kv,
            act: shared.act,
            deterministic: shared.deterministic,
            fast_prompt: shared.fast_prompt,
            profile: shared.profile,
            timing: shared.timing,
            volume,
            stderr_draws: std::io::stderr().is_terminal() && !dumb && volume != Volume::Quiet,
            hub: HubConfig::from_env(),
            home: var("FORNAX_HOME").map(PathBuf::from).or_else(|| {
                directories::ProjectDirs::from("", "", "fornax").map(|d| d.cache_dir().to_owned())
            }),
        }
    }

    /// The same with another `--device`.
    pub(crate) fn on(&self, device: DeviceName) -> Config {
        Config { device, ..self.clone() }
    }

    /// Where `fornax tune` keeps what it measured.
    pub(crate) fn tuning(&self) -> Option<PathBuf> {
        self.home.as_ref().map(|home| home.join("metal-profile.txt"))
    }

    /// The folder that holds `models/`.
    pub(crate) fn home(&self) -> Result<&PathBuf> {
        self.home.as_ref().context(
            "no folder for the model cache: this account has no home folder; set FORNAX_HOME to one",
        )
    }
}

impl HubConfig {
    fn from_env() -> HubConfig {
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        HubConfig { endpoint: endpoint.trim_end_matches('/').to_owned(), token: token() }
    }
}

/// The token where Hugging Face's own tools keep it.
fn token() -> Option<String> {
    if let Some(token) = var("HF_TOKEN") {
        return Some(token.trim().to_owned());
    }
    let home = var("HF_HOME").map(PathBuf::from).or_else(|| {
        directories::BaseDirs::new().map(|d| d.home_dir().join(".cache").join("huggingface"))
    })?;
    let token = std::fs::read_to_string(home.join("token")).ok()?;
    Some(token.trim().to_owned()).filter(|t| !t.is_empty())
}

/// A variable that is set and not empty.
fn var(name: &str) -> Option<String> {
    env::var_os(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty())
}
