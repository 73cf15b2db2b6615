//! What the commands that generate have in common: a model, a device, the line that says so, and the line at the end.

use anyhow::Result;
use fornax_plan::{Device, DeviceInfo};

use crate::answer::Answer;
use crate::flags::high::{Config, Volume};
use crate::lane::{Lane, Room};
use crate::machine::ReadRate;
use crate::model::{self, Model};
use crate::{devices, output};

/// Without `--ctx`, no more than this is set aside.
const CONTEXT_DEFAULT: usize = 8192;

/// A model and the device that will run it.
pub(crate) struct Started {
    pub(crate) model: Model,
    pub(crate) device: Box<dyn Device>,
}

impl Started {
    /// # Errors
    /// When the model cannot be had or the device is not there.
    pub(crate) fn open(config: &Config, name: Option<&str>) -> Result<Started> {
        // Before a download: a device that is not there is known at once.
        let device = devices::open(config)?;
        let model = Model::open(&model::file(config, name)?)?;
        Ok(Started { model, device })
    }

    /// Tokens to make room for: as asked, or what is `needed`, or what the model was trained for within reason.
    pub(crate) fn context(&self, asked: Option<usize>, needed: Option<usize>) -> usize {
        let trained = (self.model.plan.hyper.context as usize).max(1);
        match (asked, needed) {
            (Some(asked), _) => asked,
            (None, Some(needed)) => needed.clamp(1, trained),
            (None, None) => trained.min(CONTEXT_DEFAULT),
        }
    }

    /// # Errors
    /// When the device cannot run the model or has no room.
    pub(crate) fn lane(&self, config: &Config, context: usize) -> Result<Lane> {
        let kv = devices::kv_type(config, &*self.device);
        let room = Room { context, wanted: 1, kv, act: None, profile: config.profile };
        Lane::prepare(&*self.device, &self.model.plan, room)
    }

    /// Says what will run where, and how fast memory could go at most; `None` where that is not known.
    pub(crate) fn announce(&self, config: &Config, info: &DeviceInfo) -> Option<ReadRate> {
        let bytes = self.model.plan.bytes_per_token();
        let limit = matches!(info.kind, "cpu" | "reference")
            .then(|| ReadRate::measure(bytes, info.threads as usize));
        if config.volume >= Volume::Normal {
            output::note(config, &self.line(info, bytes, limit));
        }
        limit
    }

    fn line(&self, info: &DeviceInfo, bytes: u64, limit: Option<ReadRate>) -> String {
        let rate = limit.map_or(String::new(), |limit| {
            let cached = if limit.cache_resident { " (cache-resident)" } else { "" };
            format!(", such a buffer is read at {:.1} GB/s{cached}", limit.bytes_per_s / 1e9)
        });
        let threads =
            if info.threads == 1 { "1 thread" } else { &format!("{} threads", info.threads) };
        format!(
            "{}: {}, {:.1} M parameters, {:.2} bits per weight; {} {}, {threads}; {} read per token{rate}",
            self.model.name,
            self.model.family,
            self.model.gguf.n_elements() as f64 / 1e6,
            self.model.bits_per_weight(),
            info.kind,
            info.tier,
            super::pull::size(bytes),
        )
    }
}

/// The last line: how fast it went.
pub(crate) fn conclude(config: &Config, answer: &Answer, percent: Option<f64>) {
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
