//! Libraries of kernels and pipelines: what a source declares, and one kernel with its function constants set. It knows no
//! memory and runs nothing.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;
use crate::compiler::Compiler;
use crate::ffi::{ConstantDesc, KernelDesc, Runtime, Table};
use crate::glue;
use crate::prepare::{self, BarrierSite, Prepared};
use crate::rewrite::Target;

/// Where the host puts what an argument points at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// `device`: a buffer.
    Device,
    /// `constant`: a buffer, or bytes that travel with the dispatch.
    Constant,
    /// `threadgroup`: a length in bytes.
    Threadgroup,
}

/// An argument that the host binds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Argument {
    /// The parameter's name.
    pub name: String,
    /// The index in its table: buffers and threadgroup memory have one each.
    pub index: u32,
    /// The address space.
    pub space: Space,
    /// True if the kernel may only read through it.
    pub read_only: bool,
    /// True for a reference (`constant Params&`), false for a pointer.
    pub reference: bool,
    /// The type as the source spells it, the pointer's mark included.
    pub type_text: String,
    /// The size in bytes of what it points at.
    pub size: usize,
    /// The alignment in bytes that it needs.
    pub align: usize,
    /// The function constant (its index) that must be true for the argument to exist.
    pub needs: Option<u32>,
}

/// A function constant that a kernel uses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionConstant {
    /// The name in the source.
    pub name: String,
    /// The index that the host sets it by.
    pub index: u32,
    /// False if the source asks whether it is defined, so that it may be left out.
    pub required: bool,
}

/// A kernel of a library.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KernelInfo {
    /// The name that the host asks for.
    pub name: String,
    /// What the host binds, in the order of the parameters.
    pub arguments: Vec<Argument>,
    /// The function constants that it uses, itself or through functions that it calls.
    pub constants: Vec<FunctionConstant>,
    /// The most threads that a threadgroup may have.
    pub max_threads: u32,
}

/// A value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// `bool`
    Bool(bool),
    /// `short`
    Short(i16),
    /// `ushort`
    Ushort(u16),
    /// `int`
    Int(i32),
    /// `uint`
    Uint(u32),
    /// `float`
    Float(f32),
}

impl Value {
    /// The kind and size that the table of function constants gives the type, and the bytes.
    fn parts(self) -> (u32, Vec<u8>) {
        match self {
            Value::Bool(v) => (0, vec![u8::from(v)]),
            Value::Short(v) => (1, v.to_ne_bytes().to_vec()),
            Value::Ushort(v) => (2, v.to_ne_bytes().to_vec()),
            Value::Int(v) => (1, v.to_ne_bytes().to_vec()),
            Value::Uint(v) => (2, v.to_ne_bytes().to_vec()),
            Value::Float(v) => (4, v.to_ne_bytes().to_vec()),
        }
    }
}

/// How to compile.
#[derive(Clone, Debug, Default)]
pub struct CompileOptions {
    /// Preprocessor definitions: names and values.
    pub defines: Vec<(String, String)>,
    /// Leave out the checks of each access: several times as fast, no reports of what kernels access, no counts. Alignment is
    /// checked all the same.
    pub unchecked: bool,
}

/// Compiled kernels. Cloning gives another handle.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

/// A barrier of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierId {
    library: u64,
    index: usize,
}

static LOADED: AtomicU64 = AtomicU64::new(0);

struct Loaded {
    id: u64,
    kernels: Vec<KernelInfo>,
    barriers: Vec<BarrierSite>,
    /// In the loaded library, as long as it is loaded.
    table: *const Table,
    path: PathBuf,
    checked: bool,
    /// Keeps the code in the process.
    _code: libloading::os::unix::Library,
}

// SAFETY: the table is written once, before the library is shared; the function constants that it points at are written only
// under the lock of the run-time library.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.kernels.iter().map(|k| &k.name)).finish()
    }
}

impl Library {
    /// Compiles source parts, in their order, as one source; each part keeps its own name and lines in messages.
    ///
    /// # Errors
    /// `is_compile` with the compiler's message, lines being those of the parts; `is_host` when there is no compiler.
    pub fn compile(sources: &[(&str, &str)]) -> Result<Library, Error> {
        Library::compile_with(sources, &CompileOptions::default())
    }

    /// As [`Library::compile`], with options.
    ///
    /// # Errors
    /// As there.
    pub fn compile_with(
        sources: &[(&str, &str)],
        options: &CompileOptions,
    ) -> Result<Library, Error> {
        let compiler = Compiler::get()?;
        Runtime::load()?;
        let text = compiler.preprocess(&joined(sources), &options.defines)?;
        let prepared = prepare::prepare(&text, Target::Emulator)?;
        let path = compiler.kernels(&glue::complete(&prepared)?, !options.unchecked)?;
        Library::load(path, prepared, !options.unchecked)
    }

