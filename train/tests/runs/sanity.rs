//! Runs that lose their mind: numbers that are not finite are found at their step and traced to rank, micro-batch and parameter; no checkpoint
//! holds them.

use std::cell::RefCell;

use phalanx_nn::{Parameter, Parameters};
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::tensor_parallel::TensorParallel;
use phalanx_tensor::Context;
use phalanx_train::{Asynchronous, Settings, checkpoints};

use super::digests::flip;
use super::packed::{CONTEXT, models, packed, part};
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

thread_local! {
    /// A parameter of this rank that is made unlike its copies.
    static UNLIKE: RefCell<Option<Parameter>> = const { RefCell::new(None) };
}

#[test]
fn ranks_that_begin_with_other_weights_than_their_copies_are_refused() {
    let layout = |dp, tp, pp| Layout { dp, tp, pp, micro_batches: 2, ..Layout::default() };
    let none = "copies that differ, of which none has a majority";
    for (layout, zero, name, wanted) in [
        (layout(3, 1, 1), 0, "h.1.ln_1.weight", "rank 2 has a copy unlike that of ranks 0, 1"),
        (layout(3, 1, 1), 2, "h.1.ln_1.weight", "rank 2 has a copy unlike that of ranks 0, 1"),
        (layout(1, 2, 1), 0, "h.1.ln_1.weight", &format!("ranks 0, 1 have {none}")[..]),
        (layout(1, 1, 2), 0, "wte.weight", &format!("ranks 0, 1 have {none}")),
        (layout(2, 2, 1), 0, "h.1.attn.c_attn.weight", &format!("ranks 1, 3 have {none}")),
    ] {
        let config = Config { batch: 6, ..rows(layout, zero) };
        let trainer = Trainer::new(config.clone()).samples(packed(), CONTEXT);
        // Optimizers are made once DDP and ZeRO have given all replicas the values of the first.
        let trainer = trainer.optimizers(|parameters, lr| {
            if let Some(unlike) = UNLIKE.take() {
                flip(&mut unlike.tensor(), 1, 0)?;
            }
            adamw(parameters, lr)
        });
        let error = trainer.run_parts(|rank| {
            let layers = TensorParallel::new(rank.groups.along(Axis::Tp));
            let part = part(&config, &models()[0], Arc::new(layers), rank)?;
            let of_last = || part.parameters().into_iter().find(|parameter| parameter.name() == name);
            UNLIKE.set(if rank.rank() + 1 == rank.size() { of_last() } else { None });
            Ok(part)
        });
        let error = error.unwrap_err().to_string();
        let wanted =
            format!("the ranks begin with different weights: of parameter {name}, {wanted}; copies of 1 ");
        assert!(error.contains(&wanted), "{error}, wanted {wanted}");
    }
}

/// Of rows 6 and 7, as in [`is_spoilt`], and of a layer that the first stage has.
#[test]
fn an_update_that_is_not_made_without_flushes_names_stage_parameter_and_micro_batch() {
    for (kind, micro_batches) in [(Asynchronous::WeightStashing, 1), (Asynchronous::DoubleBuffered, 4)] {
        let layout = Layout { pp: 2, micro_batches, ..Layout::default() };
        let config = Config { asynchronous: Some(kind), clip: None, ..rows(layout, 0) };
        let is_now = move || Context::current().rng.step == 3 && (micro_batches == 1 || is_spoilt());
        let odd_loss = move |loss: &Var| Ok(loss.mul_scalar(if is_now() { f64::NAN } else { 1.0 })?);
        // Both stages find gradients that are not finite, and the first to say so ends the run. The second one knows the loss.
        let error = (0..20).find_map(|_| {
            let error = of_rows(config.clone(), odd_loss, &Told::default()).unwrap_err().to_string();
            assert!(error.contains(" failed: ") && error.contains("step 3: the norm of the gr"), "{error}");
            Some(error).filter(|error| error.contains("rank 1 failed: "))
        });
        let error = error.expect("an error of rank 1");
        let last = micro_batches - 1;
        assert!(error.contains(&format!("; the loss of micro-batch {last} is NaN")), "{error}");
        assert!(
            error.contains(
                "; gradients that are not finite: 2.bias, 2.weight, 3.bias and 1 more, the first in layer `2`"
            ),
            "{error}"
        );
        let odd_gradient = move |loss: &Var| {
            let root = loss.sub(&loss.mul_scalar(1.0)?)?.sqrt()?.mul_scalar(0.0)?;
            Ok(if is_now() { loss.add(&root)? } else { loss.clone() })
        };
        let error = of_rows(config, odd_gradient, &Told::default()).unwrap_err().to_string();
        let wanted = match micro_batches {
            1 => "; they are those of micro-batch 0",
            _ => "; they are the sum of micro-batches 0 to 3, of which it is not known which is wrong",
        };
        assert!(error.contains(wanted), "{error}");
    }
}

