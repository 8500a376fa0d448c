//! What a person watching sees.

use indicatif::{ProgressBar, ProgressStyle};
use phalanx::train::{Callback, Config, Event, Record, Result, Summary};

/// A bar with losses, speed and time left.
pub struct Progress {
    bar: ProgressBar,
    /// Bytes a token of the validation text.
    bytes_per_token: f64,
    validation: String,
}

impl Progress {
    pub fn new(bytes_per_token: f64) -> Progress {
        Progress { bar: ProgressBar::hidden(), bytes_per_token, validation: String::new() }
    }

    fn line(&self, line: &str) {
        self.bar.suspend(|| crate::say(line));
    }
}

impl Callback for Progress {
    fn started(&mut self, config: &Config, done: u64, parameters: usize) -> Result<()> {
        self.line(&format!(
            "{parameters} parameters, {} rows a step, {} ranks",
            config.batch,
            config.ranks()
        ));
        self.bar = ProgressBar::new(config.steps);
        let style = ProgressStyle::with_template("{bar:24} step {pos}/{len}  {msg}  {eta} left");
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.bar.set_position(done);
        self.bar.reset_eta();
        Ok(())
    }

    fn step(&mut self, record: &Record) -> Result<()> {
        let Record { step, loss, tokens_per_s, .. } = record;
        if let Some(validation) = record.validation_loss {
            self.validation = format!("  validation {:.3} nats/byte", validation / self.bytes_per_token);
        }
        let mfu = record.mfu.map_or_else(String::new, |mfu| format!("  MFU {:.0}%", 100.0 * mfu));
        let message = format!("loss {loss:.3}{}  {tokens_per_s:.0} tokens/s{mfu}", self.validation);
        self.bar.set_position(step + 1);
        // Where there is no terminal for a bar, a line now and then.
        if self.bar.is_hidden() && (step + 1).is_multiple_of(25) {
            crate::say(&format!("step {}  {message}", step + 1));
        }
        self.bar.set_message(message);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Skipped { step, why } => self.line(&format!("step {step}: no update, {why}")),
            Event::RolledBack { step, to, why } => {
                self.line(&format!("step {step}: {why}; back to step {to}"));
                self.bar.set_position(*to);
            }
            Event::Sample { step, text } => {
                self.line(&format!("\nafter {step} steps the model writes:\n{text}\n"))
            }
            Event::Stopping { step, why } => self.line(&format!("ending after {step} steps: {why}")),
            _ => {}
        }
        Ok(())
    }

    fn ended(&mut self, summary: &Summary) -> Result<()> {
        self.bar.finish_and_clear();
        let mut said = format!(
            "{} steps in {:.1} s, {:.0} tokens/s, training loss {:.3} nats/token",
            summary.steps, summary.seconds, summary.tokens_per_s, summary.last_loss
        );
        if let Some(loss) = summary.validation_loss {
            said += &format!("\nvalidation loss {:.4} nats/byte", loss / self.bytes_per_token);
        }
        crate::say(&said);
        Ok(())
    }
}
