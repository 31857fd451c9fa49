//! The real binary, and the example receiver, as processes.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "every test crate has its own copy and uses its own part of it"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of tests fails by panicking"
)]

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The longest that a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process whose lines are read as they come.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    /// Every line of stderr that was taken from there.
    told: RefCell<Vec<String>>,
}

impl Process {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = follow(child.stdout.take().unwrap());
        let stderr = follow(child.stderr.take().unwrap());
        Self { child, stdout, stderr, told: RefCell::default() }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line on stdout.
    pub fn line(&self) -> String {
        self.stdout
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("no line on stdout; stderr: {:?}", self.log()))
    }

    /// What is on stdout by now, or until its end once the process has ended.
    pub fn rest(&self) -> Vec<String> {
        self.stdout.iter().collect()
    }

    /// The first line on stderr that holds `text`.
    pub fn logged(&self, text: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.stderr.recv_timeout(PATIENCE).inspect(|line| self.told.borrow_mut().push(line.clone()))
            {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => before.push(line),
                Err(_) => panic!("{text:?} is never logged, but: {before:#?}"),
            }
        }
    }

    /// What is on stderr by now.
    pub fn log(&self) -> Vec<String> {
        let lines: Vec<String> = self.stderr.try_iter().collect();
        self.told.borrow_mut().extend(lines.iter().cloned());
        lines
    }

    /// Everything on stderr up to now, what was waited for or asked for before included.
    pub fn told(&self) -> Vec<String> {
        self.log();
        self.told.borrow().clone()
    }

    /// Everything on stderr up to its end. Once the process has ended.
    pub fn told_in_all(&self) -> Vec<String> {
        self.told.borrow_mut().extend(self.stderr.iter());
        self.told.borrow().clone()
    }

    /// Ends it as a supervisor does.
    pub fn terminate(&self) {
        let sent = Command::new("kill").arg("-TERM").arg(self.child.id().to_string()).status().unwrap();
        assert!(sent.success());
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn follow(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver): (Sender<String>, _) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The sidecar's binary.
pub fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_aep-sidecar"))
}

/// The command of the sidecar with nothing in its environment but `variables`, in `directory`.
pub fn command(directory: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary());
    command.env_clear().current_dir(directory).envs(variables.iter().copied());
    command
}

/// A client for plain HTTP: one for TLS reads every root certificate first.
pub fn plain_client() -> reqwest::Client {
    reqwest::Client::builder().tls_certs_only([]).build().unwrap()
}

/// The sidecar as a process of which nothing is expected.
pub fn start(directory: &Path, variables: &[(&str, &str)]) -> Process {
    let mut variables = variables.to_vec();
    if !variables.iter().any(|(name, _)| *name == "AEP_ADMIN_ADDR") {
        variables.push(("AEP_ADMIN_ADDR", "off"));
    }
    Process::start(command(directory, &variables))
}

/// A sidecar on a free port.
#[derive(Debug)]
pub struct Sidecar {
    pub process: Process,
    pub address: String,
    pub client: reqwest::Client,
}

impl Sidecar {
    /// Starts one that keeps its state in `directory`.
    pub fn start(directory: &Path, variables: &[(&str, &str)]) -> Self {
        // Any provider will do: the tests speak plain HTTP.
        let _installed = rustls::crypto::ring::default_provider().install_default();
        let mut variables = variables.to_vec();
        if !variables.iter().any(|(name, _)| *name == "AEP_PORT") {
            variables.push(("AEP_PORT", "0"));
        }
        // The default would go to whichever of the tests' sidecars starts first.
        if !variables.iter().any(|(name, _)| *name == "AEP_ADMIN_ADDR") {
            variables.push(("AEP_ADMIN_ADDR", "off"));
        }
        let process = Process::start(command(directory, &variables));
        let line: serde_json::Value = serde_json::from_str(&process.logged("\"listening\"")).unwrap();
        let address = line["address"].as_str().unwrap().to_owned();
        Self { process, address, client: plain_client() }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Where probes and counters are, of one that was started with `AEP_ADMIN_ADDR=127.0.0.1:0`.
    pub fn admin(&self, path: &str) -> String {
        let told = self.process.told();
        let line = told.iter().find(|line| line.contains("\"admin listening\""));
        let line = line.unwrap_or_else(|| panic!("no admin listener: {told:#?}"));
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("http://{}{path}", line["address"].as_str().unwrap())
    }

    /// Posts lines as one batch; they must be taken.
    pub async fn post(&self, lines: &[String]) {
        let response = self.try_post(lines).await.unwrap();
        assert_eq!(response.status(), 202, "{}", response.text().await.unwrap());
    }

    pub async fn try_post(&self, lines: &[String]) -> reqwest::Result<reqwest::Response> {
        self.client
            .post(self.url("/events"))
            .header("aep-version", "0.1")
            .header("content-type", "application/x-ndjson")
            .body(lines.join("\n"))
            .send()
            .await
    }

    /// Stops it in order; it must exit with 0.
    pub fn stop(mut self) -> Vec<String> {
        self.process.terminate();
        let status = self.process.wait();
        assert_eq!(status.code(), Some(0), "{:?}", self.process.log());
        self.process.rest()
    }
}

/// The example receiver: an axum server of the CloudEvents SDK that prints what it gets.
#[derive(Debug)]
pub struct Judge {
    pub process: Process,
    pub url: String,
}

impl Judge {
    /// Starts one on `address`; port 0 takes a free one.
    pub fn start(address: &str) -> Self {
        let path = binary().parent().unwrap().join("examples").join("receiver");
        assert!(path.exists(), "{} is built by `cargo build --examples`", path.display());
        let mut command = Command::new(path);
        command.arg(address);
        let process = Process::start(command);
        let first = process.line();
        let url = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).to_owned();
        Self { process, url }
    }

    /// The next CloudEvent that arrives.
    pub fn event(&self) -> serde_json::Value {
        serde_json::from_str(&self.process.line()).unwrap()
    }
}
