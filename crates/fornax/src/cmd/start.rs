//! What the commands that run a model have in common: a model, a device, the line that says so, and the line at the end.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fornax_engine::{Model, Session, SessionOptions};
use fornax_plan::{Device, OpTime};
use serde_json::{Value, json};

use super::pull::size;
use crate::answer::Answer;
use crate::devices::{self, Opened, ReadRate};
use crate::flags::high::{Config, Volume};
use crate::output;
use crate::store::{Store, alias};

/// Without `--ctx`, no more than this is set aside.
const CONTEXT_DEFAULT: usize = 8192;
/// Steps of a generation that `--profile` times again.
const PROFILED: usize = 32;

/// A model and the device that will run it.
pub(super) struct Started {
    /// How reports call the model.
    pub(super) name: String,
    pub(super) model: Model,
    /// `None` for a model made in memory.
    pub(super) path: Option<PathBuf>,
    opened: Opened,
    /// What computes instead, once `opened` refused the model.
    instead: OnceCell<Opened>,
    /// What memory could give at most, by whether `instead` computes; measured before a session
    /// takes its memory, so that the buffer and the weights are never there together.
    limits: [OnceCell<Option<ReadRate>>; 2],
}

/// What a session on a device is made for, as the flags say.
pub(super) fn options(config: &Config, opened: &Opened, context: usize) -> SessionOptions {
    let info = opened.device().info();
    SessionOptions {
        context: Some(u32::try_from(context).unwrap_or(u32::MAX)),
        chunk: info.step_rows,
        kv_type: opened.kv_type(config),
        act: devices::act(config),
        deterministic: config.deterministic,
        chain: if info.kind == "cuda" { CHAIN } else { 1 },
        ..SessionOptions::default()
    }
}

/// Tokens of a chain on a device that chooses them beside the host, at most.
const CHAIN: u32 = 64;

/// The file that `name` stands for, the default model where it is absent.
///
/// # Errors
/// When nothing is called that or it cannot be brought.
pub(super) fn file(config: &Config, name: Option<&str>) -> Result<PathBuf> {
    Store::open(config)?.file(name.unwrap_or(alias::DEFAULT))
}

/// That file and the model in it.
///
/// # Errors
/// As [`file`], or when it holds no model that can be run.
pub(super) fn load(config: &Config, name: Option<&str>) -> Result<(PathBuf, Model)> {
    let path = file(config, name)?;
    let model = Model::open(&path).with_context(|| format!("could not load {}", path.display()))?;
    Ok((path, model))
}

