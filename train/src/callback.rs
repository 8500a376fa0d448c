//! [`Callback`]: a run calls its methods on the first rank while it trains; [`Progress`], a callback for terminals.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::record::{Record, Summary};
use crate::report::{Collective, Memory, RankStorage, Timeline};
use crate::{Config, Error, Result};

/// A run calls these methods on its first rank while it trains. The default methods do nothing.
pub trait Callback: Send {
    /// Training begins, after `done` steps. The whole model has `parameters` parameters.
    ///
    /// # Errors
    /// An error ends the run.
    fn started(&mut self, _config: &Config, _done: u64, _parameters: usize) -> Result<()> {
        Ok(())
    }

    /// A step is done, and the validation after it if there was one.
    ///
    /// # Errors
    /// An error ends the run.
    fn step(&mut self, _record: &Record) -> Result<()> {
        Ok(())
    }

    /// An event besides the steps: a checkpoint has begun, an update was skipped, the run has gone back to a checkpoint or ends early.
    ///
    /// # Errors
    /// An error ends the run.
    fn event(&mut self, _event: &Event<'_>) -> Result<()> {
        Ok(())
    }

    /// The run fails with this error in step `step`, after at least one call of [`Callback::step`]. [`Callback::ended`] is not called.
    ///
    /// # Errors
    /// An error is dropped, since the run returns the one that it failed with.
    fn failed(&mut self, _step: u64, _error: &Error) -> Result<()> {
        Ok(())
    }

    /// Training is over.
    ///
    /// # Errors
    /// An error is the run's error.
    fn ended(&mut self, _summary: &Summary) -> Result<()> {
        Ok(())
    }
}

/// An event of a run besides its steps.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A checkpoint is being written.
    Saving {
        /// Steps done.
        step: u64,
        /// The checkpoint's folder.
        path: &'a Path,
    },
    /// A step's update was skipped.
    Skipped {
        /// The step.
        step: u64,
        /// Why.
        why: &'a str,
    },
    /// The run has gone back to a checkpoint.
    RolledBack {
        /// The step that diverged.
        step: u64,
        /// The steps done in the checkpoint.
        to: u64,
        /// Why it counts as diverged.
        why: &'a str,
    },
    /// A hook of [`Run::every`](crate::Run::every) has returned this text, such as a sample of the model.
    Sample {
        /// Steps done.
        step: u64,
        /// The text.
        text: &'a str,
    },
    /// The measured peak of all ranks together, in floating-point operations a second.
    Peak(f64),
    /// A step was inspected.
    Inspected {
        /// The memory of each rank.
        memory: &'a [Memory],
        /// What ran when.
        timeline: &'a Timeline,
        /// What each rank stores of the model.
        holds: &'a [RankStorage],
    },
    /// Each rank's communication calls so far. A run sends it at each pause and at its end.
    Collectives(&'a [Collective]),
    /// The run trains otherwise than the configuration asks for.
    Notice {
        /// Steps done.
        step: u64,
        /// What.
        text: &'a str,
    },
    /// The run ends before its last step.
    Stopping {
        /// Steps done.
        step: u64,
        /// Why.
        why: &'a str,
    },
}

/// The time between two writings of the line.
const PAUSE: Duration = Duration::from_millis(100);
/// Steps between two lines if there is no terminal.
const LINES: u64 = 25;

/// The last line of a terminal, which shows how far something is. Without a terminal it shows nothing.
pub struct StatusLine {
    terminal: bool,
    shown: Option<Instant>,
}

impl Default for StatusLine {
    fn default() -> StatusLine {
        StatusLine { terminal: std::io::stderr().is_terminal(), shown: None }
    }
}

impl StatusLine {
    /// Replaces the text of the line.
    pub fn show(&mut self, text: &str) {
        if self.terminal && self.shown.is_none_or(|shown| shown.elapsed() > PAUSE) {
            // Without line wrapping, so that the carriage return comes back to the line's start.
            let _ = write!(std::io::stderr(), "\r\x1b[K\x1b[?7l{text}\x1b[?7h");
            self.shown = Some(Instant::now());
        }
    }

