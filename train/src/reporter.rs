//! [`Reporter`]: a run's files for people and tools: `report.html`, `loss.svg`, `metrics.csv`, TensorBoard's events.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use phalanx_parallel::mesh::{Axis, Coordinates};
use phalanx_tensor::io::atomic;

use crate::callback::{Callback, Event};
use crate::record::{Record, Summary, numbers_in};
use crate::report::events::Events;
use crate::report::table::Table;
use crate::report::{Holds, Layout, Machine, Mark, MarkKind, Report, Sample, Series, Setting, svg};
use crate::{Config, Error, Result};

/// Steps before the first writing of the page while a run goes on. Between later ones there are as many at least, and a tenth of those done: a
/// page grows with the steps.
const EVERY: u64 = 100;

/// What hears of a run and writes, into the run's folder:
///
/// | file | for |
/// |---|---|
/// | `report.html` | one page that opens anywhere; written now and then, and at the end |
/// | `loss.svg` | the losses as a picture |
/// | `metrics.csv` | a row a step |
/// | `events.out.tfevents.*` | TensorBoard |
pub struct Reporter {
    report: Report,
    folder: PathBuf,
    events: Option<Events>,
    table: Option<Table>,
    /// Steps done at the next writing of the page.
    next: u64,
}

/// The columns of `metrics.csv`, after the step.
const COLUMNS: [&str; 6] = ["loss", "validation_loss", "grad_norm", "lr", "step_ms", "tokens_per_s"];

impl Reporter {
    /// Of a run that is called so and trains as configured, with every setting as text.
    pub fn new(name: &str, config: &Config, settings: Vec<(String, String)>) -> Reporter {
        let setting = |(key, value): (String, String)| Setting { key, value, given: false };
        let mut report = Report {
            name: name.into(),
            settings: settings.into_iter().map(setting).collect(),
            machine: machine(),
            command: std::env::args().map(quoted).collect::<Vec<_>>().join(" "),
            ..Report::default()
        };
        report.curves.loss_unit = "nats".into();
        report.curves.throughput_unit = "rows/s".into();
        let folder = config.folder().unwrap_or(Path::new(".")).into();
        Reporter { report, folder, events: None, table: None, next: EVERY }
    }

    /// Of a language model: losses in nats a token, and validation losses, too.
    #[must_use]
    pub fn of_tokens(mut self) -> Reporter {
        self.report.curves.loss_unit = "nats a token".into();
        self.report.curves.throughput_unit = "tokens/s".into();
        self
    }

    fn write(&self) -> Result<()> {
        let write = |name: &str, text: &str| {
            atomic::write(self.folder.join(name), |file| file.write_all(text.as_bytes()))
        };
        write("report.html", &self.report.to_html())?;
        let points = |series: &Series| series.points().collect::<Vec<_>>();
        let curves = &self.report.curves;
        if let Some(picture) =
            svg::loss(&points(&curves.loss), &points(&curves.validation), &curves.loss_unit)
        {
            write("loss.svg", &picture)?;
        }
        Ok(())
    }

    fn mark(&mut self, step: u64, kind: MarkKind, text: &str) {
        self.report.marks.push(Mark { step, kind, text: text.into() });
    }
}

fn told(text: String) -> Error {
    Error::Config(text)
}

impl Callback for Reporter {
    fn started(&mut self, config: &Config, done: u64, parameters: usize) -> Result<()> {
        let (summary, curves) = (&mut self.report.summary, &mut self.report.curves);
        summary.parameters = parameters as u64;
        summary.ranks = config.ranks();
        self.report.layout = layout(config);
        let earlier = |name: &str| -> Series {
            let all = numbers_in(&self.folder.join("metrics.jsonl"), name);
            all.into_iter().filter(|(step, _)| *step < done).collect()
        };
        curves.loss = earlier("loss");
        curves.validation = earlier("validation_loss");
        curves.grad_norm = earlier("grad_norm");
        curves.lr = earlier("lr");
        curves.throughput = earlier("tokens_per_s");
        curves.mfu = earlier("mfu");
        self.events = Some(
            match done {
                0 => Events::create(&self.folder),
                _ => Events::resume(&self.folder, done),
            }
            .map_err(told)?,
        );
        let path = self.folder.join("metrics.csv");
        self.table = Some(
            match done {
                0 => Table::create(&path, &COLUMNS),
                _ => Table::resume(&path, &COLUMNS, done),
            }
            .map_err(told)?,
        );
        if done > 0 {
            self.mark(done, MarkKind::Resumed, "");
        }
        Ok(())
    }