    fn load(path: PathBuf, prepared: Prepared, checked: bool) -> Result<Library, Error> {
        let failed =
            |e: libloading::Error| Error::host(format!("loading the compiled kernels: {e}"));
        // SAFETY: the library was compiled from the prepared source; what it runs when loaded computes constants.
        let code = unsafe { libloading::os::unix::Library::new(&path) }.map_err(failed)?;
        // SAFETY: the glue gives the symbol this type, and the call has no preconditions.
        let table = unsafe {
            let entry = code.get::<unsafe extern "C" fn() -> *const Table>(b"msl_table\0");
            entry.map_err(failed)?()
        };
        let reach = Reach::new(&prepared);
        // SAFETY: the table and its arrays live as long as the loaded code and hold as many entries as they say.
        let kernels = unsafe {
            let t = &*table;
            let constants = entries(t.constants, t.nconstants);
            let all = entries(t.kernels, t.nkernels).iter().zip(&prepared.kernels);
            all.map(|(k, p)| describe(k, constants, &reach.words(&p.function), &prepared))
                .collect::<Result<Vec<KernelInfo>, Error>>()?
        };
        let barriers = prepared.barriers;
        let id = LOADED.fetch_add(1, Ordering::Relaxed);
        Ok(Library(Arc::new(Loaded { id, kernels, barriers, table, path, checked, _code: code })))
    }

    /// The kernels, in the order of the source.
    pub fn kernels(&self) -> &[KernelInfo] {
        &self.0.kernels
    }

    /// The barriers in the source.
    pub fn barriers(&self) -> &[BarrierSite] {
        &self.0.barriers
    }

    /// What [`crate::Options`] disables the barrier by that is at `index` in [`Library::barriers`].
    pub fn barrier_id(&self, index: usize) -> BarrierId {
        BarrierId { library: self.0.id, index }
    }

    /// The place of a barrier in this library's list, if it is one of its own.
    pub(crate) fn index_of(&self, barrier: BarrierId) -> Option<usize> {
        (barrier.library == self.0.id).then_some(barrier.index)
    }

    /// A kernel with its function constants set, given by their indices.
    ///
    /// # Errors
    /// `is_arguments` when there is no such kernel or constant, a type is wrong or a constant is missing.
    pub fn pipeline(&self, name: &str, constants: &[(u32, Value)]) -> Result<Pipeline, Error> {
        let found = self.0.kernels.iter().position(|k| k.name == name);
        let kernel = found.ok_or_else(|| {
            Error::arguments(format!("the kernel library has no function '{name}'"))
        })?;
        let info = &self.0.kernels[kernel];
        let table = self.constant_table();
        let mut values = Vec::new();
        for &(index, value) in constants {
            let at = table.iter().position(|c| c.id == index).ok_or_else(|| {
                Error::arguments(format!("kernel {name}: there is no function constant {index}"))
            })?;
            let (kind, bytes) = value.parts();
            if (table[at].kind, table[at].size as usize) != (kind, bytes.len()) {
                return Err(Error::arguments(format!(
                    "kernel {name}: function constant {index} is of another type than {value:?}"
                )));
            }
            values.push((at, bytes));
        }
        let missing = info
            .constants
            .iter()
            .find(|c| c.required && !constants.iter().any(|&(index, _)| index == c.index));
        if let Some(c) = missing {
            return Err(Error::arguments(format!(
                "kernel {name}: function constant {} ('{}') is not set",
                c.index, c.name
            )));
        }
        let is_true = |i: u32| constants.contains(&(i, Value::Bool(true)));
        let present = |a: &&Argument| a.needs.is_none_or(is_true);
        let arguments = info.arguments.iter().filter(present).cloned().collect();
        Ok(Pipeline { library: self.clone(), kernel, values: values.into(), arguments })
    }

    pub(crate) fn constant_table(&self) -> &[ConstantDesc] {
        // SAFETY: the table lives as long as the library, and holds as many entries as it says.
        unsafe { entries((*self.0.table).constants, (*self.0.table).nconstants) }
    }

    pub(crate) fn table(&self) -> &Table {
        // SAFETY: as above.
        unsafe { &*self.0.table }
    }

    pub(crate) fn path(&self) -> &PathBuf {
        &self.0.path
    }

    pub(crate) fn is_checked(&self) -> bool {
        self.0.checked
    }
}

/// The parts as one source, with markers that keep their names and lines.
pub(crate) fn joined(sources: &[(&str, &str)]) -> String {
    let mut whole = String::new();
    for (name, text) in sources {
        let name = name.replace(['"', '\\', '\n'], "_");
        whole.push_str(&format!("#line 1 \"{name}\"\n{text}\n"));
    }
    whole
}

