//! The page put together: a template, its style and script, the parts that are text, and the data of those that are drawn.

use std::fmt::Write;

use serde::Serialize;

use super::format::escape;
use super::{Collective, Curves, Mark, Memory, Profile, Report, Timeline, heading, texts};

/// What the script draws.
#[derive(Serialize)]
struct Drawn<'a> {
    curves: &'a Curves,
    marks: &'a [Mark],
    memory: &'a [Memory],
    timeline: Option<&'a Timeline>,
    collectives: &'a [Collective],
    profile: &'a Profile,
}

/// The script's files, in an order in which each uses those before it.
const SCRIPTS: [&str; 7] = [
    include_str!("page/base.js"),
    include_str!("page/plot.js"),
    include_str!("page/curves.js"),
    include_str!("page/memory.js"),
    include_str!("page/timeline.js"),
    include_str!("page/tables.js"),
    include_str!("page/page.js"),
];

/// A part of the page: the name that the script and links know, its heading, its content so far.
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
        "title" => escape(heading::name(report)),
        "style" => include_str!("page/page.css").to_owned(),
        "heading" => heading::heading(report),
        "nav" => nav.clone(),
        "main" => main.clone(),
        "data" => data(report),
        "script" => SCRIPTS.join("\n"),
        _ => String::new(),
    })
}

/// The parts that have something to show.
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

/// JSON that may stand in a script element: `<` occurs only in strings, where an escape means the same.
fn data(report: &Report) -> String {
    let Report { curves, marks, memory, timeline, collectives, profile, .. } = report;
    let drawn = Drawn { curves, marks, memory, timeline: timeline.as_ref(), collectives, profile };
    // Keys are strings and floats that are not finite become null, so nothing here can fail.
    serde_json::to_string(&drawn).unwrap_or_else(|_| "{}".to_owned()).replace('<', "\\u003c")
}

/// The template with `value(name)` in place of each `{{name}}`. What is put in is not looked at again.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Layout, Machine, Sample, Series, Setting};

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
}
