//! The page: a template, its style and script, the parts that are text, and the data of the drawn parts.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::format::{bytes, count, escape, grouped, number, rate, seconds};
use super::{Collective, Curves, Mark, Memory, Profile, Report, Timeline, conspicuous, texts};

/// The data that the script draws.
#[derive(Serialize)]
struct Drawn<'a> {
    curves: &'a Curves,
    marks: &'a [Mark],
    memory: &'a [Memory],
    timeline: Option<&'a Timeline>,
    collectives: &'a [Collective],
    waited_for: &'a [f64],
    profile: &'a Profile,
}

/// The script's files, each after those that it uses.
const SCRIPTS: [&str; 7] = [
    include_str!("page/base.js"),
    include_str!("page/plot.js"),
    include_str!("page/curves.js"),
    include_str!("page/memory.js"),
    include_str!("page/timeline.js"),
    include_str!("page/tables.js"),
    include_str!("page/page.js"),
];

/// A part of the page: its name for the script and for links, its heading, its content.
struct Section {
    id: &'static str,
    title: &'static str,
    html: String,
}

/// The whole page.
pub(super) fn page(report: &Report) -> String {
    let sections = sections(report);
    let links: String = sections.iter().map(|s| format!("<a href=\"#{}\">{}</a>\n", s.id, s.title)).collect();
    let nav = match sections.len() {
        0..2 => String::new(),
        _ => format!("<nav aria-label=\"Parts of this page\">\n{links}</nav>"),
    };
    let mut main = String::new();
    for Section { id, title, html } in &sections {
        let _ = writeln!(main, "<section id=\"{id}\">\n<h2>{title}</h2>\n{html}</section>");
    }
    fill(include_str!("page/page.html"), |name| match name {
        "title" => escape(run_name(report)),
        "style" => include_str!("page/page.css").to_owned(),
        "heading" => heading(report),
        "nav" => nav.clone(),
        "main" => main.clone(),
        "data" => data(report),
        "script" => SCRIPTS.join("\n"),
        _ => String::new(),
    })
}

/// The parts that have data.
fn sections(report: &Report) -> Vec<Section> {
    let Report { curves, memory, timeline, collectives, profile, samples, settings, .. } = report;
    let mut sections = Vec::new();
    let mut section = |shows: bool, id: &'static str, title: &'static str, html: &dyn Fn() -> String| {
        if shows {
            sections.push(Section { id, title, html: html() });
        }
    };
    let drawn = || "<div class=\"drawn\"></div>\n".to_owned();
    section(!curves.is_empty(), "curves", "Training", &drawn);
    section(memory.iter().any(|m| !m.times_ms.is_empty()), "memory", "Memory of one step", &drawn);
    if let Some(layout) = &report.layout {
        let html = || layout.html(report.summary.parameters);
        section(!layout.ranks.is_empty(), "layout", "Layout", &html);
    }
    let spans = timeline.as_ref().is_some_and(|t| t.lanes.iter().any(|lane| !lane.spans.is_empty()));
    section(spans, "timeline", "One step in time", &drawn);
    section(!collectives.is_empty(), "collectives", "Communication", &drawn);
    section(!profile.operations.is_empty(), "operations", "Operations", &drawn);
    section(!samples.is_empty(), "samples", "Samples", &|| texts::samples(samples));
    section(!settings.is_empty(), "settings", "Settings", &|| texts::settings(settings));
    section(!report.machine.is_empty(), "machine", "Machine", &|| report.machine.html());
    section(!report.command.is_empty(), "repeat", "To repeat this run", &|| texts::command(&report.command));
    sections
}

impl Curves {
    fn is_empty(&self) -> bool {
        let Curves { loss, validation, lr, grad_norm, throughput, mfu, more, .. } = self;
        [loss, validation, lr, grad_norm, throughput, mfu].iter().all(|series| series.is_empty())
            && more.iter().flat_map(|chart| &chart.series).all(|(_, series)| series.is_empty())
    }
}

/// JSON for a script element. `<` occurs only in strings, and is escaped there.
fn data(report: &Report) -> String {
    let Report { curves, marks, memory, timeline, collectives, waited_for, profile, .. } = report;
    let timeline = timeline.as_ref();
    let drawn = Drawn { curves, marks, memory, timeline, collectives, waited_for, profile };
    // Keys are strings and floats that are not finite become null, so nothing here can fail.
    serde_json::to_string(&drawn).unwrap_or_else(|_| "{}".to_owned()).replace('<', "\\u003c")
}

/// The template with `value(name)` in place of each `{{name}}`. Inserted text is not expanded again.
fn fill(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut pieces = template.split("{{");
    let mut filled = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or((piece, ""));
        filled.push_str(&value(name));
        filled.push_str(rest);
    }
    filled
}

/// Duration, size, and how the run ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Steps done, including those before a resume.
    pub steps: u64,
    /// Elements of all parameters of the model.
    pub parameters: u64,
    /// The number of ranks.
    pub ranks: usize,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The peak bytes in tensors, for each rank.
    pub peak_bytes: Vec<u64>,
    /// When the run ended, formatted; may be empty.
    pub date: String,
    /// A sentence about how the run ended, if it did not reach its last step; may be empty.
    pub outcome: String,
}