    /// Removes the line.
    pub fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// Prints a line above.
    pub fn above(&mut self, text: &str) {
        self.clear();
        // If the reader has closed the pipe, the run goes on without output.
        let _ = writeln!(std::io::stdout(), "{}", text.trim_end_matches('\n'));
    }
}

/// A callback that shows the loss, the speed and the time left. On a terminal it updates one line; elsewhere it prints a line every 25
/// steps.
pub struct Progress {
    line: StatusLine,
    /// What the validation loss is divided by, and the unit of the quotient.
    unit: (f64, &'static str),
    name: &'static str,
    validation: String,
    steps: u64,
    /// When the run began, and the steps that were done then.
    begin: (Instant, u64),
}

impl Default for Progress {
    fn default() -> Progress {
        let begin = (Instant::now(), 0);
        Progress {
            line: StatusLine::default(),
            unit: (1.0, ""),
            name: "rows",
            validation: String::new(),
            steps: 0,
            begin,
        }
    }
}

impl Progress {
    /// For a language model: speeds are in tokens a second, and validation losses in nats a byte if the bytes of a token are known.
    #[must_use]
    pub fn of_tokens(self, bytes_per_token: Option<f64>) -> Progress {
        let unit = bytes_per_token.map_or((1.0, " nats/token"), |bytes| (bytes, " nats/byte"));
        Progress { unit, name: "tokens", ..self }
    }

    fn left(&self, done: u64) -> String {
        let here = done.saturating_sub(self.begin.1).max(1);
        let left =
            self.begin.0.elapsed().as_secs_f64() / here as f64 * (self.steps - done.min(self.steps)) as f64;
        match left as u64 {
            seconds @ 0..3600 => format!("{}:{:02}", seconds / 60, seconds % 60),
            seconds => format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60),
        }
    }
}

impl Callback for Progress {
    fn started(&mut self, config: &Config, done: u64, parameters: usize) -> Result<()> {
        let (batch, ranks) = (config.batch, config.ranks());
        self.line.above(&format!("{parameters} parameters, {batch} rows a step, {ranks} ranks"));
        (self.steps, self.begin) = (config.steps, (Instant::now(), done));
        Ok(())
    }

    fn step(&mut self, record: &Record) -> Result<()> {
        let Record { step, loss, tokens_per_s, .. } = record;
        if let Some(validation) = record.validation_loss {
            self.validation = format!("  validation {:.3}{}", validation / self.unit.0, self.unit.1);
        }
        let mfu = record.mfu.map_or_else(String::new, |mfu| format!("  MFU {:.0}%", 100.0 * mfu));
        let done = step + 1;
        let message = format!("loss {loss:.3}{}  {tokens_per_s:.0} {}/s{mfu}", self.validation, self.name);
        if self.line.terminal {
            let left = self.left(done);
            self.line.show(&format!("step {done}/{}  {message}  {left} left", self.steps));
        } else if done.is_multiple_of(LINES) {
            self.line.above(&format!("step {done}  {message}"));
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Skipped { step, why } => self.line.above(&format!("step {step}: no update, {why}")),
            Event::RolledBack { step, to, why } => {
                self.line.above(&format!("step {step}: {why}; back to step {to}"));
            }
            Event::Sample { step, text } => {
                self.line.above(&format!("\nafter {step} steps the model writes:\n{text}\n"));
            }
            Event::Notice { step, text } => self.line.above(&format!("step {step}: {text}")),
            Event::Stopping { step, why } => self.line.above(&format!("ending after {step} steps: {why}")),
            _ => {}
        }
        Ok(())
    }

    fn ended(&mut self, summary: &Summary) -> Result<()> {
        let Summary { steps, seconds, tokens_per_s, last_loss, .. } = summary;
        let unit = if self.name == "tokens" { " nats/token" } else { "" };
        self.line.above(&format!(
            "{steps} steps in {seconds:.1} s, {tokens_per_s:.0} {}/s, training loss {last_loss:.3}{unit}",
            self.name
        ));
        if let Some(loss) = summary.validation_loss {
            self.line.above(&format!("validation loss {:.4}{}", loss / self.unit.0, self.unit.1));
        }
        Ok(())
    }
}
