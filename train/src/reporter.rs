//! [`Reporter`] writes a run's files: `report.html`, `report.json`, `loss.svg`, `metrics.csv` and TensorBoard's events.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use phalanx_tensor::io::atomic;

use crate::calendar::year_month_day;
use crate::callback::{Callback, Event};
use crate::machine::{command, machine};
use crate::record::{Record, Summary, numbers_in};
use crate::report::events::Events;
use crate::report::table::Table;
use crate::report::{
    Collective, Curves, Layout, Mark, MarkKind, Profile, Report, Sample, Series, Setting, svg,
};
use crate::run::inspect::layout;
use crate::{Config, Error, Result, Run};

/// The page is written after so many steps. The next time comes after as many again, or after a tenth of the steps done if that is more, because a
/// longer run has a larger page.
const EVERY: u64 = 100;

/// A [`Callback`] that writes into the run's folder:
///
/// | file | for |
/// |---|---|
/// | `report.html` | one page that opens anywhere; written now and then, and at the end |
/// | `report.json` | what the page shows, as data; a resumed run continues it |
/// | `loss.svg` | the losses as a picture |
/// | `metrics.csv` | a row a step |
/// | `events.out.tfevents.*` | TensorBoard |
///
/// The page counts steps from 1, so that it says of each how many were done; the files count them from 0, as `metrics.jsonl` does.
pub struct Reporter {
    report: Report,
    folder: PathBuf,
    events: Option<Events>,
    table: Option<Table>,
    /// Bytes of text in a token; losses on the page are divided by it.
    bytes_per_token: f64,
    /// Seconds that the run took before this process.
    seconds_before: f64,
    /// Calls between ranks before this process.
    calls_before: Vec<Collective>,
    /// Steps done at the next writing of the page.
    next: u64,
}

