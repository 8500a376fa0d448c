//! `--device meta`: the memory of a step, without computing it.

use phalanx::nn::Parameters;
use phalanx::nn::{Loader, Windows};
use phalanx::tensor::Category;

use crate::args::TrainArgs;
use crate::step::train_step;
use crate::train::{Run, pieces, settings};

/// Runs two steps where there are no elements (the first makes gradients, the second meets them) and tells what the
/// ledger counted at peak.
pub fn report(args: &TrainArgs, run: &mut Run, windows: Windows) -> Result<String, String> {
    let place = &run.place;
    let mut loader = Loader::new(windows, args.batch, pieces(args, place), place.device, 0);
    let settings = settings(args, run.ddp.as_ref());
    for step in 0..2 {
        let micros = loader.next_step().map_err(|e| e.to_string())?;
        train_step(&run.model, &mut run.optimizer, &micros, settings, step).map_err(|e| e.to_string())?;
    }
    let ledger = run.place.device.ledger().map_err(|e| e.to_string())?;
    let parameters: usize = run.model.parameters().iter().map(|p| p.tensor().numel()).sum();
    let of = if place.size() > 1 { ", for each rank" } else { "" };
    let mut report = format!("{parameters} parameters; peak bytes of a training step{of}:\n");
    let rows = Category::ALL.map(|category| (category.name(), ledger.category(category).peak));
    for (name, peak) in rows.into_iter().chain([("in all", ledger.total().peak)]) {
        report += &format!("  {name:<16} {peak:>15}\n");
    }
    Ok(report)
}
