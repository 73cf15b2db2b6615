//! NVRTC, NVIDIA's run-time compiler, found and loaded at run time, and the machine code that it made before. It knows
//! no kernel's meaning.
//!
//! Machine code is kept by a hash of source, headers, options and architecture: in memory, and in the folder that
//! `FORNAX_CUBINS` names (else under the user's cache folder), which can be carried to a machine without a compiler.
//!
//! It is loaded here and not through `cudarc`, whose loader knows no folders and panics where the
//! library is missing. Interface: NVRTC User Guide, release 13.0.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use fornax_gguf::TensorType;
use fornax_plan::{Error, Result};
use libloading::Library;

use crate::kernels::{self, Family};

type Program = *mut std::ffi::c_void;

/// The loaded compiler, or what stands for it where there is none: code that was compiled before.
#[derive(Debug)]
pub struct Compiler {
    /// Or why there is none.
    nvrtc: std::result::Result<Nvrtc, String>,
    folder: Option<PathBuf>,
    /// Replaces sources and headers by the files of a folder, for trying variants.
    sources: Option<PathBuf>,
    made: Mutex<HashMap<String, Arc<Vec<u8>>>>,
}

#[derive(Debug)]
struct Nvrtc {
    library: Library,
    /// Where its built-in functions come from; kept loaded as long as it is.
    _builtins: Option<Library>,
    version: (i32, i32),
}

/// Machine code of one family.
#[derive(Clone, Debug)]
pub struct Code {
    /// The image that the driver loads.
    pub cubin: Arc<Vec<u8>>,
}

impl Compiler {
    /// Finds the compiler; without one, only what was compiled before can be had.
    ///
    /// # Errors
    /// `is_unsupported` where there is neither a compiler nor a folder of machine code.
    pub fn load() -> Result<Compiler> {
        let folder = cache_folder();
        let nvrtc = Nvrtc::load().map_err(|e| e.to_string());
        let carried = folder.as_ref().is_some_and(|f| f.is_dir());
        match nvrtc {
            Err(e) if !carried => Err(Error::unsupported(e)),
            nvrtc => {
                let sources = std::env::var_os("FORNAX_KERNELS").map(PathBuf::from);
                Ok(Compiler { nvrtc, folder, sources, made: Mutex::default() })
            }
        }
    }

    /// For the stand-in, which has a compiler of its own.
    #[cfg(test)]
    pub(crate) fn none() -> Compiler {
        let nvrtc = Err("there is no compiler".to_string());
        Compiler { nvrtc, folder: None, sources: None, made: Mutex::default() }
    }

    /// The compiler's release; 0 where there is none.
    pub fn version(&self) -> (i32, i32) {
        self.nvrtc.as_ref().map_or((0, 0), |n| n.version)
    }

    /// Compiles a family for an architecture (90 for sm_90) with entries for these formats; every
    /// format where none are given, or where that was compiled before: what is carried to a
    /// machine without a compiler serves any model.
    ///
    /// # Errors
    /// `is_malformed` with the compiler's log, or naming an entry that the code lacks.
    pub fn compile(&self, family: &Family, types: &[TensorType], arch: u32) -> Result<Code> {
        #[cfg(test)]
        if arch == 0 {
            return Compiler::for_the_cpu(family);
        }
        let name = format!("{}.cu", family.name);
        let every = kernels::WEIGHT_TYPES;
        let whole = types.is_empty() || self.has(&name, &family.source_for(every), arch);
        let types = if whole { every } else { types };
        let cubin = self.cubin(&name, &family.source_for(types), arch)?;
        for entry in family.entries_for(types) {
            let section = format!(".text.{entry}\0");
            if !cubin.windows(section.len()).any(|w| w == section.as_bytes()) {
                let what = format!("cuda: {name}, compiled for sm_{arch}, has no entry {entry}");
                return Err(Error::malformed(what));
            }
        }
        Ok(Code { cubin })
    }

    /// A family for the stand-in: with entries for every format, so that it is compiled once for all tests.
    #[cfg(test)]
    fn for_the_cpu(family: &Family) -> Result<Code> {
        let types = kernels::WEIGHT_TYPES;
        let (source, entries) = (family.source_for(types), family.entries_for(types));
        let code = crate::driver::host::compile(family.name, &source, &entries)?;
        Ok(Code { cubin: Arc::new(code) })
    }