/// The columns of `metrics.csv`, after the step.
const COLUMNS: [&str; 8] =
    ["loss", "validation_loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "mfu", "peak_bytes"];

impl Reporter {
    /// A reporter of a run with this configuration. The page lists `settings`. The page's title is the name of the
    /// run's folder, or `name` if the run has no folder.
    pub fn new(name: &str, config: &Config, settings: Vec<Setting>) -> Reporter {
        let folder: PathBuf = config.folder().unwrap_or(Path::new(".")).into();
        let of_folder = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let of_folder =
            config.folder().and(of_folder.file_name()).map(|name| name.to_string_lossy().into_owned());
        let mut report = Report {
            name: of_folder.unwrap_or_else(|| name.into()),
            settings,
            machine: machine(config),
            command: command(),
            ..Report::default()
        };
        report.curves.loss_unit = "nats".into();
        report.curves.throughput_unit = "rows/s".into();
        Reporter {
            report,
            folder,
            events: None,
            table: None,
            bytes_per_token: 1.0,
            seconds_before: 0.0,
            calls_before: Vec::new(),
            next: EVERY,
        }
    }

    /// Says that the model is a language model: losses are in nats a token, throughput in tokens a second.
    #[must_use]
    pub fn of_tokens(mut self) -> Reporter {
        self.report.curves.loss_unit = "nats a token".into();
        self.report.curves.throughput_unit = "tokens/s".into();
        self
    }

    /// [`Reporter::of_tokens`] for tokens of so many bytes of text on average. The page then shows losses in nats a byte, by which models with
    /// different tokenizers can be compared. `metrics.csv` and TensorBoard's events stay in nats a token.
    #[must_use]
    pub fn of_bytes(self, bytes_per_token: f64) -> Reporter {
        let mut reporter = self.of_tokens();
        if bytes_per_token > 0.0 {
            reporter.report.curves.loss_unit = "nats a byte".into();
            reporter.bytes_per_token = bytes_per_token;
        }
        reporter
    }

    /// Writes where the time of a step goes ([`Run::profile`]) into the page of the run's folder, if it has one: beside what the page
    /// says of a run that was trained there. Only the first rank writes.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn profiled(mut self, run: &Run, profile: &Profile) -> Result<()> {
        if run.config().folder().is_none() || !run.mesh_rank().is_first() {
            return Ok(());
        }
        std::fs::create_dir_all(&self.folder).map_err(|e| Error::file(&self.folder, e))?;
        let summary = &mut self.report.summary;
        (summary.parameters, summary.ranks) = (run.parameters() as u64, run.config().ranks());
        if let Some(earlier) = earlier(&self.folder) {
            self.report = earlier;
        }
        if let [rank] = &profile.ranks[..] {
            let machine = &mut self.report.machine;
            (machine.peak_flops_per_s, machine.peak_bytes_per_s) =
                (rank.peak_flops_per_s, rank.peak_bytes_per_s);
        }
        self.report.profile = profile.clone();
        self.write()
    }

    fn write(&self) -> Result<()> {
        let write = |name: &str, text: &str| {
            atomic::write(self.folder.join(name), |file| file.write_all(text.as_bytes()))
        };
        write("report.html", &self.report.to_html())?;
        let data =
            serde_json::to_string(&self.report).map_err(|e| Error::data("report.json", e.to_string()))?;
        write("report.json", &data)?;
        let points = |series: &Series| series.points().collect::<Vec<_>>();
        let curves = &self.report.curves;
        if let Some(picture) =
            svg::loss(&points(&curves.loss), &points(&curves.validation), &curves.loss_unit)
        {
            write("loss.svg", &picture)?;
        }
        Ok(())
    }

    /// Something happened after so many steps.
    fn mark(&mut self, done: u64, kind: MarkKind, text: &str) {
        self.report.marks.push(Mark { step: done, kind, text: text.into() });
    }

    /// Goes on with the report of a run that had done so many steps.
    fn go_on(&mut self, config: &Config, done: u64) {
        let elsewhere = config.resume.as_deref().and_then(earlier);
        let mut before = earlier(&self.folder).or(elsewhere).unwrap_or_default();
        each_curve(&mut before.curves).into_iter().for_each(|series| series.truncate(done + 1));
        before.marks.retain(|mark| mark.step <= done);
        before.samples.retain(|sample| sample.step <= done);
        let Report { mut curves, marks, memory, layout, timeline, samples, profile, collectives, .. } =
            before;
        let (now, of_metrics) = (&self.report.curves, self.folder.join("metrics.jsonl"));
        (curves.loss_unit, curves.throughput_unit) = (now.loss_unit.clone(), now.throughput_unit.clone());
        // Each step is in the metrics' file, which has all digits.
        let read = |name: &str| -> Series {
            numbers_in(&of_metrics, name)
                .into_iter()
                .filter(|(step, _)| *step < done)
                .map(|(s, x)| (s + 1, x))
                .collect()
        };
        let fields = [
            "loss",
            "validation_loss",
            "lr",
            "grad_norm",
            "tokens_per_s",
            "mfu",
            "flops_per_s",
            "megatron_mfu",
        ];
        for (field, series) in fields.into_iter().zip(each_curve(&mut curves)) {
            let mut found = read(field);
            if field.ends_with("loss") {
                found.values.iter_mut().for_each(|loss| *loss /= self.bytes_per_token);
            }
            if !found.is_empty() {
                *series = found;
            }
        }
        let known = before.summary.steps == done;
        let of_steps = || read("step_ms").values.iter().sum::<f64>() / 1e3;
        self.seconds_before = if known { before.summary.seconds } else { of_steps() };
        self.calls_before = collectives.clone();
        // With other ranks than before it is another one.
        let now = self.report.layout.take();
        let ranks = |layout: &Layout| layout.ranks.len();
        let layout = layout.filter(|before| now.as_ref().map(ranks) == Some(ranks(before))).or(now);
        let report = &mut self.report;
        (report.curves, report.marks, report.memory, report.layout) = (curves, marks, memory, layout);
        (report.timeline, report.samples, report.profile, report.collectives) =
            (timeline, samples, profile, collectives);
        (report.summary.steps, report.summary.seconds) = (done, self.seconds_before);
        self.mark(done, MarkKind::Resumed, "");
    }

    /// What the page's head says at the end.
    fn close(&mut self, outcome: String) -> Result<()> {
        self.report.summary.outcome = outcome;
        let today = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86400);
        self.report.summary.date = date(today as i64);
        self.write()
    }
}

/// The curves that have a column in the metrics' file: loss, validation, learning rate, norm, throughput, MFU, FLOP/s.
fn each_curve(curves: &mut Curves) -> [&mut Series; 8] {
    let Curves { loss, validation, lr, grad_norm, throughput, mfu, flops, megatron_mfu, .. } = curves;
    [loss, validation, lr, grad_norm, throughput, mfu, flops, megatron_mfu]
}

/// The report of a folder. One that cannot be read is treated as missing.
fn earlier(folder: &Path) -> Option<Report> {
    serde_json::from_str(&std::fs::read_to_string(folder.join("report.json")).ok()?).ok()
}

fn file_error(text: String) -> Error {
    Error::Config(text)
}

impl Callback for Reporter {
    fn started(&mut self, config: &Config, done: u64, parameters: usize) -> Result<()> {
        let summary = &mut self.report.summary;
        summary.parameters = parameters as u64;
        summary.ranks = config.ranks();
        self.report.layout = layout(config);
        // After a process was replaced, the run may go on from its beginning.
        if done > 0 || self.report.curves.loss.points().next().is_some() {
            self.go_on(config, done);
        }
        self.events = Some(
            match done {
                0 => Events::create(&self.folder),
                _ => Events::resume(&self.folder, done),
            }
            .map_err(file_error)?,
        );
        let path = self.folder.join("metrics.csv");
        self.table = Some(
            match done {
                0 => Table::create(&path, &COLUMNS),
                _ => Table::resume(&path, &COLUMNS, done),
            }
            .map_err(file_error)?,
        );
        Ok(())
    }

