//! The command line of selkie.

use std::process::ExitCode;

use tracing_subscriber::fmt::format::debug_fn;

use args::{Cli, Command};

mod args;
mod backend;
mod batch;
mod bench;
mod chat;
mod devices;
mod embedded;
mod failure;
mod generate;
mod input_file;
mod inspect;
mod interrupt;
mod logits;
mod model;
mod output_file;
mod render;
mod terminal;
mod web;

fn main() -> ExitCode {
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(e) => {
            // Help goes to standard output, errors to standard error. Either may be closed.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    log_to_stderr(cli.verbose);
    let outcome = match cli.command {
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Batch(args) => batch::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Web(args) => web::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Render => render::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(message) = failure.message() {
                terminal::error(message);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

fn log_to_stderr(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("SELKIE_LOG").unwrap_or_else(|_| level.into());
    // Names from files are in these lines; what is in them must not move the cursor either.
    let fields = debug_fn(|out, field, value| match field.name() {
        "message" => write!(out, "{}", terminal::visible(&format!("{value:?}"))),
        name => write!(out, " {name}={}", terminal::visible(&format!("{value:?}"))),
    });
    // If standard error cannot be written, reporting that would fail too, and panic.
    tracing_subscriber::fmt()
        .fmt_fields(fields)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(terminal::colours())
        .with_target(false)
        .log_internal_errors(false)
        .init();
}
