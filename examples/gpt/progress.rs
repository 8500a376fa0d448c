//! What a person watching sees.

use indicatif::{ProgressBar, ProgressStyle};

use crate::metrics::Record;

/// A bar with loss, speed and time left; nothing at all in a quiet run.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub fn new(quiet: bool, done: u64, steps: u64) -> Progress {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(steps) };
        let style = ProgressStyle::with_template("{bar:32} step {pos}/{len}  {msg}  {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(done);
        bar.reset_eta();
        Progress { bar }
    }

    pub fn step(&self, record: &Record) {
        let Record { loss, grad_norm, tokens_per_s, .. } = record;
        self.bar.set_message(format!("loss {loss:.4}  norm {grad_norm:.2}  {tokens_per_s:.0} tokens/s"));
        self.bar.set_position(record.step + 1);
        // Where there is no terminal for a bar, a line now and then.
        if self.bar.is_hidden() && self.bar.length().is_some() && (record.step + 1).is_multiple_of(25) {
            crate::say(&format!("step {}  loss {loss:.4}  {tokens_per_s:.0} tokens/s", record.step + 1));
        }
    }

    pub fn finish(&self) {
        self.bar.finish();
    }
}
