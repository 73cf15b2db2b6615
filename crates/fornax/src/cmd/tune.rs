//! `fornax tune`: the fastest variants of the Metal kernels for a model's shapes on this Mac, measured and kept.

use anyhow::Result;

use super::start;
use crate::flags::high::Config;
use crate::flags::low::Tune;

/// Measures, or lists what would be measured.
///
/// # Errors
/// When there is no GPU to measure, the model cannot be had, or the profile cannot be written.
#[cfg(unix)]
pub(super) fn tune(config: &Config, flags: &Tune) -> Result<()> {
    use anyhow::Context;
    use fornax_engine::Model;
    use fornax_metal::MetalDevice;

    use super::whole_file;
    use crate::output;

    // Before a download: without a GPU there is nothing to measure.
    let device = if flags.dry_run { None } else { Some(MetalDevice::system()) };
    let device = device
        .transpose()
        .context("there is nothing to tune here; --dry-run lists what would be timed on a Mac")?;
    let path = start::file(config, flags.model.model.as_deref())?;
    let model = Model::open(&path).with_context(|| format!("could not load {}", path.display()))?;
    let Some(device) = device else {
        let lines = MetalDevice::tunable(model.plan()).join("\n");
        return output::product(format!("{lines}\n").as_bytes());
    };
    let profile = device.tune(model.plan(), |line| output::note(config, line))?;
    let kept = config.tuning().context("no folder to keep the profile in; set FORNAX_HOME")?;
    if let Some(folder) = kept.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("could not make {}", folder.display()))?;
    }
    whole_file(&kept, |part| Ok(std::fs::write(part, &profile)?))
        .with_context(|| format!("could not write {}", kept.display()))?;
    output::note(config, &format!("wrote {}", kept.display()));
    output::product(profile.as_bytes())
}

#[cfg(not(unix))]
pub(super) fn tune(_: &Config, _: &Tune) -> Result<()> {
    anyhow::bail!("metal is not in this build")
}