    /// Whether the machine code of a source is at hand.
    fn has(&self, name: &str, source: &str, arch: u32) -> bool {
        let (source, headers) = self.read(name, source);
        let key = key(name, &source, &headers, arch);
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.contains_key(&key) || self.folder.as_ref().is_some_and(|f| f.join(&key).is_file())
    }

    /// The source and the headers, or what stands for them.
    fn read(&self, name: &str, source: &str) -> (String, Vec<(String, String)>) {
        let mut headers = headers();
        let mut source = source.to_string();
        if let Some(folder) = &self.sources {
            for (name, text) in &mut headers {
                let file = name.rsplit('/').next().unwrap_or(name);
                if let Ok(found) = std::fs::read_to_string(folder.join(file)) {
                    *text = found;
                }
            }
            if let Ok(found) = std::fs::read_to_string(folder.join(name)) {
                let head = source.find("#line 1\n").map_or(0, |at| at + 8);
                source.replace_range(head.., &found);
            }
            if let Ok(found) = std::fs::read_to_string(folder.join("defines")) {
                source.insert_str(0, &found);
            }
        }
        let headers = reached(&source, headers);
        (source, headers)
    }

    /// Where code is kept, and what is learnt of it.
    pub(crate) fn folder(&self) -> Option<&Path> {
        // What is learnt of variants is nothing about the kernels.
        self.folder.as_deref().filter(|_| self.sources.is_none())
    }

    /// Machine code of a source.
    ///
    /// # Errors
    /// `is_malformed` with the compiler's log, `is_unsupported` where there is no compiler and the code is not at hand.
    pub(crate) fn cubin(&self, name: &str, source: &str, arch: u32) -> Result<Arc<Vec<u8>>> {
        let (source, headers) = self.read(name, source);
        let key = key(name, &source, &headers, arch);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = made.get(&key) {
            return Ok(Arc::clone(code));
        }
        let file = self.folder.as_ref().map(|f| f.join(&key));
        let kept = file.as_ref().and_then(|f| std::fs::read(f).ok());
        let code = match (kept, &self.nvrtc) {
            (Some(code), _) => code,
            (None, Ok(nvrtc)) => {
                let code = nvrtc.cubin(name, &source, &headers, arch)?;
                if let Some(file) = &file {
                    keep(file, &code);
                }
                code
            }
            (None, Err(e)) => return Err(Error::unsupported(e.clone())),
        };
        let code = Arc::new(code);
        made.insert(key, Arc::clone(&code));
        Ok(code)
    }
}

/// All headers.
fn headers() -> Vec<(String, String)> {
    kernels::HEADERS.iter().map(|(n, t)| (n.to_string(), t.to_string())).collect()
}

/// Where machine code is kept.
fn cache_folder() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    named("FORNAX_CUBINS").or_else(|| {
        let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
        Some(cache.join("fornax").join("cubins"))
    })
}

/// The headers that a source includes, and those that they include: code does not depend on others.
fn reached(source: &str, headers: Vec<(String, String)>) -> Vec<(String, String)> {
    let mut names: Vec<&str> = included(source).collect();
    let mut at = 0;
    while let Some(name) = names.get(at).copied() {
        let text = headers.iter().find(|h| h.0 == name).map_or("", |h| h.1.as_str());
        let more: Vec<&str> = included(text).filter(|n| !names.contains(n)).collect();
        names.extend(more);
        at += 1;
    }
    let reached: Vec<bool> = headers.iter().map(|h| names.contains(&h.0.as_str())).collect();
    headers.into_iter().zip(reached).filter(|(_, r)| *r).map(|(h, _)| h).collect()
}

fn included(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next())
}

/// Writes beside the place and renames, so that nobody reads half a file. A cache that cannot be written is none.
pub(crate) fn keep(file: &Path, code: &[u8]) {
    let Some(folder) = file.parent() else { return };
    let beside = file.with_extension(format!("{}", std::process::id()));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&beside, code));
    if written.and_then(|()| std::fs::rename(&beside, file)).is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

/// The name under which code is kept.
fn key(name: &str, source: &str, headers: &[(String, String)], arch: u32) -> String {
    let hash = |salt: u64| {
        let mut h = DefaultHasher::new();
        (salt, env!("CARGO_PKG_VERSION"), source, headers).hash(&mut h);
        h.finish()
    };
    let stem = name.trim_end_matches(".cu");
    format!("{stem}-{:016x}{:016x}.sm_{arch}.cubin", hash(1), hash(2))
}