/// Without flushes the numbers of several steps are read together.
#[test]
fn good_steps_before_the_one_that_ends_a_run_are_recorded() {
    let (folder, layout) = (Folder::new(), Layout { pp: 2, micro_batches: 2, ..Layout::default() });
    let base = Config { asynchronous: Some(Asynchronous::DoubleBuffered), clip: None, ..rows(layout, 0) };
    let config = Config { out: Some(folder.path().into()), save_every: 6, explodes_at: 100.0, ..base };
    let jumps = |loss: &Var| {
        let step = Context::current().rng.step;
        Ok(if step == 10 { loss.mul_scalar(1e6)? } else { loss.clone() })
    };
    let error = of_rows(config, jumps, &Told::default()).unwrap_err().to_string();
    assert!(error.contains("step 10: the loss is ") && error.contains("more than 100 times"), "{error}");
    assert!(error.ends_with("are not known, because steps without flushes cannot be repeated"), "{error}");
    let recorded = numbers_in(&folder.path().join("metrics.jsonl"), "loss");
    assert_eq!(recorded.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
}

/// No factor of the loss helps such gradients. Once it is 1, they are the model's own.
#[test]
fn gradients_that_are_never_finite_end_a_run_with_a_loss_scale() {
    let odd_gradient = |loss: &Var| {
        let root = loss.sub(&loss.mul_scalar(1.0)?)?.sqrt()?.mul_scalar(0.0)?;
        Ok(loss.add(&root)?)
    };
    for (on_divergence, first) in [(OnDivergence::Stop, 16), (OnDivergence::Skip { most: 2 }, 18)] {
        let base = rows(Layout::default(), 0);
        let config = Config { loss_scaling: Some(true), steps: 30, on_divergence, ..base };
        let error = of_rows(config, odd_gradient, &Told::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("step {first}: ")) && error.contains("norm NaN"), "{error}");
    }
}

/// A run whose second output, which the loss does not use, has a weight of NaN from the fourth step on.
fn with_a_hidden_nan(folder: &Folder, change: impl Fn(Config) -> Config) -> Result<Summary> {
    let x: Vec<f32> = (0..64).map(|i| (i % 7) as f32).collect();
    let base = rows(Layout { dp: 2, ..Layout::default() }, 0);
    let config = Config { out: Some(folder.path().into()), steps: 4, save_every: 2, ..base };
    let trainer = Trainer::new(change(config)).data(TensorDataset::new(vec![Tensor::from_slice(
        &x,
        &[16, 4],
        Device::CPU,
    )?])?);
    let spoil = |run: &phalanx_train::Run| {
        let weight = run.model().parameters()[0].tensor();
        if run.done() == 3 {
            phalanx_kernels::fill_(&mut weight.select(0, 1)?, f64::NAN)?;
        }
        Ok(None)
    };
    trainer.every(1, spoil).resume_if_there().run(
        |scope| Ok(LinearConfig::new(4, 2).init(scope)?),
        |layer, batch| {
            let [x] = batch.vars()?;
            Ok(layer.forward(&x)?.narrow(1, 0, 1)?.square()?.mean_all()?)
        },
    )
}

#[test]
fn no_checkpoint_with_numbers_that_are_not_finite_takes_the_place_of_a_good_one() {
    let step = |folder: &Folder| checkpoints::latest(folder.path()).unwrap().settings()["step"].clone();
    for keep_last in [1, 2] {
        let folder = Folder::new();
        let error =
            with_a_hidden_nan(&folder, |config| Config { keep_last, ..config }).unwrap_err().to_string();
        assert!(error.contains("\"model.weight\" has numbers that are not finite"), "{error}");
        assert_eq!(step(&folder), "2");
        // The last good checkpoint is resumed.
        let folder_of_two = with_a_hidden_nan(&folder, |config| Config { steps: 2, ..config });
        assert!(folder_of_two.is_ok(), "{folder_of_two:?}");
    }
    let folder = Folder::new();
    with_a_hidden_nan(&folder, |config| Config { allow_not_finite: true, ..config }).unwrap();
    assert_eq!(step(&folder), "4");
    let resumed =
        |allow_not_finite| with_a_hidden_nan(&folder, |c| Config { steps: 6, allow_not_finite, ..c });
    let error = resumed(false).unwrap_err().to_string();
    assert!(error.contains("\"model.weight\" has numbers that are not finite"), "{error}");
    assert_eq!(step(&folder), "4");
    resumed(true).unwrap();
}

#[test]
fn the_checkpoints_of_a_folder_are_listed() {
    let folder = Folder::new();
    let base = config(Layout::default(), 0);
    let config =
        Config { keep_last: 3, save_every: 4, keep_best: true, out: Some(folder.path().into()), ..base };
    run(config, &Told::default()).unwrap();
    std::fs::write(folder.path().join("checkpoint-00000008/checkpoint.json"), "{").unwrap();
    let listed = checkpoints::list(folder.path());
    let names = listed.iter().map(|one| one.path.file_name().unwrap().to_str().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), ["checkpoint-00000004", "checkpoint", "best"]);
    assert_eq!([listed[0].step, listed[1].step], [4, 12]);
    assert!(listed[2].best_loss.is_some_and(|loss| loss <= listed[0].best_loss.unwrap()));
}

#[test]
fn auto_resumes_what_is_there_and_begins_anew_where_nothing_is() {
    let folder = Folder::new();
    let resolve = |words: &[&str]| {
        let mut settings = Settings::new(Config::default());
        settings.words(words.iter().map(|word| word.to_string())).unwrap();
        settings.resolve().map(|config| config.resume)
    };
    let out = folder.path().to_str().unwrap();
    assert_eq!(resolve(&["--resume", "auto", "--out", out]).unwrap(), None);
    run(Config { steps: 2, out: Some(out.into()), ..rows(Layout::default(), 0) }, &Told::default()).unwrap();
    assert_eq!(resolve(&["--resume", "auto", "--out", out]).unwrap(), Some(out.into()));
    assert!(
        resolve(&["--resume", "auto"]).unwrap_err().to_string().contains("goes on with the run in `out`")
    );
}