/// How reports call a file.
pub(super) fn called(path: &Path) -> String {
    path.file_name()
        .map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// One message of a chat.
pub(super) fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// The tokens that lead to the assistant's next message.
///
/// # Errors
/// When the model has no template, or the template refuses the messages.
pub(super) fn chat_tokens(model: &Model, messages: &[Value]) -> Result<Vec<u32>> {
    let extra = json!({ "add_generation_prompt": true });
    Ok(model.encode_chat(&Value::from(messages.to_vec()), &extra)?)
}

/// Why a device refused a model, without which model and device: that is clear where it is said.
pub(super) fn causes(refused: &anyhow::Error) -> String {
    let causes: Vec<String> = refused.chain().skip(1).map(ToString::to_string).collect();
    if causes.is_empty() { refused.to_string() } else { causes.join(": ") }
}

impl Started {
    /// # Errors
    /// When the model cannot be had or the device is not there.
    pub(super) fn open(config: &Config, name: Option<&str>) -> Result<Started> {
        // Before a download: a device that is not there is known at once.
        let opened = Opened::new(config)?;
        let (path, model) = load(config, name)?;
        let name = called(&path);
        Ok(Started { path: Some(path), ..Started::new(opened, model, name) })
    }

    pub(super) fn new(opened: Opened, model: Model, name: String) -> Started {
        Started {
            name,
            model,
            path: None,
            opened,
            instead: OnceCell::new(),
            limits: Default::default(),
        }
    }

    /// What computes; settled when the first session is made.
    pub(super) fn opened(&self) -> &Opened {
        self.instead.get().unwrap_or(&self.opened)
    }

    pub(super) fn device(&self) -> &dyn Device {
        self.opened().device()
    }

    /// Weight bytes that one token reads.
    pub(super) fn bytes(&self) -> u64 {
        self.model.plan().bytes_per_token()
    }

    /// Tokens to make room for: as asked, or what is `needed`, or what the model was trained for within reason.
    pub(super) fn context(&self, asked: Option<usize>, needed: Option<usize>) -> usize {
        let trained = (self.model.plan().hyper.context as usize).max(1);
        match (asked, needed) {
            (Some(asked), _) => asked,
            (None, Some(needed)) => needed.clamp(1, trained),
            (None, None) => trained.min(CONTEXT_DEFAULT),
        }
    }

    /// A session on the device of the flags. Where a GPU refuses the model, one line says why and the
    /// CPU runs all of it, here and in every later session.
    ///
    /// # Errors
    /// When the device cannot run the model or has no room.
    pub(super) fn session(&self, config: &Config, context: usize) -> Result<Session> {
        let wanted = options(config, self.opened(), context);
        self.limit()?;
        let refused = match self.session_on(self.opened(), config, &wanted) {
            Ok(session) => return Ok(session),
            Err(refused) => refused,
        };
        let Some(fallback) = self.opened().fallback(config)? else { return Err(refused) };
        let line = format!("the CPU runs the whole model instead of the GPU: {}", causes(&refused));
        output::note(config, &line);
        let fallback = self.instead.get_or_init(|| fallback);
        self.limit()?;
        self.session_on(fallback, config, &options(config, fallback, context))
    }

    /// A session on any device.
    ///
    /// # Errors
    /// When the device cannot run the model or has no room.
    pub(super) fn session_on(
        &self,
        opened: &Opened,
        config: &Config,
        options: &SessionOptions,
    ) -> Result<Session> {
        let other = opened.laid_out(config, options.context.unwrap_or(CONTEXT_DEFAULT as u32))?;
        let device = other.as_ref().unwrap_or(opened).device();
        let kind = device.info().kind;
        let mut session = Session::new(device, self.model.plan(), options)
            .with_context(|| format!("could not prepare {} for {kind}", self.name))?;
        if config.timing {
            session.time();
        }
        Ok(session)
    }

    /// Says what will run where, and how fast memory could go at most; `None` where that is not known.
    ///
    /// # Errors
    /// When there is no memory to measure with.
    pub(super) fn announce(&self, config: &Config) -> Result<Option<ReadRate>> {
        let limit = self.limit()?;
        if config.volume >= Volume::Normal {
            output::note(config, &self.line(limit));
        }
        Ok(limit)
    }

    fn limit(&self) -> Result<Option<ReadRate>> {
        let cell = &self.limits[usize::from(self.instead.get().is_some())];
        if let Some(known) = cell.get() {
            return Ok(*known);
        }
        let measured = self.opened().read_rate(self.bytes())?;
        Ok(*cell.get_or_init(|| measured))
    }

    fn line(&self, limit: Option<ReadRate>) -> String {
        let info = self.device().info();
        let rate = limit.map_or(String::new(), |limit| {
            let cached = if limit.cache_resident { " (cache-resident)" } else { "" };
            format!(", such a buffer is read at {:.1} GB/s{cached}", limit.bytes_per_s / 1e9)
        });
        let threads =
            if info.threads == 1 { "1 thread" } else { &format!("{} threads", info.threads) };
        format!(
            "{}: {}, {:.1} M parameters, {:.2} bits per weight; {} {}, {threads}; {} read per token{rate}",
            self.name,
            self.model.family().name,
            self.model.parameters() as f64 / 1e6,
            self.model.bits_per_weight(),
            info.kind,
            info.tier,
            size(self.bytes()),
        )
    }

    /// Runs a sequence and its first generated tokens again, timed op by op, and prints a table of each phase.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn profile(
        &self,
        config: &Config,
        session: &mut Session,
        prompt: &[u32],
        ids: &[u32],
    ) -> Result<()> {
        if !config.profile {
            return Ok(());
        }
        session.reset();
        let [mut prefill, mut decode, mut prefill_kernels, mut decode_kernels] =
            [const { Vec::new() }; 4];
        for chunk in prompt.chunks(self.device().info().step_rows as usize) {
            // Bytes are those of one pass over the weights, whatever the rows.
            add(&mut prefill, session.profile(chunk)?);
            add(&mut prefill_kernels, session.kernel_times());
        }
        // The last token was chosen and not fed, so it may not fit.
        for id in ids[..ids.len().saturating_sub(1)].iter().take(PROFILED) {
            add(&mut decode, session.profile(&[*id])?);
            add(&mut decode_kernels, session.kernel_times());
        }
        table(config, "prefill", &prefill);
        table(config, "prefill kernels", &prefill_kernels);
        table(config, "decode", &decode);
        table(config, "decode kernels", &decode_kernels);
        Ok(())
    }
}

