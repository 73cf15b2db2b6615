//! Finds a C++ compiler and turns kernel source into shared libraries, each kept under the hash of all that it is made of. It
//! knows no kernel.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};

use crate::Error;

/// The emulator's own C++ files.
const HEADERS: [(&str, &str); 7] = [
    ("runtime.h", include_str!("../cpp/runtime.h")),
    ("state.h", include_str!("../cpp/state.h")),
    ("vec.h", include_str!("../cpp/vec.h")),
    ("math.h", include_str!("../cpp/math.h")),
    ("simd.h", include_str!("../cpp/simd.h")),
    ("kernel.h", include_str!("../cpp/kernel.h")),
    ("schedule.cpp", include_str!("../cpp/schedule.cpp")),
];
const CHECKS: &str = include_str!("../cpp/checks.cpp");

/// The system headers of the language: the emulator's own are there from the start, so these are empty.
const SYSTEM: [&str; 14] = [
    "metal_stdlib",
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_math",
    "metal_pack",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_type_traits",
    "metal_matrix",
];

/// A compiler, and the folder with what it needs and makes.
#[derive(Debug)]
pub(crate) struct Compiler {
    program: PathBuf,
    clang: bool,
    version: String,
    folder: PathBuf,
    headers: PathBuf,
}

static FOUND: OnceLock<Result<Compiler, String>> = OnceLock::new();
static BUILDING: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
static TEMPORARY: AtomicU64 = AtomicU64::new(0);

