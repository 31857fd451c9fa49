//! The binary: command line and exit codes.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use aep_sidecar::cli::dead_letters::{self, DeadLettersArgs};
use aep_sidecar::cli::export::{self, ExportArgs};
use aep_sidecar::sidecar::{App, RemoteApp, Settings, VARIABLES, shutdown, telemetry};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use tokio_util::sync::CancellationToken;

/// The exit code for a wrong environment, as sysexits has it for wrong usage.
const USAGE: u8 = 64;

/// An Agent Event Protocol relay and CloudEvents export pipeline.
///
/// Without a command it runs: it takes events on AEP_HOST:AEP_PORT, fans them out to readers, and delivers them as
/// CloudEvents to CE_SINK, or to stdout. Everything is configured by environment variables.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Export the events of a file
    Export(ExportArgs),
    /// List, replay or drop what the sinks refused for good
    DeadLetters(DeadLettersArgs),
}

fn main() -> ExitCode {
    let matches = Cli::command().after_long_help(variables()).get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(error) => return fail(USAGE, &error.to_string()),
    };
    if let Err(error) = telemetry::start(&settings.log, settings.log_format) {
        return fail(USAGE, &error.to_string());
    }
    match run(cli, settings) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli, settings: Settings) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        match cli.command {
            None => {
                if let Some(relay) = settings.remote.clone() {
                    RemoteApp::start(settings, &relay).await?.run(shutdown::signal()).await?;
                    return Ok(ExitCode::SUCCESS);
                }
                let app = App::start(settings).await?;
                tracing::info!(address = %app.address()?, "listening");
                app.run(shutdown::signal()).await?;
                Ok(ExitCode::SUCCESS)
            }
            Some(Command::DeadLetters(args)) => Ok(dead_letters::run(&args, &settings).await?),
            Some(Command::Export(args)) => {
                let stop = CancellationToken::new();
                let export = export::run(&args, &settings, stop.clone());
                let mut export = std::pin::pin!(export);
                tokio::select! {
                    code = export.as_mut() => Ok(code?),
                    signal = shutdown::signal() => {
                        signal?;
                        stop.cancel();
                        Ok(export.await?)
                    }
                }
            }
        }
    });
    // A read of standard input can't be cancelled; nothing else is left by now.
    runtime.shutdown_background();
    code
}

/// The table of variables for `--help`.
fn variables() -> String {
    let mut text = String::from("Environment:\n");
    for variable in VARIABLES {
        // Writing to a `String` can't fail.
        let _infallible = write!(text, "  {} ({}", variable.name, variable.form);
        if !variable.default.is_empty() {
            let _infallible = write!(text, "; default {}", variable.default);
        }
        text.push(')');
        if variable.secret {
            let _infallible = write!(text, ", also from the file named by {}_FILE", variable.name);
        }
        let _infallible = write!(text, "\n      {}\n", variable.doc);
    }
    text
}

fn fail(code: u8, message: &str) -> ExitCode {
    // With stderr gone there is no one to tell.
    let _gone = writeln!(std::io::stderr(), "aep-sidecar: {}", message.replace('\n', "\naep-sidecar: "));
    ExitCode::from(code)
}