    fn step(&mut self, record: &Record) -> Result<()> {
        let Record { step, loss, grad_norm, lr, step_ms, tokens_per_s, validation_loss, .. } = *record;
        let curves = &mut self.report.curves;
        curves.loss.push(step, loss);
        curves.grad_norm.push(step, grad_norm);
        curves.lr.push(step, lr);
        curves.throughput.push(step, tokens_per_s);
        if let Some(mfu) = record.mfu {
            curves.mfu.push(step, mfu);
        }
        if let Some(loss) = validation_loss {
            curves.validation.push(step, loss);
        }
        if let Some(table) = &mut self.table {
            let row =
                [Some(loss), validation_loss, Some(grad_norm), Some(lr), Some(step_ms), Some(tokens_per_s)];
            table.row(step, &row).map_err(told)?;
        }
        if let Some(events) = &mut self.events {
            let scalars = [
                ("loss/train", Some(loss)),
                ("loss/validation", validation_loss),
                ("grad_norm", Some(grad_norm)),
                ("lr", Some(lr)),
                ("throughput", Some(tokens_per_s)),
            ];
            for (tag, value) in scalars {
                value.map_or(Ok(()), |value| events.scalar(tag, step, value)).map_err(told)?;
            }
            events.flush().map_err(told)?;
        }
        self.report.summary.steps = step + 1;
        self.report.summary.seconds += step_ms / 1e3;
        self.report.summary.peak_bytes = record.peak_bytes.iter().map(|&bytes| bytes as u64).collect();
        if step + 1 < self.next {
            return Ok(());
        }
        self.next = step + 1 + EVERY.max(step / 10);
        self.write()
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match *event {
            Event::Saving { step, .. } => self.mark(step, MarkKind::Checkpoint, ""),
            Event::Skipped { step, why } => self.mark(step, MarkKind::Skipped, why),
            Event::RolledBack { step, to, why } => {
                self.mark(step, MarkKind::RolledBack, why);
                self.table =
                    Some(Table::resume(&self.folder.join("metrics.csv"), &COLUMNS, to).map_err(told)?);
                self.events = Some(Events::resume(&self.folder, to).map_err(told)?);
            }
            Event::Sample { step, text } => {
                self.report.samples.push(Sample { step, prompt: String::new(), text: text.into() });
                if let Some(events) = &mut self.events {
                    events.text("sample", step, text).map_err(told)?;
                }
            }
            Event::Inspected { memory, timeline } => {
                self.report.memory = memory.to_vec();
                self.report.timeline = Some(timeline.clone());
            }
            Event::Collectives(all) => self.report.collectives = all.to_vec(),
            Event::Notice { .. } => {}
            Event::Stopping { step, why } => self.mark(step, MarkKind::EarlyStop, why),
        }
        Ok(())
    }

    fn ended(&mut self, summary: &Summary) -> Result<()> {
        self.report.summary.seconds = summary.seconds;
        self.report.summary.outcome =
            summary.stopped.as_ref().map_or_else(String::new, |why| format!("Ended early: {why}."));
        let today = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86400);
        self.report.summary.date = date(today as i64);
        self.write()
    }
}

/// A day, counted from 1970-01-01, in the Gregorian calendar. Source: Hinnant: chrono-compatible low-level date algorithms (2013).
fn date(day: i64) -> String {
    let shifted = day + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (d, m) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{m:02}-{d:02}", year + era * 400 + i64::from(m <= 2))
}

/// Which rank holds what, if there are several.
fn layout(config: &Config) -> Option<Layout> {
    let (mesh, schedule) = (config.layout.mesh().ok()?, config.layout.schedule().ok()?);
    if config.ranks() == 1 {
        return None;
    }
    let holds = |rank: usize| {
        let Coordinates { tp, dp, pp } = mesh.coordinates(rank);
        let stages: Vec<usize> = schedule.stages_of(pp).collect();
        let names: Vec<String> = stages.iter().map(usize::to_string).collect();
        let holds = match schedule.stages() {
            1 => String::new(),
            _ => format!("stage {}", names.join(", ")),
        };
        Holds { rank, data: dp, tensor: tp, pipeline: pp, stages, holds, ..Holds::default() }
    };
    Some(Layout {
        data: mesh.size(Axis::Dp),
        tensor: mesh.size(Axis::Tp),
        pipeline: mesh.size(Axis::Pp),
        zero_stage: config.zero,
        schedule: if schedule.stages() > 1 { config.layout.schedule.clone() } else { String::new() },
        ranks: (0..config.ranks()).map(holds).collect(),
    })
}

/// What this process runs on, as far as the system tells.
fn machine() -> Machine {
    let line = |path: &str, start: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let found = text.lines().find_map(|line| {
            line.strip_prefix(start)?.split_once(':').map(|(_, value)| value.trim().to_string())
        });
        found.unwrap_or_default()
    };
    let kib = line("/proc/meminfo", "MemTotal").split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
    Machine {
        cpu: line("/proc/cpuinfo", "model name"),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        isa: phalanx_kernels::checked_isa().map_or_else(|_| String::new(), |isa| format!("{isa:?}")),
        memory_bytes: kib.unwrap_or(0) * 1024,
        os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        version: format!("Phalanx {}", env!("CARGO_PKG_VERSION")),
        ..Machine::default()
    }
}

/// A word of a command line as a shell reads it.
fn quoted(word: String) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        assert_eq!(
            [0, 59, 11_016, 19_723, 20_781].map(date),
            ["1970-01-01", "1970-03-01", "2000-02-29", "2024-01-01", "2026-11-24"]
        );
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_cut_them() {
        assert_eq!(
            [quoted("--lr=1e-3".into()), quoted("a b's".into()), quoted(String::new())],
            ["--lr=1e-3", "'a b'\\''s'", "''"]
        );
    }
}
