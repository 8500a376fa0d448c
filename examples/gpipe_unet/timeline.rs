//! A step of a pipeline as a picture: a row for what each device computes, and one for the copies to it.

use std::fmt::Write;
use std::path::Path;

use phalanx::Device;
use phalanx::parallel::pipeline::gpipe::{Phase, Span};

use crate::Result;

const WIDTH: f64 = 1000.0;
/// Left of the rows, for their names.
const MARGIN: f64 = 80.0;
const ROW: f64 = 30.0;
/// Above the rows, for the legend.
const TOP: f64 = 40.0;
const PHASES: [(Phase, &str, &str); 4] = [
    (Phase::Forward, "forward", "#4c9be8"),
    (Phase::Recompute, "recompute", "#f2c14e"),
    (Phase::Backward, "backward", "#e8694c"),
    (Phase::Copy, "copy", "#7bb274"),
];

/// Writes the spans as an SVG; each cell is marked with its micro-batch.
pub fn draw(path: &Path, spans: &[Span]) -> Result<()> {
    let svg = svg(spans)?;
    let write = phalanx::tensor::io::atomic::write(path, |file| file.write_all(svg.as_bytes()));
    Ok(write.map_err(|e| format!("{}: {e}", path.display()))?)
}

fn svg(spans: &[Span]) -> Result<String> {
    let (begin, end) = (spans.iter().map(|s| s.begin).min(), spans.iter().map(|s| s.end).max());
    let (Some(begin), Some(end)) = (begin, end) else { return Err("nothing was observed".into()) };
    let rows = rows(spans);
    let total_s = (end - begin).as_secs_f64();
    let (width, height) = (MARGIN + WIDTH + 10.0, TOP + ROW * rows.len() as f64 + 30.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (i, (_, name, color)) in PHASES.iter().enumerate() {
        let x = MARGIN + 110.0 * i as f64;
        writeln!(svg, "<rect x=\"{x}\" y=\"12\" width=\"12\" height=\"12\" fill=\"{color}\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"22\">{name}</text>", x + 18.0)?;
    }
    for (i, (device, copies)) in rows.iter().enumerate() {
        let (y, what) = (TOP + ROW * (i as f64 + 0.6), if *copies { "to " } else { "" });
        writeln!(svg, "<text x=\"8\" y=\"{y}\">{what}{device}</text>")?;
    }
    for span in spans {
        let row = rows.iter().position(|row| *row == row_of(span)).unwrap_or_default();
        let x = |t: std::time::Instant| MARGIN + WIDTH * (t - begin).as_secs_f64() / total_s.max(1e-9);
        let (left, wide, y) = (x(span.begin), x(span.end) - x(span.begin), TOP + ROW * row as f64);
        let color =
            PHASES.iter().find(|(phase, ..)| *phase == span.phase).map_or("gray", |(_, _, color)| color);
        let micro_batch = span.cell.micro_batch;
        write!(
            svg,
            "<rect x=\"{left:.1}\" y=\"{y}\" width=\"{wide:.1}\" height=\"{}\" fill=\"{color}\"",
            ROW - 4.0
        )?;
        let (stage, ms) = (span.cell.stage, 1e3 * (span.end - span.begin).as_secs_f64());
        writeln!(svg, "><title>{:?} {micro_batch}, stage {stage}: {ms:.2} ms</title></rect>", span.phase)?;
        if wide > 8.0 {
            writeln!(svg, "<text x=\"{:.1}\" y=\"{}\">{micro_batch}</text>", left + 2.0, y + ROW * 0.6)?;
        }
    }
    writeln!(svg, "<text x=\"{MARGIN}\" y=\"{}\">{:.1} ms</text>\n</svg>", height - 10.0, 1e3 * total_s)?;
    Ok(svg)
}

/// A device, and whether it is about copies to it.
type RowOf = (Device, bool);

fn row_of(span: &Span) -> RowOf {
    (span.device, span.phase == Phase::Copy)
}

fn rows(spans: &[Span]) -> Vec<RowOf> {
    let mut rows: Vec<RowOf> = spans.iter().map(row_of).collect();
    rows.sort();
    rows.dedup();
    rows
}
