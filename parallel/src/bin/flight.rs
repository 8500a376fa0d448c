//! `flight DIR`: says why a run hangs, from the dumps of its ranks.

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "flight DIR: reads the files rank-I.jsonl that the ranks of a run have written into DIR, prints the first call on which
ranks disagree and who waits for whom, and draws DIR/flight.svg";

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    match &words[..] {
        [word] if word == "--help" || word == "-h" => println!("{USAGE}"),
        [folder] => match phalanx_parallel::flight::explain(Path::new(folder)) {
            Ok(text) => print!("{text}"),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(2);
            }
        },
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
