//! `phalanx-launch`: starts the ranks of a run as processes, writes their output, and ends with their exit code.
//!
//! ```text
//! options   the command line                     -> Options
//! ranks     starts, watches and stops processes  -> Outcome      uses logs, tied, link
//! logs      copies a rank's output, line by line, to the terminal and to its files
//! tied      a rank's process ends with the launcher
//! link      the store, where ranks meet again when one was started again
//! ```
mod link;
mod logs;
mod options;
mod ranks;
mod tied;

use std::io::Write;
use std::process::ExitCode;

/// Prints a line in one write, so that it does not mix with those of ranks.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("phalanx-launch: {line}\n").as_bytes());
}

/// The exit code of a command line that makes no sense, of the launcher and of most programs.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let options = match options::Options::parse(std::env::args_os().skip(1), &|name| std::env::var(name).ok())
    {
        Ok(options) => options,
        Err(options::Stop::Help) => {
            println!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Err(options::Stop::Wrong(why)) => {
            say(&format!("{why}; see phalanx-launch --help"));
            return ExitCode::from(USAGE);
        }
    };
    let done = if options.program.is_some() { ranks::run(&options) } else { link::serve_alone(&options) };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(why) => {
            say(&why);
            ExitCode::FAILURE
        }
    }
}
