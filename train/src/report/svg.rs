//! [`loss`]: the loss curve as an SVG picture, 800 by 450.

use std::fmt::Write;

use super::format::{escape, grouped, number};

/// The borders of the plot: left, top, right, bottom.
const BOX: [f64; 4] = [70.0, 40.0, 785.0, 400.0];

/// The picture, or nothing if no loss is finite. Points are steps and losses in order of the steps; a loss that is not finite is a gap.
pub fn loss(training: &[(u64, f64)], validation: &[(u64, f64)], unit: &str) -> Option<String> {
    let all = || training.iter().chain(validation).copied().filter(|point| point.1.is_finite());
    let losses = range(all().map(|point| point.1))?;
    let steps = range(all().map(|point| point.0 as f64))?;
    let [left, top, right, bottom] = BOX;
    let steps = [steps[0], steps[1].max(steps[0] + 1.0)];
    let room = match losses[1] - losses[0] {
        0.0 => losses[0].abs().max(1.0) * 0.1,
        width => width * 0.04,
    };
    let losses = [losses[0] - room, losses[1] + room];
    let x = |step: f64| left + (step - steps[0]) / (steps[1] - steps[0]) * (right - left);
    let y = |loss: f64| bottom - (loss - losses[0]) / (losses[1] - losses[0]) * (bottom - top);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"450\" viewBox=\"0 0 800 450\" \
         font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n<title>Loss over steps</title>\n\
         <rect width=\"800\" height=\"450\" fill=\"#fff\"/>\n",
    );
    for step in ticks(steps, 8.0, true) {
        line(&mut svg, [x(step), top, x(step), bottom]);
        text(&mut svg, [x(step), bottom + 18.0], "middle", &grouped(step as u64));
    }
    for loss in ticks(losses, 7.0, false) {
        line(&mut svg, [left, y(loss), right, y(loss)]);
        text(&mut svg, [left - 8.0, y(loss) + 4.0], "end", &number(loss));
    }
    text(&mut svg, [right, bottom + 38.0], "end", "step");
    let mut at = left;
    for (name, colour, points) in [("training", "#2473bd", training), ("validation", "#b5430c", validation)] {
        if !points.is_empty() {
            let path = path(points, |(step, loss)| (x(step as f64), y(loss)));
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linecap=\"round\"/>\n\
                 <rect x=\"{at}\" y=\"15\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            );
            text(&mut svg, [at + 18.0, 26.0], "start", &format!("{name} loss"));
            at += 140.0;
        }
    }
    text(&mut svg, [right, 26.0], "end", unit);
    Some(svg + "</svg>\n")
}

/// The smallest and the largest value.
fn range(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    values.map(|v| [v, v]).reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])])
}

/// About `count` ticks within a range, at distances of 1, 2 or 5 times a power of ten; `whole` numbers for steps.
fn ticks([low, high]: [f64; 2], count: f64, whole: bool) -> Vec<f64> {
    let rough = (high - low) / count;
    let power = 10f64.powf(rough.log10().floor());
    let distance =
        [1.0, 2.0, 5.0, 10.0].map(|f| f * power).into_iter().find(|&d| d >= rough).unwrap_or(rough);
    let distance = if whole { distance.max(1.0) } else { distance };
    let first = (low / distance).ceil();
    (0..).map(|i| (first + f64::from(i)) * distance).take_while(|&tick| tick <= high).collect()
}

/// A path that breaks at gaps. Of points in one pixel column the first, the last, the lowest and the highest remain.
fn path(points: &[(u64, f64)], place: impl Fn((u64, f64)) -> (f64, f64)) -> String {
    let mut d = String::new();
    for run in points.split(|point| !point.1.is_finite()) {
        let places: Vec<(f64, f64)> = run.iter().map(|&point| place(point)).collect();
        for (at, column) in places.chunk_by(|a, b| a.0.floor() == b.0.floor()).enumerate() {
            let by_height = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
            let mut kept = vec![0, column.len() - 1];
            kept.extend((0..column.len()).min_by(by_height));
            kept.extend((0..column.len()).max_by(by_height));
            kept.sort_unstable();
            kept.dedup();
            for (i, &index) in kept.iter().enumerate() {
                let command = if at + i == 0 { 'M' } else { 'L' };
                let _ = write!(d, "{command}{:.1},{:.1}", column[index].0, column[index].1);
            }
        }
        if run.len() == 1 {
            d.push_str("h0"); // a dot
        }
    }
    d
}

fn line(svg: &mut String, [x1, y1, x2, y2]: [f64; 4]) {
    let _ = writeln!(svg, "<path d=\"M{x1:.1},{y1:.1}L{x2:.1},{y2:.1}\" stroke=\"#ddd\"/>");
}

fn text(svg: &mut String, [x, y]: [f64; 2], anchor: &str, text: &str) {
    let text = escape(text);
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_is_a_gap() {
        let svg = loss(&[(0, 4.0), (1, 3.0), (2, f64::NAN), (3, 2.0)], &[], "nats").unwrap();
        assert!(svg.contains("<path d=\"M70.0,53.3L308.3,220.0M785.0,386.7h0\""), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("validation"), "{svg}");
    }

    #[test]
    fn without_a_finite_loss_there_is_no_picture() {
        assert_eq!(loss(&[], &[], ""), None);
        assert_eq!(loss(&[(0, f64::INFINITY)], &[], ""), None);
        assert!(loss(&[(5, 1.0)], &[], "").is_some(), "one point is a dot");
    }

    #[test]
    fn many_points_make_a_small_picture() {
        let points: Vec<_> = (0..200_000u64).map(|s| (s, (s as f64).sin())).collect();
        let svg = loss(&points, &points[..10], "<nats>").unwrap();
        assert!(svg.len() < 60_000, "{} bytes", svg.len());
        assert!(svg.contains("&lt;nats&gt;"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(
            ticks([0.0, 400.0], 8.0, true),
            [0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0, 350.0, 400.0]
        );
        assert_eq!(ticks([0.0, 2.0], 8.0, true), [0.0, 1.0, 2.0]);
    }
}