impl Compiler {
    /// The compiler that `FORNAX_MSL_CXX` names, or the first of g++ and clang++ that answers.
    ///
    /// # Errors
    /// `is_host` when there is none, or the folder cannot be made.
    pub(crate) fn get() -> Result<&'static Compiler, Error> {
        FOUND.get_or_init(|| find().map_err(|e| e.to_string())).as_ref().map_err(Error::host)
    }

    /// Runs the preprocessor over `source` as a driver for Metal would, with the given definitions.
    ///
    /// # Errors
    /// `is_compile` with the compiler's words.
    pub(crate) fn preprocess(
        &self,
        source: &str,
        defines: &[(String, String)],
    ) -> Result<String, Error> {
        let mut command = Command::new(&self.program);
        command.args(["-E", "-w", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-nostdinc++"]);
        command.arg("-I").arg(self.headers.join("system"));
        command.args(["-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__=1"]);
        for (name, value) in defines {
            command.arg(format!("-D{name}={value}"));
        }
        command.arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed =
            |e: std::io::Error| Error::host(format!("starting {}: {e}", self.program.display()));
        let mut child = command.spawn().map_err(failed)?;
        let mut input = child.stdin.take().ok_or_else(|| Error::host("no pipe to the compiler"))?;
        let text = source.to_owned();
        // Fed from a thread of its own: the compiler may write before it has read all.
        let feed = std::thread::spawn(move || input.write_all(text.as_bytes()));
        let output = child.wait_with_output().map_err(failed)?;
        // A compiler that stops reading has said why.
        let _ = feed.join();
        if !output.status.success() {
            return Err(Error::compile(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        String::from_utf8(output.stdout)
            .map_err(|_| Error::compile("the preprocessed kernel source is not UTF-8"))
    }

    /// The library with the scheduler and the checks.
    ///
    /// # Errors
    /// `is_host` when it cannot be built.
    pub(crate) fn runtime(&self) -> Result<PathBuf, Error> {
        let source = "#include \"schedule.cpp\"\n#include \"checks.cpp\"\n";
        self.library(source, &["-O2", "-fno-stack-protector"], "runtime")
            .map_err(|e| Error::host(format!("building the emulator's run-time library: {e}")))
    }

    /// Compiles complete kernel source, with or without the checks of each access.
    ///
    /// # Errors
    /// `is_compile` with the compiler's words, lines being those of the kernel source.
    pub(crate) fn kernels(&self, source: &str, checked: bool) -> Result<PathBuf, Error> {
        let mut flags =
            vec!["-O2", "-g1", "-gdwarf-4", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing"];
        flags.extend(["-ffp-contract=off", "-fsigned-char", "-fno-stack-protector"]);
        // Calls that return nowhere, and functions that are one, have no line of their own.
        flags.extend(["-fno-threadsafe-statics", "-fno-optimize-sibling-calls"]);
        if self.clang {
            flags.extend(["-Xclang", "-ffloat16-excess-precision=none", "-ferror-limit=20"]);
        } else {
            flags.extend(["-fmax-errors=20", "-fno-ipa-icf"]);
        }
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("f16c") && std::is_x86_feature_detected!("fma") {
            flags.extend(["-mf16c", "-mfma"]);
        }
        let sanitize = if checked {
            "-fsanitize=thread,alignment,bounds,integer-divide-by-zero"
        } else {
            "-fsanitize=alignment,integer-divide-by-zero"
        };
        flags.push(sanitize);
        if checked {
            // A thread variable that is read before it is written holds nothing that a test could take for a result.
            flags.push("-ftrivial-auto-var-init=pattern");
        }
        if checked && self.clang {
            flags.extend(["-mllvm", "-tsan-instrument-func-entry-exit=0"]);
            // A race detector may leave out a read before a write of the same bytes; here both count.
            flags.extend(["-mllvm", "-tsan-instrument-read-before-write=1"]);
        } else if checked {
            flags.extend(["--param", "tsan-instrument-func-entry-exit=0"]);
        }
        self.library(source, &flags, "kernels")
    }

    fn library(&self, source: &str, flags: &[&str], kind: &str) -> Result<PathBuf, Error> {
        let mut hash = Sha256::new();
        for part in [source, &self.version, &flags.join(" "), kind] {
            hash.update(part.as_bytes());
            hash.update([0]);
        }
        hash.update(own_hash().as_bytes());
        let name = format!("{kind}-{}", hex(&hash.finalize()[..12]));
        let done = self.folder.join(format!("{name}.so"));
        // Threads that want the same library wait for the first to build it.
        let turn = Arc::clone(
            BUILDING
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(name.clone())
                .or_default(),
        );
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(file) = fs::File::options().append(true).open(&done) {
            // Says that it is in use; if that fails, it is only built again some day.
            let _ = file.set_modified(SystemTime::now());
            return Ok(done);
        }
        let n = TEMPORARY.fetch_add(1, Ordering::Relaxed);
        let stem = self.folder.join(format!("{name}.{}.{n}", std::process::id()));
        let [input, object, shared] =
            ["cpp", "o", "tmp"].map(|e| PathBuf::from(format!("{}.{e}", stem.display())));
        let result = self.build(source, flags, [&input, &object, &shared]);
        let moved = result.and_then(|()| {
            fs::rename(&shared, &done)
                .map_err(|e| Error::host(format!("moving {} into place: {e}", shared.display())))
        });
        for file in [&input, &object, &shared] {
            // What was never made cannot be removed.
            let _ = fs::remove_file(file);
        }
        moved.map(|()| done)
    }

    fn build(&self, source: &str, flags: &[&str], files: [&Path; 3]) -> Result<(), Error> {
        let [input, object, shared] = files;
        fs::write(input, source)
            .map_err(|e| Error::host(format!("writing {}: {e}", input.display())))?;
        let mut compile = Command::new(&self.program);
        compile.args(["-std=c++17", "-w", "-fPIC", "-c", "-x", "c++"]).args(flags);
        compile.arg("-I").arg(&self.headers).arg(input).arg("-o").arg(object);
        self.done(compile)?;
        let mut link = Command::new(&self.program);
        // The sanitizers' own libraries stay out: their entry points are the emulator's.
        link.arg("-shared").arg(object).arg("-o").arg(shared);
        self.done(link)
    }

    fn done(&self, mut command: Command) -> Result<(), Error> {
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(|e| Error::host(format!("starting {}: {e}", self.program.display())))?;
        if output.status.success() {
            return Ok(());
        }
        Err(Error::compile(String::from_utf8_lossy(&output.stderr).into_owned()))
    }

    /// Whether a source file named by debug information is the emulator's own.
    pub(crate) fn is_own(&self, file: &str) -> bool {
        Path::new(file).starts_with(&self.headers)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn own_hash() -> String {
    static HASH: OnceLock<String> = OnceLock::new();
    let compute = || {
        let mut hash = Sha256::new();
        for (name, text) in HEADERS.iter().chain([&("checks.cpp", CHECKS)]) {
            hash.update(name.as_bytes());
            hash.update(text.as_bytes());
        }
        hex(&hash.finalize()[..8])
    };
    HASH.get_or_init(compute).clone()
}

fn find() -> Result<Compiler, Error> {
    let wanted = std::env::var_os("FORNAX_MSL_CXX").map(PathBuf::from);
    let names = ["g++", "clang++", "clang++-19", "c++"].map(PathBuf::from);
    let candidates = wanted.map_or(names.to_vec(), |w| vec![w]);
    let answer = candidates.iter().find_map(|program| {
        let output = Command::new(program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some((program.clone(), text))
    });
    let Some((program, version)) = answer else {
        return Err(Error::host(
            "the Metal emulator needs a C++ compiler: found neither g++ nor clang++; install one, or name one in FORNAX_MSL_CXX",
        ));
    };
    let folder = folder();
    let headers = folder.join(format!("headers-{}", own_hash()));
    let make = |path: &Path, text: &str| {
        // Written under another name first: a second process may be reading.
        let temporary = path.with_extension(format!("{}", std::process::id()));
        fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path))
    };
    let fill = || -> std::io::Result<()> {
        fs::create_dir_all(headers.join("system"))?;
        for (name, text) in HEADERS.iter().chain([&("checks.cpp", CHECKS)]) {
            make(&headers.join(name), text)?;
        }
        SYSTEM.iter().try_for_each(|name| make(&headers.join("system").join(name), ""))
    };
    prune(&folder);
    fill().map_err(|e| Error::host(format!("filling {}: {e}", headers.display())))?;
    // In a folder that all may write to, someone else may have made this one.
    let owner = fs::metadata(&folder).map(|m| m.uid());
    if folder.starts_with(std::env::temp_dir()) && owner.ok() != Some(user()) {
        return Err(Error::host(format!(
            "{} belongs to another user; name a folder of your own in FORNAX_MSL_CACHE",
            folder.display()
        )));
    }
    let clang = version.contains("clang");
    Ok(Compiler { program, clang, version, folder, headers })
}

/// Removes what nothing has used for a month; what cannot be removed stays.
fn prune(folder: &Path) {
    let old = SystemTime::now() - Duration::from_secs(30 * 24 * 3600);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let aged = entry.metadata().and_then(|m| Ok((m.is_dir(), m.modified()? < old)));
        let _ = match aged {
            Ok((true, true)) => fs::remove_dir_all(entry.path()),
            Ok((false, true)) => fs::remove_file(entry.path()),
            _ => Ok(()),
        };
    }
}

fn user() -> u32 {
    // SAFETY: getuid has no preconditions and cannot fail.
    unsafe { libc::getuid() }
}

/// Where compiled kernels are kept: `FORNAX_MSL_CACHE`, else the user's cache folder. No shared folder, since what lies there
/// is loaded and run.
fn folder() -> PathBuf {
    let named = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = || named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|h| h.join(".cache")));
    named("FORNAX_MSL_CACHE")
        .or_else(|| cache().map(|c| c.join("fornax-msl")))
        .unwrap_or_else(|| std::env::temp_dir().join(format!("fornax-msl-{}", user())))
}
