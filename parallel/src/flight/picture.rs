//! [`picture`]: the dumps as a drawing: a lane a rank, a bar an operation, and operations that have not ended up to the lane's end.

use std::fmt::Write;

use super::dump::Entry;
use super::{Dumps, Findings};

/// The width of the time lines, their left border and the height of a lane, in pixels.
const WIDTH: f64 = 1000.0;
const LEFT: f64 = 70.0;
const LANE: f64 = 44.0;
const TOP: f64 = 50.0;
/// The longest time that the picture shows before the last dump, in microseconds.
const SHOWN_US: f64 = 60e6;

/// The picture as one SVG file, which needs no other file. Bars name their operation when the pointer is over them.
pub fn picture(findings: &Findings<'_>, dumps: &Dumps) -> String {
    let end = |rank: usize| dumps.common_us(rank, dumps.by_rank[&rank].head.written_us);
    let latest = dumps.by_rank.keys().map(|&rank| end(rank)).fold(f64::NEG_INFINITY, f64::max);
    let starts = dumps.by_rank.iter().flat_map(|(&rank, dump)| {
        dump.entries.iter().map(move |entry| dumps.common_us(rank, entry.started_us))
    });
    let earliest = starts.fold(latest, f64::min).max(latest - SHOWN_US);
    let span = (latest - earliest).max(1.0);
    let x = |us: f64| LEFT + ((us - earliest) / span).clamp(0.0, 1.0) * WIDTH;
    let height = TOP + LANE * dumps.ranks as f64 + 30.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{height}\" viewBox=\"0 0 {w} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n<title>The last operations of each rank</title>\n\
         <rect width=\"{w}\" height=\"{height}\" fill=\"#fff\"/>\n",
        w = LEFT + WIDTH + 20.0
    );
    let text = |x: f64, y: f64, anchor: &str, text: &str| {
        format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n", escape(text))
    };
    svg += &text(LEFT, 20.0, "start", "calls (blue), actions of the schedule (grey), not ended (red)");
    svg += &text(LEFT, TOP - 8.0, "start", &format!("-{:.3} s", span / 1e6));
    svg += &text(LEFT + WIDTH, TOP - 8.0, "end", "last dump");
    for rank in 0..dumps.ranks {
        let y = TOP + LANE * rank as f64;
        svg += &text(LEFT - 8.0, y + LANE / 2.0, "end", &format!("rank {rank}"));
        let _ = writeln!(svg, "<path d=\"M{LEFT},{y:.1}h{WIDTH}\" stroke=\"#ddd\"/>");
        let Some(dump) = dumps.by_rank.get(&rank) else {
            svg += &text(LEFT + 8.0, y + LANE / 2.0, "start", "no dump");
            continue;
        };
        for entry in &dump.entries {
            let ended = entry.ended_us.map_or_else(|| end(rank), |us| dumps.common_us(rank, us));
            let (from, to) = (x(dumps.common_us(rank, entry.started_us)), x(ended));
            let (top, height) = if entry.stage.is_some() { (y + 4.0, 16.0) } else { (y + 22.0, 16.0) };
            let colour = match (entry.ended_us, entry.stage) {
                (None, _) => "#c8281e",
                (Some(_), Some(_)) => "#999",
                (Some(_), None) => "#2473bd",
            };
            let _ = writeln!(
                svg,
                "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height}\" fill=\"{colour}\" fill-opacity=\"0.8\">\
                 <title>{}</title></rect>",
                (to - from).max(1.0),
                escape(&hover(entry))
            );
        }
    }
    for wait in &findings.waits {
        let from = TOP + LANE * (wait.rank as f64 + 0.5);
        for missing in wait.missing.iter().filter(|missing| **missing < dumps.ranks) {
            let to = TOP + LANE * (*missing as f64 + 0.5);
            let x = LEFT + WIDTH;
            let tip = if to > from { -6.0 } else { 6.0 };
            let _ = writeln!(
                svg,
                "<path d=\"M{x},{from:.1}C{b},{from:.1} {b},{to:.1} {x},{to:.1}m6,{tip}l-6,{back}l9,{flat}\" fill=\"none\" \
                 stroke=\"#c8281e\"><title>rank {} waits for rank {missing}</title></path>",
                wait.rank,
                b = x + 18.0,
                back = -tip,
                flat = if to > from { -1.0 } else { 1.0 },
            );
        }
    }
    svg + "</svg>\n"
}

/// What a bar says.
fn hover(entry: &Entry) -> String {
    let ms = entry
        .ended_us
        .map_or_else(|| "not ended".into(), |end| format!("{:.3} ms", (end - entry.started_us) / 1e3));
    let step = entry.step.map_or_else(String::new, |step| format!(", step {step}"));
    format!("{}{step}, {ms}, {}", entry.name(), entry.site)
}

/// Text inside an element.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}
