//! Runs that lose their mind: numbers that are not finite are found at their step and traced to rank, micro-batch and parameter; no checkpoint
//! holds them.

use phalanx_tensor::Context;

use super::*;

/// A run of rows of four numbers under a layout, whose loss is changed by `spoil`.
fn of_rows(
    config: Config,
    spoil: impl Fn(&Var) -> Result<Var> + Clone + Send + Sync + 'static,
    told: &Told,
) -> Result<Summary> {
    let x: Vec<f32> = (0..256).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let x = Tensor::from_slice(&x, &[64, 4], Device::CPU)?;
    let layers = || {
        let hidden = |from, to| LinearConfig::new(from, to);
        SequentialConfig::new().with(hidden(4, 8)).with(Relu).with(hidden(8, 8)).with(hidden(8, 1))
    };
    let trainer = Trainer::new(config).data(TensorDataset::new(vec![x])?).callback(told.clone());
    trainer.run_layers(layers, move |y, batch| {
        let [x] = batch.vars()?;
        spoil(&y.sub(&x.narrow(1, 0, 1)?)?.square()?.mean_all()?)
    })
}

fn rows(layout: Layout, zero: u8) -> Config {
    Config { validate_every: 0, batch: 8, ..config(layout, zero) }
}

/// Whether this is the pass of rows 6 and 7 in the fourth step.
fn is_spoilt() -> bool {
    let context = Context::current();
    (context.rng.step, context.batch_offset) == (3, 6)
}

/// The cases: a loss that is no number, and a loss whose gradient alone is none (that of a root at 0).
#[test]
fn numbers_that_are_not_finite_are_traced_to_rank_micro_batch_parameter_and_layer() {
    let layout = |dp, pp, micro_batches| Layout { dp, pp, micro_batches, ..Layout::default() };
    let cases = [
        (layout(2, 1, 2), 0, "micro-batch 1 of rank 1", 1),
        (layout(2, 1, 2), 3, "micro-batch 1 of rank 1", 1),
        (layout(1, 2, 4), 0, "micro-batch 3 of rank 1", 0),
        (layout(1, 1, 4), 0, "micro-batch 3 of rank 0", 0),
    ];
    for (layout, zero, place, of_gradients) in cases {
        let case = format!("{layout:?}, ZeRO {zero}");
        let odd_loss = |loss: &Var| Ok(loss.mul_scalar(if is_spoilt() { f64::NAN } else { 1.0 })?);
        let error = of_rows(rows(layout.clone(), zero), odd_loss, &Told::default()).unwrap_err().to_string();
        assert!(error.contains("step 3: the loss is NaN"), "{case}: {error}");
        assert!(error.contains(&format!("the loss of {place} (rows from 6 on) is NaN")), "{case}: {error}");
        let odd_gradient = |loss: &Var| {
            let root = loss.sub(&loss.mul_scalar(1.0)?)?.sqrt()?.mul_scalar(0.0)?;
            Ok(if is_spoilt() { loss.add(&root)? } else { loss.clone() })
        };
        let other = of_rows(rows(layout, zero), odd_gradient, &Told::default()).unwrap_err().to_string();
        assert!(other.contains("step 3: the loss is 0.") && other.contains("norm NaN"), "{case}: {other}");
        let place = format!("in micro-batch {} of rank {of_gradients}", &place[12..13]);
        for error in [error, other] {
            let odd =
                format!("gradients that are not finite {place}: 6, from `0.weight` (layer `0`) to `3.bias`");
            assert!(error.contains(&odd), "{case}: {error}, wanted {odd}");
        }
    }
}
