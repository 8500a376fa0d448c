//! Trains a GPT on text and lets it write.
//!
//! ```text
//! cargo run --release --example gpt                                  # the bundled text, every default
//! cargo run --release --example gpt -- train --data FILE --steps 500 --out run
//! cargo run --release --example gpt -- generate --model run --prompt "Once"
//! ```
//! Bad input ends with one line on stderr and exit code 2.

mod args;
mod choices;
mod generate;
mod model;
mod plot;
mod progress;
mod room;
mod schedule;
mod text;
mod train;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use phalanx::kernels;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return fail(&first_paragraph(&error.to_string())),
        Err(help) => {
            say(&help.to_string());
            return ExitCode::SUCCESS;
        }
    };
    let done = kernels::checked_isa().and_then(|_| match cli.command {
        None => train::train(&cli.train),
        Some(Command::Train(args)) => train::train(&args),
        Some(Command::Generate(args)) => generate::run(&args),
    });
    done.map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS)
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
