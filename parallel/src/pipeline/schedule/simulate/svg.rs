//! A timeline as a picture.

use std::fmt::Write;

use super::super::Kind;
use super::text::label;
use super::{Span, Timeline};

/// Pixels: the picture's width, a rank's height, the room for its name, and a character's width.
const WIDTH: f64 = 1200.0;
const LANE: f64 = 26.0;
const NAME: f64 = 60.0;
const LETTER: f64 = 7.0;

impl Timeline {
    /// An SVG with a lane for each rank, and the bubbles, the makespan and the activations beneath.
    pub fn to_svg(&self) -> String {
        let scale = (WIDTH - NAME) / self.makespan().max(f64::MIN_POSITIVE);
        let height = LANE * (self.ranks.len() + 1) as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        for (rank, spans) in self.ranks.iter().enumerate() {
            let top = LANE * rank as f64;
            let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">rank {rank}</text>", top + 0.65 * LANE);
            spans.iter().for_each(|span| draw(&mut svg, span, top, scale));
        }
        let _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{:.1}\">makespan {:.4}, bubble {:.4} of the makespan, {:.4} of the longest span, activations {:.4}</text>\n</svg>",
            height - 0.35 * LANE,
            self.makespan(),
            self.bubble_by_makespan(),
            self.bubble_by_span(),
            self.peak_activation(),
        );
        svg
    }
}

/// One computation: a box, its name if there is room, and both in full where the pointer rests. Writing to a string does not fail.
fn draw(svg: &mut String, span: &Span, top: f64, scale: f64) {
    let Span { action, begin, end } = span;
    let fill = match action.kind {
        Kind::Forward => "#8ecae6",
        Kind::Input => "#ffd166",
        Kind::Weight => "#95d5b2",
        _ => "#f4a261",
    };
    let (left, width) = (NAME + begin * scale, (end - begin) * scale);
    let _ = write!(
        svg,
        "<g><title>{action} {begin:.4} to {end:.4}</title><rect x=\"{left:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" \
         fill=\"{fill}\" stroke=\"white\"/>",
        top + 2.0,
        LANE - 4.0,
    );
    let name = label(span, (width / LETTER) as usize);
    let (x, y) = (left + 2.0, top + 0.65 * LANE);
    let _ = writeln!(svg, "<text x=\"{x:.2}\" y=\"{y:.1}\" pointer-events=\"none\">{name}</text></g>");
}