impl Nvrtc {
    /// Finds and loads the library: in the folder that `FORNAX_NVRTC` names, where the system
    /// looks for libraries, and where toolkits and their Python packages put it.
    ///
    /// # Errors
    /// `is_unsupported`, naming what was looked for and how to get it.
    fn load() -> Result<Nvrtc> {
        let asked = std::env::var_os("FORNAX_NVRTC").map(PathBuf::from);
        for folder in asked.iter().flat_map(|f| [f.clone(), f.join("nvidia/cu13/lib")]) {
            if let Some(found) = Nvrtc::in_folder(&folder) {
                return Ok(found);
            }
        }
        for name in NAMES {
            // SAFETY: loading NVRTC runs its initialisers, which have no conditions.
            if let Ok(library) = unsafe { Library::new(*name) }
                && let Some(found) = Nvrtc::from(library, None)
            {
                return Ok(found);
            }
        }
        let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
        let usual = ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-13.0", "/opt/cuda"];
        let homes = homes.map(PathBuf::from).chain(usual.iter().map(PathBuf::from));
        for folder in homes.flat_map(|h| [h.join("lib64"), h.join("lib"), h.join("bin")]) {
            if let Some(found) = Nvrtc::in_folder(&folder) {
                return Ok(found);
            }
        }
        Err(Error::unsupported(format!(
            "cuda: the kernel compiler NVRTC was not found (looked for {} on the library path and \
             under /usr/local/cuda); install CUDA's run-time compiler (`pip install \
             nvidia-cuda-nvrtc`) and name its folder in FORNAX_NVRTC, or use --device cpu",
            NAMES.join(", ")
        )))
    }

    fn in_folder(folder: &Path) -> Option<Nvrtc> {
        let entries = std::fs::read_dir(folder).ok()?;
        let mut names: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        names.sort();
        let named = |part: &str| {
            let has = |p: &&PathBuf| {
                let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
                name.is_some_and(|n| n.starts_with(part) && !n.contains(".alt."))
            };
            names.iter().find(has)
        };
        // The compiler looks for its built-in functions on the library path alone; once loaded,
        // they are found by name.
        let builtins = named("libnvrtc-builtins.so").or_else(|| named("nvrtc-builtins"));
        let library = named("libnvrtc.so").or_else(|| named("nvrtc64"))?;
        // SAFETY: as above.
        let builtins = builtins.and_then(|p| unsafe { Library::new(p) }.ok());
        // SAFETY: as above.
        let library = unsafe { Library::new(library) }.ok()?;
        Nvrtc::from(library, builtins)
    }

    fn from(library: Library, builtins: Option<Library>) -> Option<Nvrtc> {
        let (mut major, mut minor) = (0, 0);
        {
            // SAFETY: the signature is that of the interface.
            let version = unsafe {
                library
                    .get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0")
            };
            // SAFETY: both pointers are valid for the call.
            let status = unsafe { version.ok()?(&raw mut major, &raw mut minor) };
            if status != 0 {
                return None;
            }
        }
        Some(Nvrtc { library, _builtins: builtins, version: (major, minor) })
    }

