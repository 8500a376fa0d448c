//! Trains a GPT on text and lets it write.
//!
//! ```text
//! cargo run --release --example gpt                                  # the bundled text, as first_run.toml says
//! cargo run --release --example gpt -- train --data FILE --steps 500 --out run
//! cargo run --release --example gpt -- profile --layers 8             # which operations take the time of a step
//! cargo run --release --example gpt -- prepare --data FILE.. --out tokens
//! cargo run --release --example gpt -- generate --model run --prompt "Once"
//! ```
//! Bad input ends with one line on stderr and exit code 2.

mod args;
mod check;
mod choices;
mod config;
mod generate;
mod model;
mod prepare;
mod progress;
mod room;
mod schedule;
mod text;
mod train;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use phalanx::kernels;

use args::{Cli, Command, TrainArgs};

fn main() -> ExitCode {
    let done =
        kernels::checked_isa().map_err(|e| e.to_string()).and_then(|_| run(std::env::args_os().collect()));
    done.map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS)
}

fn run(given: Vec<OsString>) -> Result<(), String> {
    let mut command = Cli::command();
    command.build();
    let train = command.find_subcommand("train").cloned().unwrap_or_default();
    let matches = match command.try_get_matches_from(config::expanded(given, &train)?) {
        Ok(matches) => matches,
        Err(error) if error.use_stderr() => return Err(first_paragraph(&error.to_string())),
        Err(help) => {
            say(&help.to_string());
            return Ok(());
        }
    };
    let cli = Cli::from_arg_matches(&matches).map_err(|e| first_paragraph(&e.to_string()))?;
    match cli.command {
        Command::Generate(args) => generate::run(&args),
        Command::Prepare(args) => prepare::run(&args),
        Command::Train(mut args) => {
            args.written =
                matches.subcommand_matches("train").map_or_else(String::new, |m| config::written(m, &train));
            if args.print_config {
                say(&args.written);
                return Ok(());
            }
            train::train(&args)
        }
        Command::Profile(args) => train::train(&TrainArgs { profile: true, ..*args }),
    }
}

/// Prints a line. Whoever closed the pipe wants no more of it, which is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end_matches('\n'));
}

/// Prints an error, as one line.
fn complain(error: &str) {
    eprintln!("gpt: {}", error.trim_start_matches("error: ").replace('\n', " "));
}

/// Prints an error, unless it has no text: then it was printed already.
fn fail(error: &str) -> ExitCode {
    if !error.is_empty() {
        complain(error);
    }
    ExitCode::from(2)
}

/// What the error says before it goes on to usage and tips, as one line.
fn first_paragraph(text: &str) -> String {
    let lines: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    lines.join(" ")
}