/// One kernel, ready to be dispatched.
#[derive(Clone, Debug)]
pub struct Pipeline {
    library: Library,
    kernel: usize,
    /// Places in the table of function constants, and the bytes that go there.
    values: Arc<[(usize, Vec<u8>)]>,
    arguments: Arc<[Argument]>,
}

impl Pipeline {
    /// The kernel.
    pub fn info(&self) -> &KernelInfo {
        &self.library.0.kernels[self.kernel]
    }

    /// The arguments that exist with these function constants.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// The library that it comes from.
    pub fn library(&self) -> &Library {
        &self.library
    }

    pub(crate) fn desc(&self) -> &KernelDesc {
        let table = self.library.table();
        // SAFETY: the index is one of the kernels that the table lists.
        unsafe { &*table.kernels.add(self.kernel) }
    }

    /// Puts the function constants in place.
    ///
    /// # Safety
    /// The caller holds the lock of the run-time library: no kernel runs.
    pub(crate) unsafe fn specialise(&self) {
        // SAFETY: each constant has room for a value of its size, and nothing else accesses it now.
        unsafe {
            for c in self.library.constant_table() {
                c.value.write_bytes(0, c.size as usize);
                *c.defined = false;
            }
            for (at, bytes) in self.values.iter() {
                let c = &self.library.constant_table()[*at];
                c.value.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                *c.defined = true;
            }
            if let Some(derive) = self.library.table().derive {
                derive();
            }
        }
    }
}

/// # Safety
/// `first` points at `n` entries that live for `'a`.
unsafe fn entries<'a, T>(first: *const T, n: u64) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, n as usize) }
}

/// # Safety
/// `text` is a terminated string.
unsafe fn owned(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// # Safety
/// The descriptions hold what cpp/runtime.h says.
unsafe fn describe(
    k: &KernelDesc,
    constants: &[ConstantDesc],
    used: &HashSet<String>,
    prepared: &Prepared,
) -> Result<KernelInfo, Error> {
    // SAFETY: the caller's promise.
    let (name, args) = unsafe { (owned(k.name), entries(k.args, u64::from(k.nargs))) };
    let mut arguments = Vec::new();
    for a in args {
        let space = match (a.source, a.flags & 8 != 0) {
            (0, true) => Space::Constant,
            (0, false) => Space::Device,
            (1, _) => Space::Threadgroup,
            _ => continue,
        };
        // SAFETY: as above.
        let (argument, type_text) = unsafe { (owned(a.name), owned(a.type_text)) };
        if a.index as usize >= crate::ffi::SLOTS || a.flags & 3 == 0 {
            return Err(Error::compile(format!(
                "kernel {name}: argument '{argument}' at index {} has to be a pointer or reference at an index below {}",
                a.index,
                crate::ffi::SLOTS
            )));
        }
        if arguments.iter().any(|o: &Argument| {
            o.index == a.index
                && (o.space == Space::Threadgroup) == (space == Space::Threadgroup)
                && o.needs.is_none()
                && a.needs < 0
        }) {
            return Err(Error::compile(format!("kernel {name}: two arguments at {}", a.index)));
        }
        arguments.push(Argument {
            name: argument,
            index: a.index,
            space,
            read_only: a.flags & 4 != 0,
            reference: a.flags & 2 != 0,
            type_text,
            size: a.size as usize,
            align: a.align as usize,
            needs: u32::try_from(a.needs).ok(),
        });
    }
    let constants = constants.iter().filter_map(|c| {
        // SAFETY: as above.
        let name = unsafe { owned(c.name) };
        let needed = arguments.iter().any(|a| a.needs == Some(c.id));
        let required = !prepared.questioned.contains(&name);
        (needed || used.contains(&name)).then_some(FunctionConstant { name, index: c.id, required })
    });
    let max_threads = if k.max_threads == 0 { 1024 } else { k.max_threads };
    Ok(KernelInfo { name, constants: constants.collect(), arguments, max_threads })
}

/// Which words a function's text reaches, through the functions that it names.
struct Reach<'a>(HashMap<&'a str, &'a HashSet<String>>);

impl<'a> Reach<'a> {
    fn new(prepared: &'a Prepared) -> Reach<'a> {
        Reach(prepared.words.iter().map(|(name, words)| (name.as_str(), words)).collect())
    }

    fn words(&self, function: &str) -> HashSet<String> {
        let mut seen = HashSet::new();
        let name = function.split('<').next().unwrap_or(function).trim().to_owned();
        let mut queue = vec![name];
        // A kernel's template arguments may name functions too.
        queue.extend(function.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned));
        while let Some(word) = queue.pop() {
            if !seen.insert(word.clone()) {
                continue;
            }
            queue.extend(self.0.get(word.as_str()).into_iter().flat_map(|w| w.iter().cloned()));
        }
        seen
    }
}
