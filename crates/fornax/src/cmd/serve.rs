//! `fornax serve`: models on a device, behind the server. Knows flags and how to open models; the protocols are the
//! server's.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use fornax_engine::Model;
use fornax_engine::serve::{Engine, EngineHandle, ServeOptions};
use fornax_server::{Options, Served, Stop};

use super::{Usage, start};
use crate::devices::{self, Opened};
use crate::flags::high::{Config, Volume};
use crate::flags::serve::{LogFormat, Serve};
use crate::output;
use crate::store::alias;

/// Without `--ctx`, no more than this for one request.
const CONTEXT_DEFAULT: u32 = 8192;
/// How long requests may go on when the server is asked to end.
const DRAIN: Duration = Duration::from_secs(30);

/// Serves until it is asked to end.
///
/// # Errors
/// When a model, the device or the address cannot be had.
pub(crate) fn serve(config: &Config, flags: &Serve) -> Result<()> {
    log(config, flags);
    let keys = keys(flags.api_key_file.as_deref())?;
    // Before models are loaded: an address that is taken is known at once.
    let listener = listen(&flags.host, flags.port)?;
    let addr = listener.local_addr().context("could not learn the address")?;
    let opened = Opened::new(config)?;
    let default = [alias::DEFAULT.to_owned()];
    let names = if flags.model.is_empty() { &default[..] } else { &flags.model[..] };
    let mut fallback = None;
    let mut models = Vec::new();
    let mut aliases = HashSet::new();
    for name in names {
        let served = load(config, flags, name, &opened, &mut fallback)?;
        if !aliases.insert(served.alias.clone()) {
            let line =
                format!("two models would be called {:?}; name one as NAME=MODEL", served.alias);
            return Err(Usage(line).into());
        }
        models.push(served);
    }
    let options = Options {
        keys,
        cors: flags.cors.clone(),
        loopback: addr.ip().is_loopback(),
        request_timeout: flags.request_timeout.map(Duration::from_secs),
        drain: DRAIN,
        ..Options::default()
    };
    if !options.loopback && options.keys.is_empty() {
        output::note(
            config,
            &format!("{addr} can be reached by others and asks for no key; see --api-key-file"),
        );
    }
    let stop = Stop::new();
    fornax_server::stop_on_signals(&stop).context("could not listen to signals")?;
    output::note(config, &format!("listening on http://{addr}"));
    fornax_server::serve(listener, models, options, &stop).context("the server failed")
}

/// Where the log goes: stderr, one line for each request, unless `--quiet`.
fn log(config: &Config, flags: &Serve) {
    let level = match config.volume {
        Volume::Quiet => tracing::Level::ERROR,
        Volume::Normal => tracing::Level::INFO,
        Volume::Verbose => tracing::Level::DEBUG,
    };
    let lines = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        // It would complain to stderr that stderr is gone, which panics.
        .log_internal_errors(false)
        .with_ansi(config.stderr_draws && flags.log_format == LogFormat::Text);
    // A program that embeds this one may have a log already.
    let _ = match flags.log_format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
}

fn keys(file: Option<&Path>) -> Result<Vec<String>> {
    let Some(file) = file else { return Ok(Vec::new()) };
    let text = fs::read_to_string(file)
        .with_context(|| format!("could not read the keys in {}", file.display()))?;
    let keys: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.is_empty() {
        bail!("there is no key in {}: nobody could use the server", file.display());
    }
    Ok(keys)
}

fn listen(host: &str, port: u16) -> Result<TcpListener> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let addresses: Vec<SocketAddr> = match bare.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => (host, port)
            .to_socket_addrs()
            .with_context(|| format!("could not find the host {host:?}"))?
            .collect(),
    };
    TcpListener::bind(&addresses[..]).with_context(|| {
        format!("could not listen on {host} port {port}; another --port may be free")
    })
}

fn load(
    config: &Config,
    flags: &Serve,
    name: &str,
    opened: &Opened,
    fallback: &mut Option<Opened>,
) -> Result<Served> {
    let (alias, name) = match name.split_once('=') {
        // A path or URL with a sign of equality has a slash before it.
        Some((alias, name)) if !alias.is_empty() && !alias.contains(['/', ':', '\\']) => {
            (Some(alias), name)
        }
        _ => (None, name),
    };
    let (path, model) = start::load(config, Some(name))?;
    let alias = alias.map_or_else(|| called(name, &path), str::to_owned);
    let model = Arc::new(model);
    let context = context(flags, &model);
    let handle = match start_engine(config, flags, &model, opened, context) {
        Ok(handle) => handle,
        Err(refused) => {
            let Some(other) = opened.fallback(config)? else {
                return Err(refused).with_context(|| format!("could not serve {alias}"));
            };
            output::note(config, &format!("the CPU runs {alias} instead of the GPU: {refused:#}"));
            let other = fallback.get_or_insert(other);
            start_engine(config, flags, &model, other, context)?
        }
    };
    let room = u32::try_from(handle.capacity()).unwrap_or(u32::MAX).min(context);
    let parameters = model.parameters() as f64 / 1e6;
    output::note(
        config,
        &format!(
            "{alias}: {}, {parameters:.1} M parameters, {room} tokens a request",
            model.family().name
        ),
    );
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Ok(Served { alias, model, engine: Arc::new(handle), context: room, created })
}

fn start_engine(
    config: &Config,
    flags: &Serve,
    model: &Arc<Model>,
    opened: &Opened,
    context: u32,
) -> Result<EngineHandle> {
    let options = ServeOptions {
        max_running: flags.max_running as usize,
        max_queue: flags.max_queue as usize,
        context,
        kv_type: opened.kv_type(config),
        act: devices::act(config),
        step_ms_busy: flags.step_ms_busy,
        step_ms_idle: flags.step_ms_idle,
        deterministic: config.deterministic,
        kv_bytes: flags.kv_memory,
        ..ServeOptions::default()
    };
    Ok(Engine::start(model.clone(), opened.device(), options)?)
}

fn context(flags: &Serve, model: &Model) -> u32 {
    let trained = model.plan().hyper.context.max(1);
    flags.ctx.unwrap_or_else(|| trained.min(CONTEXT_DEFAULT))
}

/// An alias is called by itself, a file by its name without the ending.
fn called(name: &str, path: &Path) -> String {
    if alias::ALIASES.iter().any(|known| known.name == name) {
        return name.to_owned();
    }
    path.file_stem().map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_called_by_their_stem_and_aliases_by_themselves() {
        assert_eq!(called(alias::DEFAULT, Path::new("cache/x.gguf")), alias::DEFAULT);
        assert_eq!(called("a/b.Q4_0.gguf", Path::new("a/b.Q4_0.gguf")), "b.Q4_0");
    }

    #[test]
    fn addresses_may_be_names_and_numbers_of_both_kinds() {
        for host in ["127.0.0.1", "localhost"] {
            assert!(listen(host, 0).is_ok(), "{host}");
        }
        let taken = listen("127.0.0.1", 0).expect("a free port");
        let port = taken.local_addr().expect("an address").port();
        assert!(format!("{:#}", listen("127.0.0.1", port).unwrap_err()).contains("--port"));
    }
}