/// The name, the sentence and the tiles.
pub(super) fn heading(report: &Report) -> String {
    let mut html = format!(
        "<h1>{}</h1>\n<p class=\"lead\">{}</p>\n",
        escape(run_name(report)),
        escape(&sentence(report))
    );
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

/// The run's name.
pub(super) fn run_name(report: &Report) -> &str {
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

/// Joins the parts of a note that are not empty.
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
    if let Some(flops) = curves.flops.median() {
        let share = curves.megatron_mfu.median();
        let share = share.map(|share| format!("MFU {} %", number(100.0 * share))).unwrap_or_default();
        tile("FLOP/s by Megatron-LM's formula", rate(flops, "FLOP/s"), note(&[&share, "median"], ", "));
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
    if let Some(rank) = conspicuous(&report.waited_for) {
        let share = number(100.0 * report.waited_for[rank]);
        tile(
            "Slowest rank",
            format!("rank {rank}"),
            format!("the others waited {share} % of the time for it"),
        );
    }
    if summary.seconds > 0.0 {
        tile("Wall time", seconds(summary.seconds), summary.date.clone());
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::super::{Curves, Layout, Machine, Sample, Series, Setting};
    use super::*;

    fn loss(points: &[(u64, f64)]) -> Report {
        let loss: Series = points.iter().copied().collect();
        Report { curves: Curves { loss, ..Curves::default() }, ..Report::default() }
    }

    /// The JSON in a page.
    fn data_of(html: &str) -> serde_json::Value {
        let (_, rest) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    }

    #[test]
    fn a_report_makes_no_request() {
        let html = loss(&[(0, 1.0)]).to_html();
        for address in [" src=", "@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "import("] {
            assert!(!html.contains(address), "{address}");
        }
        // The only addresses are names of XML's languages, which are not looked up, and links within the page.
        assert_eq!(html.matches("://").count(), html.matches("\"http://www.w3.org/2000/svg\"").count());
        assert_eq!(html.matches("href=\"").count(), html.matches("href=\"#").count() + 1);
        assert!(html.contains("<link rel=\"icon\" href=\"data:,\">"));
        assert!(html.contains("content=\"default-src 'none';"));
    }

    #[test]
    fn text_is_escaped() {
        let evil = "</script><script>alert('{{data}}')</script><!--";
        let mut report = loss(&[(0, 1.0)]);
        report.name = evil.into();
        report.command = evil.into();
        report.machine.cpu = evil.into();
        report.marks.push(Mark { text: evil.into(), ..Mark::default() });
        report.settings.push(Setting { key: evil.into(), value: evil.into(), given: true });
        report.samples.push(Sample { step: 1, prompt: evil.into(), text: evil.into() });
        let html = report.to_html();
        assert!(!html.contains("<script>alert") && !html.contains("</script><script>"));
        assert_eq!(html.matches("</script").count(), 2);
        assert_eq!(data_of(&html)["marks"][0]["text"], evil);
        assert!(html.contains("alert(&#39;{{data}}&#39;)"), "a text's own braces stay");
    }

    #[test]
    fn the_script_never_reads_text_as_markup() {
        for name in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"]
        {
            assert!(SCRIPTS.iter().all(|script| !script.contains(name)), "{name}");
        }
        assert!(SCRIPTS.iter().all(|script| !script.contains("</script") && !script.contains("<!--")));
    }

    #[test]
    fn nan_is_a_gap() {
        let html = loss(&[(0, 1.0), (1, f64::NAN), (2, f64::NEG_INFINITY), (3, 2.5)]).to_html();
        assert_eq!(data_of(&html)["curves"]["loss"]["values"], serde_json::json!([1.0, null, null, 2.5]));
    }

    #[test]
    fn sections_without_data_vanish() {
        let html = Report { layout: Some(Layout::default()), ..Report::default() }.to_html();
        assert!(!html.contains("<section"));
        assert!(html.contains("No step was run."));
        let html = loss(&[(0, 1.0)]).to_html();
        assert_eq!(html.matches("<section").count(), 1);
        assert!(!html.contains("<nav"), "one part needs no links");
        let machine = Machine { cores: 2, ..Machine::default() };
        let html = Report { machine, ..loss(&[(0, 1.0)]) }.to_html();
        assert!(
            html.contains("<nav")
                && html.contains("<a href=\"#curves\">")
                && html.contains("<a href=\"#machine\">")
        );
    }

    #[test]
    fn nothing_is_left_of_the_template() {
        let html = loss(&[(0, 1.0)]).to_html();
        assert!(!html.contains("{{"), "a name has no value");
    }

    #[test]
    fn a_page_of_two_hundred_thousand_steps_stays_small() {
        let series: Series = (0..200_000).map(|s| (s, 1.0 / 3.0 + s as f64)).collect();
        let curves = Curves {
            loss: series.clone(),
            lr: series.clone(),
            grad_norm: series.clone(),
            throughput: series.clone(),
            mfu: series,
            ..Curves::default()
        };
        let html = Report { curves, ..Report::default() }.to_html();
        assert!(html.len() < 10_000_000, "{} bytes", html.len());
    }

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
    fn a_tile_tells_the_rate_of_flops_by_megatrons_formula() {
        let (flops, megatron_mfu) = ([(1, 2e12)].into_iter().collect(), [(1, 0.25)].into_iter().collect());
        let report =
            Report { curves: Curves { flops, megatron_mfu, ..Curves::default() }, ..Report::default() };
        let wanted = ["FLOP/s by Megatron-LM's formula", "2 TFLOP/s", "MFU 25 %, median"].map(String::from);
        assert!(tiles(&report).contains(&wanted), "{:?}", tiles(&report));
    }

    #[test]
    fn tiles_tell_the_best_validation_loss_and_the_fullest_rank() {
        let html = heading(&trained(&[5.5, 4.0, 2.4], &[(0, f64::NAN), (1, 2.5), (2, 2.6)]));
        assert!(html.contains("<dt>Best validation loss</dt><dd>2.5<small>at step 1</small>"), "{html}");
        assert!(html.contains("<dd>7 MiB<small>rank 1, the most of all</small>"), "{html}");
    }
}
