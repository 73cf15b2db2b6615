//! Starting the binary in an environment of its own, and folders that go away.
//! Knows no command.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A fresh folder, removed with its contents.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary with a cache of its own, no network, no colours of the caller and no stdin.
pub(crate) fn fornax(home: &Folder) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fornax"));
    for name in ["HF_TOKEN", "FORNAX_CPU_ISA", "COLUMNS", "LC_ALL", "LANG"] {
        command.env_remove(name);
    }
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"]
    {
        command.env_remove(name);
    }
    command
        .env("FORNAX_HOME", home.path())
        .env("HF_HOME", home.path())
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a run left.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn ok(self) -> Ran {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn fails(self, code: i32) -> Ran {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.stderr.is_empty(), "a failure without a word");
        self
    }
}

pub(crate) fn ran(command: &mut Command) -> Ran {
    seen(command.output().unwrap())
}

/// With `input` on stdin.
pub(crate) fn ran_with(command: &mut Command, input: &[u8]) -> Ran {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    // The child may end without reading.
    let _ = child.stdin.take().unwrap().write_all(input);
    finish(child)
}

pub(crate) fn finish(child: Child) -> Ran {
    seen(child.wait_with_output().unwrap())
}

fn seen(output: Output) -> Ran {
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("stdout is text"),
        stderr: String::from_utf8(output.stderr).expect("stderr is text"),
    }
}

/// A tiny model of the project's test data.
#[track_caller]
pub(crate) fn model(name: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/models")
        .join(name)
        .join("model.gguf");
    assert!(file.is_file(), "{} is not there", file.display());
    file
}
