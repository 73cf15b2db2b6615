//! `fornax serve` as a process, and the two benchmarks that drive an engine: one inside the process, one over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::generate::with_template;
use crate::program::{Folder, fornax, model, ran};

const PATIENCE: Duration = Duration::from_secs(60);

/// A server and what it says on stderr, line by line.
struct Server {
    child: Child,
    lines: Receiver<String>,
    address: String,
}

impl Server {
    /// A server on a free port, with these flags.
    fn on_the_cpu(home: &Folder, flags: &[&str]) -> Server {
        let mut command = fornax(home);
        command.args(["serve", "--port", "0", "--device", "cpu"]).args(flags);
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (send, lines) = channel();
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|l| send.send(l)));
        let mut server = Server { child, lines, address: String::new() };
        let line = server.line("listening on http://");
        server.address = line.split("http://").nth(1).unwrap().to_owned();
        server
    }

    /// The next line that has this in it.
    fn line(&self, part: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).expect("a line in time");
            if line.contains(part) {
                return line;
            }
        }
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Asks it to end, as a service manager does.
    fn end(mut self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn chat(body: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: mine-7\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[test]
fn a_server_answers_logs_and_ends_when_it_is_asked_to() {
    let home = Folder::new();
    let file = with_template(&home).display().to_string();
    let (one, two) = (format!("one={file}"), format!("two={file}"));
    let server = Server::on_the_cpu(
        &home,
        &["--ctx", "256", "--log-format", "json", "-m", &one, "-m", &two],
    );
    let body =
        r#"{"model": "two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}"#;
    let answer = server.ask(&chat(body));
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("x-request-id: mine-7"),
        "{answer}"
    );
    let entry: Value = serde_json::from_str(&server.line("fornax::access")).unwrap();
    assert_eq!((&entry["id"], &entry["status"]), (&"mine-7".into(), &200.into()), "{entry}");
    assert_eq!((&entry["model"], &entry["generated"]), (&"two".into(), &3.into()), "{entry}");
    let models =
        server.ask("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert!(models.contains("\"one\"") && models.contains("\"two\""), "{models}");
    server.end();
}

#[test]
fn a_load_over_http_is_measured_with_a_long_prompt_beside_it() {
    let home = Folder::new();
    let file = with_template(&home).display().to_string();
    let server = Server::on_the_cpu(&home, &["--ctx", "8192", "--max-running", "4", "-m", &file]);
    let bench = |more: &[&str]| {
        let url = format!("http://{}", server.address);
        let mut command = fornax(&home);
        command.args(["bench", "--json", "--serve", &url]).args(more);
        serde_json::from_str::<Value>(&ran(&mut command).ok().stdout).unwrap()
    };
    let plain = bench(&["-p", "40", "-n", "8", "--requests", "6", "--rate", "200"]);
    assert_eq!((&plain["requests"], &plain["answered"]), (&6.into(), &6.into()), "{plain}");
    assert!(plain["ttft_s"]["p50"].as_f64().unwrap() > 0.0, "{plain}");
    // Whether the others are still there then hangs on what such a small model says, and how soon.
    let mixed = bench(&["-p", "40", "-n", "3000", "--requests", "3", "--mixed", "400"]);
    let long = &mixed["long"];
    assert_eq!(mixed["answered"], 3, "{mixed}");
    assert!(long["prompt_tokens"].as_u64().unwrap() >= 400, "{mixed}");
    assert!(long["ttft_s"].as_f64().unwrap() > 0.0 && long["outlasted_by"].is_u64(), "{mixed}");
    server.end();
}

#[test]
fn a_load_is_replayed_and_says_what_came_of_it() {
    let home = Folder::new();
    let trace = home.join("load.jsonl");
    let lines: String = (0..6)
        .map(|i| {
            format!(
                "{{\"prompt_len\": {}, \"gen_len\": {}, \"arrival_step\": {}}}\n",
                5 + 9 * i,
                3 + i,
                2 * i
            )
        })
        .collect();
    std::fs::write(&trace, lines).unwrap();
    let bench = |more: &[&str]| {
        let mut command = fornax(&home);
        command
            .args(["bench", "--json", "--device", "cpu", "-r", "1", "-m"])
            .arg(model("llama3-q8_0"));
        serde_json::from_str::<Value>(&ran(command.args(more)).ok().stdout).unwrap()
    };
    let replayed = bench(&["--batch", "2", "--trace", trace.to_str().unwrap()]);
    let run = &replayed["runs"][0];
    assert_eq!((&run["requests"], &run["generated_tokens"]), (&6.into(), &33.into()), "{replayed}");
    let sizes = bench(&["--batch", "1,4", "-p", "20", "-n", "6"]);
    assert_eq!(sizes["same"], true, "{sizes}");
    for run in sizes["runs"].as_array().unwrap() {
        for field in [
            "total_tok_s",
            "request_tok_s",
            "ms_per_step",
            "ttft_p50_ms",
            "prefix_hits",
            "kv_blocks_peak",
        ] {
            assert!(run[field].is_number(), "{field}: {run}");
        }
        assert_eq!(run["checksum"].as_str().map(str::len), Some(16), "{run}");
    }
}
