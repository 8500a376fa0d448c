//! Trains a GPT on text and lets it write.
//!
//! ```text
//! cargo run --release --example gpt                                  # the bundled text, every default
//! cargo run --release --example gpt -- train --data FILE --steps 500 --out run
//! cargo run --release --example gpt -- generate --model run --prompt "Once"
//! ```
//! Bad input ends with one line on stderr and exit code 2.

mod args;
mod checkpoint;
mod generate;
mod memory;
mod metrics;
mod plot;
mod progress;
mod step;
mod text;
mod train;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return fail(first_line(&error.to_string())),
        Err(help) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    let done = match cli.command {
        None => train::train(&cli.train),
        Some(Command::Train(args)) => train::train(&args),
        Some(Command::Generate(args)) => generate::run(&args),
    };
    done.map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS)
}

fn fail(error: &str) -> ExitCode {
    eprintln!("gpt: {}", error.trim_start_matches("error: ").replace('\n', " "));
    ExitCode::from(2)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or(text)
}
