//! The loss curve as a picture.

use std::path::Path;

use plotters::prelude::*;

/// Draws `(step, loss)` points to an SVG file.
pub fn loss(path: &Path, points: &[(u64, f64)]) -> Result<(), String> {
    let Some((&(first, _), &(last, _))) = points.first().zip(points.last()) else { return Ok(()) };
    let high = points.iter().map(|p| p.1).filter(|l| l.is_finite()).fold(f64::MIN, f64::max);
    let low = points.iter().map(|p| p.1).filter(|l| l.is_finite()).fold(f64::MAX, f64::min);
    if low > high {
        return Ok(());
    }
    let mut svg = String::new();
    draw(&mut svg, points, first..last.max(first + 1), (low * 0.95)..(high * 1.02))
        .map_err(|e| e.to_string())?;
    phalanx::tensor::io::atomic::write(path, |file| file.write_all(svg.as_bytes())).map_err(|e| e.to_string())
}

fn draw(
    svg: &mut String,
    points: &[(u64, f64)],
    steps: std::ops::Range<u64>,
    losses: std::ops::Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (800, 450)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("training loss", ("sans-serif", 20))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(55)
        .build_cartesian_2d(steps, losses)?;
    chart.configure_mesh().x_desc("step").y_desc("nats per token").draw()?;
    let curve = points.iter().copied().filter(|p| p.1.is_finite());
    chart.draw_series(LineSeries::new(curve, BLUE.stroke_width(2)))?;
    root.present()?;
    Ok(())
}
