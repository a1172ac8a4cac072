//! The command line of selkie.

use std::ffi::OsString;

use tracing_subscriber::{EnvFilter, fmt::format::debug_fn};

use crate::{
    args::{self, Cli, Command},
    batch, bench, bundle, chat, convert, devices,
    failure::Outcome,
    generate, hub, inspect, logits, model, render, settings, shell, terminal,
};

/// As [`run`], within a program that is not selkie: chat templates are rendered in this process, as for users of the library.
pub fn run_within(args: Vec<OsString>) -> u8 {
    render::stay_here();
    run(args)
}

/// Runs the program with its arguments, the first of which is its name; the exit code.
pub fn run(args: Vec<OsString>) -> u8 {
    if args.get(1).is_some_and(|first| first == args::RENDER) {
        return ended(render::run());
    }
    let mut cli = match Cli::read(args) {
        Ok(cli) => cli,
        Err(e) => {
            // Help goes to standard output, errors to standard error. Either may be closed.
            let _ = e.print();
            return u8::try_from(e.exit_code()).unwrap_or(2);
        }
    };
    if cli.quiet {
        terminal::be_quiet();
    }
    log_to_stderr(cli.verbose);
    if let Some(backend) = cli.command.one_engine() {
        backend.process.possible = true;
        match model::follow(backend) {
            Ok(false) => {}
            done => return ended(done.map(drop)),
        }
    }
    ended(match cli.command {
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Batch(args) => batch::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Pull(args) => hub::pull::run(&args),
        Command::List(args) => hub::list::run(&args),
        Command::Remove(args) => hub::remove::run(&args),
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => crate::serve::run(&args),
        #[cfg(feature = "serve")]
        Command::Web(args) => crate::web::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Config(args) => settings::run(&args),
        Command::Completions(args) => shell::completions(&args),
        Command::Man(args) => shell::man(&args),
    })
}

/// Reports why the program ends; the exit code.
fn ended(outcome: Outcome) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(failure) => {
            if let Some(message) = failure.message() {
                terminal::error(message);
            }
            failure.exit_code()
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
    let filter: EnvFilter = match std::env::var_os("SELKIE_LOG").filter(|text| !text.is_empty()) {
        None => level.into(),
        Some(text) => EnvFilter::builder().parse(text.to_string_lossy()).unwrap_or_else(|e| {
            terminal::note(format_args!(
                "SELKIE_LOG={}: {e}; write for example `debug` or `selkie_core=debug,warn`",
                text.to_string_lossy()
            ));
            level.into()
        }),
    };
    // These lines contain names from files, which must not move the cursor either.
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
