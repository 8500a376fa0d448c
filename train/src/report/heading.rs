//! The page's head: the run's name, a sentence about it and its key numbers.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::Report;
use super::format::{bytes, count, escape, grouped, number, rate, seconds};

/// How long, how large, how it ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Steps that were run; those before a resume count.
    pub steps: u64,
    /// Elements of all parameters of the model.
    pub parameters: u64,
    /// How many ranks trained.
    pub ranks: usize,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The most bytes in tensors at one time, one a rank.
    pub peak_bytes: Vec<u64>,
    /// When the run ended, as a reader wants it; may be empty.
    pub date: String,
    /// A sentence on how the run ended, if not by its last step; may be empty.
    pub outcome: String,
}

/// The name, the sentence and the tiles.
pub(super) fn heading(report: &Report) -> String {
    let mut html =
        format!("<h1>{}</h1>\n<p class=\"lead\">{}</p>\n", escape(name(report)), escape(&sentence(report)));
    let outcome = report.summary.outcome.trim();
    if !outcome.is_empty() {
        let _ = writeln!(html, "<p class=\"outcome\">{}</p>", escape(outcome));
    }
    let tiles = tiles(report);
    if !tiles.is_empty() {
        html.push_str("<dl class=\"tiles\">\n");
        for [label, value, note] in tiles {
            let [label, value, note] = [label, value, note].map(|text| escape(&text));
            let _ = writeln!(html, "<div><dt>{label}</dt><dd>{value}<small>{note}</small></dd></div>");
        }
        html.push_str("</dl>\n");
    }
    html
}

/// What the run is called.
pub(super) fn name(report: &Report) -> &str {
    if report.name.is_empty() { "Training run" } else { &report.name }
}

/// Steps, parameters, ranks, wall time and losses.
fn sentence(report: &Report) -> String {
    let Report { summary, curves, .. } = report;
    let mut text = match summary.steps {
        0 if !report.profile.ranks.is_empty() => "A profile".to_owned(),
        0 => "No step was run".to_owned(),
        1 => "1 step".to_owned(),
        steps => format!("{} steps", grouped(steps)),
    };
    if summary.parameters > 0 {
        let _ = write!(text, " of a model with {} parameters", count(summary.parameters));
    }
    if summary.ranks > 1 {
        let _ = write!(text, " on {} ranks", grouped(summary.ranks as u64));
    }
    if summary.seconds > 0.0 {
        let _ = write!(text, ", in {}", seconds(summary.seconds));
    }
    let ends = curves.loss.points().next().zip(curves.loss.points().next_back());
    let Some(((first, from), (last, to))) = ends else { return text + "." };
    if curves.loss.median().is_none() {
        return text + ": the training loss was never finite.";
    }
    let unit = if curves.loss_unit.is_empty() { String::new() } else { format!(" {}", curves.loss_unit) };
    let _ = match first == last {
        true => write!(text, ": the training loss was {}{unit}", value(to)),
        false => write!(text, ": the training loss went from {} to {}{unit}", value(from), value(to)),
    };
    match curves.validation.points().next_back() {
        Some((_, loss)) => format!("{text}, the validation loss was {} at the end.", value(loss)),
        None => text + ".",
    }
}

/// A loss within a sentence.
fn value(loss: f64) -> String {
    if loss.is_finite() { number(loss) } else { "a value that is not finite".to_owned() }
}

/// Parts of a note, without those that are empty.
fn note(parts: &[&str], between: &str) -> String {
    let parts: Vec<&str> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
    parts.join(between)
}

/// Label, value and a note for each key number that is known.
fn tiles(report: &Report) -> Vec<[String; 3]> {
    let Report { summary, curves, machine, .. } = report;
    let mut tiles = Vec::new();
    let mut tile = |label: &str, value: String, note: String| tiles.push([label.to_owned(), value, note]);
    let at_step = |step: u64| format!("at step {}", grouped(step));
    if let Some((step, loss)) = curves.loss.points().next_back() {
        tile("Training loss", number(loss), note(&[&curves.loss_unit, &at_step(step)], " "));
    }
    let finite = curves.validation.points().filter(|(_, loss)| loss.is_finite());
    if let Some((step, loss)) = finite.min_by(|a, b| a.1.total_cmp(&b.1)) {
        tile("Best validation loss", number(loss), note(&[&curves.loss_unit, &at_step(step)], " "));
    }
    if let Some(speed) = curves.throughput.median() {
        tile("Throughput", number(speed), note(&[&curves.throughput_unit, "median"], ", "));
    }
    if let Some(share) = curves.mfu.median() {
        let of_peak = match machine.peak_flops_per_s {
            peak if peak > 0.0 => format!("of {}, median", rate(peak, "FLOP/s")),
            _ => "of the peak, median".to_owned(),
        };
        tile("FLOP/s used (MFU)", format!("{} %", number(100.0 * share)), of_peak);
    }
    // Of several the first: the last one of the list turned around.
    if let Some((rank, &most)) = summary.peak_bytes.iter().enumerate().rev().max_by_key(|(_, bytes)| **bytes)
    {
        let of_all = if summary.peak_bytes.len() > 1 {
            format!("rank {rank}, the most of all")
        } else {
            String::new()
        };
        tile("Peak memory", bytes(most), of_all);
    }
    if summary.seconds > 0.0 {
        tile("Wall time", seconds(summary.seconds), summary.date.clone());
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Curves, Series};

    fn trained(loss: &[f64], validation: &[(u64, f64)]) -> Report {
        let loss: Series = (0..).zip(loss.iter().copied()).collect();
        let summary = Summary {
            steps: loss.steps.len() as u64,
            parameters: 1_912_345,
            ranks: 4,
            seconds: 34.21,
            peak_bytes: vec![5 << 20, 7 << 20],
            ..Summary::default()
        };
        let validation = validation.iter().copied().collect();
        Report { summary, curves: Curves { loss, validation, ..Curves::default() }, ..Report::default() }
    }

    #[test]
    fn the_sentence_says_what_was_trained() {
        assert_eq!(
            sentence(&trained(&[5.5, 4.0, 2.4], &[(1, 2.5), (2, 2.6)])),
            "3 steps of a model with 1.912 million parameters on 4 ranks, in 34.2 s: the training loss went from \
             5.5 to 2.4, the validation loss was 2.6 at the end."
        );
        assert_eq!(sentence(&Report::default()), "No step was run.");
    }

    #[test]
    fn a_loss_that_ended_as_nan_is_not_hidden() {
        assert!(
            sentence(&trained(&[5.5, f64::NAN], &[])).ends_with("from 5.5 to a value that is not finite.")
        );
        assert!(sentence(&trained(&[f64::NAN, f64::NAN], &[])).ends_with("was never finite."));
    }

    #[test]
    fn tiles_tell_the_best_validation_loss_and_the_fullest_rank() {
        let html = heading(&trained(&[5.5, 4.0, 2.4], &[(0, f64::NAN), (1, 2.5), (2, 2.6)]));
        assert!(html.contains("<dt>Best validation loss</dt><dd>2.5<small>at step 1</small>"), "{html}");
        assert!(html.contains("<dd>7 MiB<small>rank 1, the most of all</small>"), "{html}");
    }
}
