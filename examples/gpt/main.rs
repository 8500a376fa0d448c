//! Trains a GPT on text and lets it write.
//!
//! ```text
//! cargo run --release --example gpt                                  # the bundled text, as first_run.toml says
//! cargo run --release --example gpt -- train --data FILE --steps 500 --out run
//! cargo run --release --example gpt -- profile --layers 8             # which operations take the time of a step
//! cargo run --release --example gpt -- prepare --data FILE.. --out tokens
//! cargo run --release --example gpt -- generate --model run --prompt "Once"
//! cargo run --release --example gpt --features chat -- generate --model FOLDER --chat
//! ```
//! Bad input ends with one line on stderr and exit code 2.

mod gpt;
mod train;

use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx::train::data::Prepared;
use phalanx::train::text::PrepareConfig;
use phalanx::train::{
    ConvertConfig, Error, GenerateConfig, Keyed, Replay, Result, Settings, StatusLine, take_flag,
};
use phalanx::{kernels, parallel};

use gpt::Gpt;

/// What is trained without a subcommand, unless flags say otherwise.
const FIRST_RUN: &str = include_str!("first_run.toml");

const USAGE: &str = "Trains a GPT on text, or continues a text with a trained one.

gpt [FLAGS]            change the run of examples/gpt/first_run.toml
gpt train [FLAGS]      train, then print a sample; --config FILE.toml has flags too, and --print-config prints such a file
gpt replay --from CHECKPOINT --steps A..B [FLAGS]    repeat steps of a run and compare their --digests; exit code 1 if they differ
gpt profile [FLAGS]    print which operations take the time of a step, and `gpt plan` stages for --pp ranks; the flags are those of train
gpt prepare [FLAGS]    make token files of large texts, for `train --data DIR`
gpt generate [FLAGS]   continue a prompt; with --chat answer what is said, by the template of a Hugging Face folder
gpt convert [FLAGS]    make a Hugging Face folder of a run's checkpoint or of another folder: in another dtype, in files of another size
gpt flight DIR         say why a run hangs, from what its ranks have written into DIR; `gpt doctor` what `--device cuda` lacks

`--help` behind a subcommand tells its flags.";

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let isa = kernels::checked_isa().map_err(|e| Error::Config(e.to_string()));
    let Err(error) = isa.and_then(|_| run(words)) else { return ExitCode::SUCCESS };
    // Another process of the run says what is elsewhere.
    if !matches!(error, Error::Elsewhere) {
        complain(&error.to_string());
    }
    ExitCode::from(if matches!(error, Error::Differs(_)) { 1 } else { 2 })
}

fn run(mut words: Vec<String>) -> Result<()> {
    let first = words.first().cloned().unwrap_or_default();
    if ["train", "profile", "plan", "replay", "prepare", "convert", "generate", "flight", "doctor"]
        .contains(&&*first)
    {
        words.remove(0);
    }
    let helped = words.iter().any(|word| word == "--help" || word == "-h");
    match &first[..] {
        "help" | "--help" | "-h" => say(USAGE),
        "--version" | "-V" => say(concat!("gpt ", env!("CARGO_PKG_VERSION"))),
        "generate" if helped => say(&Settings::new(GenerateConfig::default()).help()),
        "convert" if helped => say(&Settings::new(ConvertConfig::default()).help()),
        "prepare" if helped => say(&Settings::new(PrepareConfig::default()).help()),
        _ if helped => say(&Settings::new(Gpt::default()).help()),
        "generate" => Settings::new(GenerateConfig::default()).words(words)?.resolve()?.run(complain)?,
        "flight" => say(&parallel::flight::explain(words.join(" ").as_ref())?),
        "doctor" if words.is_empty() => say(&phalanx::tensor::cuda::doctor().to_string()),
        "convert" => Settings::new(ConvertConfig::default()).words(words)?.resolve()?.run()?,
        "prepare" => prepare(&Settings::new(PrepareConfig::default()).words(words)?.resolve()?)?,
        first => {
            let mut settings = Settings::new(Gpt::default());
            if !["train", "profile", "plan", "replay"].contains(&first) {
                settings.read_text(FIRST_RUN, "first_run.toml")?;
            }
            let prints =
                words.iter().position(|w| w == "--print-config").map(|at| words.remove(at)).is_some();
            let parse = || Replay::parse(take_flag(&mut words, "--from")?, take_flag(&mut words, "--steps")?);
            let replay = (first == "replay").then(parse).transpose()?;
            if let Some(path) = take_flag(&mut words, "--config")? {
                settings.read(path.as_ref())?;
            }
            settings.words(words)?;
            if let Some(replay) = &replay {
                settings.read(&replay.file("config.toml"))?;
            }
            // Checkpoints of adapters do not have the model beside them.
            if settings.value("resume").as_deref() != Some("auto") && settings.value("lora").is_none() {
                settings.either("init", "resume")?;
            }
            settings.either("vocabulary", "init")?;
            if !prints {
                return train::train(&settings, first, replay.as_ref());
            }
            say(&settings.to_toml(&[]));
        }
    }
    Ok(())
}

/// Makes token files, and says what they have.
fn prepare(config: &PrepareConfig) -> Result<()> {
    let mut line = StatusLine::default();
    let done = config.run(&mut |done, all| line.show(&format!("{} of {} MiB", done >> 20, all >> 20)));
    line.clear();
    let (Prepared { documents, tokens, validation_documents, validation_tokens }, codec) = done?;
    let held_out = format!("{validation_tokens} of {validation_documents} held out");
    say(&format!("{tokens} tokens of {documents} documents, {held_out}; {}", codec.source()));
    Ok(())
}

/// Prints a line. A reader that has closed the pipe wants no more of it, which is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end_matches('\n'));
}

/// Prints the first error that there is, as one line. Keys are flags here.
fn complain(error: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if SAID.swap(true, Ordering::Relaxed) {
        return;
    }
    fn names<C: Keyed>() -> impl Iterator<Item = &'static str> {
        C::keys().into_iter().map(|key| key.name)
    }
    let others = names::<PrepareConfig>().chain(names::<ConvertConfig>()).chain(names::<GenerateConfig>());
    let keys: Vec<_> = names::<Gpt>().chain(others).collect();
    let part = |(place, part): (usize, &str)| match place % 2 {
        1 if keys.contains(&part) => format!("--{part}"),
        1 => format!("`{part}`"),
        _ => part.to_string(),
    };
    let error: String = error.split('`').enumerate().map(part).collect();
    // In one write, so that lines of several ranks do not mix.
    let _ = std::io::stderr().write_all(format!("gpt: {}\n", error.replace('\n', " ")).as_bytes());
}