fn add(all: &mut Vec<OpTime>, step: Vec<OpTime>) {
    for time in step {
        match all.iter_mut().find(|t| t.name == time.name) {
            Some(sum) => {
                sum.calls += time.calls;
                sum.seconds += time.seconds;
                sum.bytes += time.bytes;
            }
            None => all.push(time),
        }
    }
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
}

fn table(config: &Config, phase: &str, times: &[OpTime]) {
    let all: f64 = times.iter().map(|t| t.seconds).sum();
    if times.is_empty() {
        return;
    }
    let head = format!("{phase:<22} {:>8} {:>10} {:>8} {:>6}", "calls", "ms", "GB/s", "share");
    output::note(config, &head);
    // What another kernel does on the way takes no time of its own.
    for t in times.iter().filter(|t| t.seconds > 0.0) {
        let line = format!(
            "{:<22} {:>8} {:>10.2} {:>8.2} {:>5.1}%",
            t.name,
            t.calls,
            t.seconds * 1e3,
            t.bytes as f64 / t.seconds.max(1e-12) / 1e9,
            100.0 * t.seconds / all.max(1e-12)
        );
        output::note(config, &line);
    }
}

/// The host's and the device's time of every step, where `--timing` asks and the device tells.
pub(super) fn timing(config: &Config, session: &Session) {
    if !config.timing {
        return;
    }
    let timed = session.timed();
    if timed.is_empty() {
        output::note(config, "--timing: this device does not tell recording from running apart");
    }
    for (n, (rows, s)) in timed.iter().enumerate() {
        let (encode, device) = (s.encode * 1e3, s.device * 1e3);
        let line = format!(
            "step {n:>4} {rows:>4} rows  recorded in {encode:>8.3} ms, ran in {device:>8.3} ms"
        );
        output::note(config, &line);
    }
}

/// The last line: how fast it went.
pub(super) fn conclude(config: &Config, answer: &Answer, percent: Option<f64>) {
    let mut line = format!(
        "prompt {} tokens at {:.1} tokens/s, first token after {:.1} ms",
        answer.prompt_tokens,
        answer.prompt_tokens_per_s(),
        answer.first_s * 1e3
    );
    if let Some(rate) = answer.tokens_per_s() {
        let steps = &answer.steps;
        let share = percent.map_or(String::new(), |p| format!(" ({p:.0}% of the read rate)"));
        line += &format!(
            "; {} tokens at {rate:.1} tokens/s{share}; steps min {:.2} mean {:.2} max {:.2} ms",
            answer.ids.len(),
            steps.min_ms(),
            steps.mean_s() * 1e3,
            steps.max_ms()
        );
    }
    output::note(config, &line);
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;
    use fornax_plan::{DeviceInfo, Error, Limits, Plan, Program, Refusal};

    use super::*;
    use crate::flags::low::Cli;

    /// A GPU that has no kernel for anything.
    struct Refusing;

    impl Device for Refusing {
        fn info(&self) -> DeviceInfo {
            let reference = fornax_plan::reference::ReferenceDevice::default();
            DeviceInfo { kind: "cuda", ..reference.info() }
        }

        fn supports(&self, _: &Plan, _: &Limits) -> Vec<Refusal> {
            Vec::new()
        }

        fn prepare(&self, _: &Plan, _: &Limits) -> fornax_plan::Result<Box<dyn Program>> {
            Err(Error::unsupported("cuda: attention: no kernel for heads of 16"))
        }
    }

    pub(in crate::cmd) fn refusing() -> Opened {
        Opened::Gpu(Box::new(Refusing))
    }

    /// A tiny model that is to run on that GPU.
    pub(in crate::cmd) fn started(device: &str) -> (Config, Started) {
        let cli =
            Cli::parse_from(["fornax", "list", "--quiet", "--threads", "1", "--device", device]);
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testdata/models/llama3-q8_0/model.gguf");
        let started = Started::new(refusing(), Model::open(&file).unwrap(), "model.gguf".into());
        (Config::resolve(cli.shared), started)
    }

    #[test]
    fn what_a_gpu_refuses_the_cpu_runs() {
        let (config, started) = started("cuda");
        assert_eq!(started.device().info().kind, "cuda");
        for _ in 0..2 {
            let mut session = started.session(&config, 16).unwrap();
            assert_eq!(session.logits(&[1, 2, 3], false).unwrap().len(), 384);
            assert_eq!(started.device().info().kind, "cpu");
        }
    }
}
