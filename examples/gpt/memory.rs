//! `--device meta`: the memory of a step, without computing it.

use phalanx::nn::Parameters;
use phalanx::nn::{Loader, Windows};
use phalanx::tensor::Category;

use crate::args::TrainArgs;
use crate::step::{Settings, train_step};
use crate::train::{Run, pieces};

/// Runs two steps where there are no elements (the first makes gradients, the second meets them) and prints what the
/// ledger counted at peak.
pub fn report(args: &TrainArgs, run: &mut Run, windows: Windows) -> Result<(), String> {
    let mut loader = Loader::new(windows, args.batch, pieces(args), args.device, 0);
    let settings = Settings { groups: args.emulate_dp, clip: args.clip, seed: args.seed };
    for step in 0..2 {
        let micros = loader.next_step().map_err(|e| e.to_string())?;
        train_step(&run.model, &mut run.optimizer, &micros, settings, step).map_err(|e| e.to_string())?;
    }
    let ledger = args.device.ledger().map_err(|e| e.to_string())?;
    let parameters: usize = run.model.parameters().iter().map(|p| p.tensor().numel()).sum();
    println!("{parameters} parameters; peak bytes of a training step:");
    for category in Category::ALL {
        println!("  {:<16} {:>15}", category.name(), ledger.category(category).peak);
    }
    println!("  {:<16} {:>15}", "in all", ledger.total().peak);
    Ok(())
}