    fn cubin(
        &self,
        name: &str,
        source: &str,
        headers: &[(String, String)],
        arch: u32,
    ) -> Result<Vec<u8>> {
        let text =
            |s: &str| CString::new(s).map_err(|_| Error::malformed("cuda: a NUL in a source"));
        let (c_name, c_source) = (text(name)?, text(source)?);
        let bodies: Vec<CString> = headers.iter().map(|h| text(&h.1)).collect::<Result<_>>()?;
        let names: Vec<CString> = headers.iter().map(|h| text(&h.0)).collect::<Result<_>>()?;
        let pointers = |all: &[CString]| all.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (bodies_at, names_at) = (pointers(&bodies), pointers(&names));
        let create = self.symbol::<CreateProgram>(b"nvrtcCreateProgram\0")?;
        let mut program: Program = ptr::null_mut();
        // SAFETY: every pointer is to NUL-terminated text that outlives the program.
        let status = unsafe {
            create(
                &raw mut program,
                c_source.as_ptr(),
                c_name.as_ptr(),
                bodies_at.len() as c_int,
                bodies_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        self.checked(status, name, "taking the source")?;
        let result = self.compile_program(program, name, arch);
        let destroy = self.symbol::<OnProgramRef>(b"nvrtcDestroyProgram\0")?;
        // SAFETY: created above, destroyed once.
        unsafe { destroy(&raw mut program) };
        result
    }

    fn compile_program(&self, program: Program, name: &str, arch: u32) -> Result<Vec<u8>> {
        // The warpgroup products are instructions of this architecture's own form alone.
        let own = if arch == 90 { "a" } else { "" };
        let options = [format!("--gpu-architecture=sm_{arch}{own}"), "--std=c++17".to_string()];
        let options: Vec<CString> =
            options.into_iter().filter_map(|o| CString::new(o).ok()).collect();
        let at: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let compile = self.symbol::<CompileProgram>(b"nvrtcCompileProgram\0")?;
        // SAFETY: the program is alive, the options are NUL-terminated.
        let status = unsafe { compile(program, at.len() as c_int, at.as_ptr()) };
        if status != 0 {
            let log = self.text(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches(['\0', '\n']);
            let why = self.explain(status);
            let what = format!("cuda: compiling {name} for sm_{arch}: {why}\n{log}");
            return Err(Error::malformed(what));
        }
        self.text(program, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
    }

    fn text(&self, program: Program, size: &[u8], get: &[u8]) -> Result<Vec<u8>> {
        let size_of = self.symbol::<SizeOf>(size)?;
        let mut len = 0usize;
        // SAFETY: the program is alive.
        let status = unsafe { size_of(program, &raw mut len) };
        self.checked(status, "a program", "asking for a size")?;
        let mut bytes = vec![0u8; len];
        let get = self.symbol::<Get>(get)?;
        // SAFETY: the compiler writes as many bytes as it has said.
        let status = unsafe { get(program, bytes.as_mut_ptr().cast()) };
        self.checked(status, "a program", "reading its result")?;
        Ok(bytes)
    }

    fn symbol<T>(&self, name: &[u8]) -> Result<libloading::Symbol<'_, T>> {
        // SAFETY: the caller names the type that the interface gives this function.
        unsafe { self.library.get(name) }.map_err(|e| {
            let name = String::from_utf8_lossy(&name[..name.len() - 1]).into_owned();
            Error::unsupported(format!("cuda: NVRTC has no {name}: {e}; a newer release is needed"))
        })
    }

    fn checked(&self, status: c_int, what: &str, doing: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let why = self.explain(status);
        Err(Error::malformed(format!("cuda: compiling {what}: {doing}: {why}")))
    }

    fn explain(&self, status: c_int) -> String {
        match self.symbol::<unsafe extern "C" fn(c_int) -> *const c_char>(b"nvrtcGetErrorString\0")
        {
            // SAFETY: the function returns static text for every number.
            Ok(f) => unsafe { CStr::from_ptr(f(status)) }.to_string_lossy().into_owned(),
            Err(_) => format!("status {status}"),
        }
    }
}

type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type CompileProgram = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type OnProgramRef = unsafe extern "C" fn(*mut Program) -> c_int;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

#[cfg(windows)]
const NAMES: &[&str] = &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
#[cfg(not(windows))]
const NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_depends_on_the_headers_that_its_source_reaches() {
        let header = |name: &str, text: &str| (name.to_string(), text.to_string());
        let all = vec![
            header("a.cuh", "#pragma once\n#include \"b.cuh\"\nint a;"),
            header("b.cuh", "int b;"),
            header("c.cuh", "#include \"a.cuh\""),
        ];
        let names = |source: &str| {
            reached(source, all.clone()).into_iter().map(|h| h.0).collect::<Vec<_>>()
        };
        assert_eq!(names("#include \"a.cuh\"\nint x;"), ["a.cuh", "b.cuh"]);
        assert_eq!(names("int x;"), Vec::<String>::new());
        for (name, source) in crate::kernels::sources() {
            let found = reached(source, headers());
            let missing: Vec<&str> = included(source)
                .chain(found.iter().flat_map(|h| included(&h.1)))
                .filter(|n| !found.iter().any(|h| h.0 == *n))
                .collect();
            assert_eq!(missing, Vec::<&str>::new(), "{name}");
        }
    }
}