    fn step(&mut self, record: &Record) -> Result<()> {
        let Record { step, loss, grad_norm, lr, step_ms, tokens_per_s, validation_loss, mfu, .. } = *record;
        let Record { flops_per_s, megatron_mfu, .. } = *record;
        let most = record.peak_bytes.iter().max().map(|&bytes| bytes as f64);
        let values =
            [Some(loss / self.bytes_per_token), validation_loss.map(|loss| loss / self.bytes_per_token)];
        let values = values.into_iter().chain([
            Some(lr),
            Some(grad_norm),
            Some(tokens_per_s),
            mfu,
            flops_per_s,
            megatron_mfu,
        ]);
        for (series, value) in each_curve(&mut self.report.curves).into_iter().zip(values) {
            if let Some(value) = value {
                series.push(step + 1, value);
            }
        }
        if let Some(table) = &mut self.table {
            let row = [
                Some(loss),
                validation_loss,
                Some(grad_norm),
                Some(lr),
                Some(step_ms),
                Some(tokens_per_s),
                mfu,
                most,
            ];
            table.row(step, &row).map_err(file_error)?;
        }
        if let Some(events) = &mut self.events {
            let scalars = [
                ("loss/train", Some(loss)),
                ("loss/validation", validation_loss),
                ("grad_norm", Some(grad_norm)),
                ("lr", Some(lr)),
                ("throughput", Some(tokens_per_s)),
                ("mfu", mfu),
                ("flops_per_s", flops_per_s),
                ("megatron_mfu", megatron_mfu),
                ("memory/peak_bytes", most),
            ];
            for (tag, value) in scalars {
                value.map_or(Ok(()), |value| events.scalar(tag, step, value)).map_err(file_error)?;
            }
            events.flush().map_err(file_error)?;
        }
        if let Some(shares) = &record.waited_for {
            self.report.waited_for = shares.clone();
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
            Event::Skipped { step, why } => self.mark(step + 1, MarkKind::Skipped, why),
            Event::RolledBack { step, to, why } => {
                self.mark(step + 1, MarkKind::RolledBack, why);
                each_curve(&mut self.report.curves).into_iter().for_each(|series| series.truncate(to + 1));
                self.table =
                    Some(Table::resume(&self.folder.join("metrics.csv"), &COLUMNS, to).map_err(file_error)?);
                self.events = Some(Events::resume(&self.folder, to).map_err(file_error)?);
            }
            Event::Sample { step, text } => {
                self.report.samples.push(Sample { step, prompt: String::new(), text: text.into() });
                if let Some(events) = &mut self.events {
                    events.text("sample", step, text).map_err(file_error)?;
                }
            }
            Event::Peak(peak) => self.report.machine.peak_flops_per_s = peak,
            Event::Inspected { memory, timeline, holds } => {
                self.report.memory = memory.to_vec();
                self.report.timeline = Some(timeline.clone());
                if let Some(layout) = &mut self.report.layout {
                    layout.ranks = holds.to_vec();
                }
            }
            Event::Collectives(all) => self.report.collectives = added(&self.calls_before, all),
            Event::Notice { .. } => {}
            Event::Stopping { step, why } => self.mark(step, MarkKind::EarlyStop, why),
        }
        Ok(())
    }

    fn failed(&mut self, step: u64, error: &Error) -> Result<()> {
        let text = error.to_string();
        self.mark(step + 1, MarkKind::Failed, &text);
        let counted = if text.contains("step ") { " (this message counts steps from 0)" } else { "" };
        self.close(format!("Failed: {text}{counted}."))
    }

    fn ended(&mut self, summary: &Summary) -> Result<()> {
        self.report.summary.seconds = self.seconds_before + summary.seconds;
        self.close(summary.stopped.as_ref().map_or_else(String::new, |why| format!("Ended early: {why}.")))
    }
}

/// The calls of an earlier process and of this one.
fn added(before: &[Collective], now: &[Collective]) -> Vec<Collective> {
    let mut all = before.to_vec();
    for call in now {
        let same = |other: &&mut Collective| {
            (other.rank, &other.kind, &other.group) == (call.rank, &call.kind, &call.group)
        };
        match all.iter_mut().find(same) {
            Some(known) => {
                (known.calls, known.bytes, known.ms) =
                    (known.calls + call.calls, known.bytes + call.bytes, known.ms + call.ms);
            }
            None => all.push(call.clone()),
        }
    }
    all
}

/// A day, counted from 1970-01-01.
fn date(day: i64) -> String {
    let (year, month, day) = year_month_day(day);
    format!("{year:04}-{month:02}-{day:02}")
}
