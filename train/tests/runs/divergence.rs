//! Losses that are no numbers, or explode: found at their step, and dealt with alike on all ranks.

use super::*;

/// The batches of a run whose items have a NaN somewhere.
fn spoilt(config: Config, told: &Told) -> Result<Summary> {
    let trainer = Trainer::new(config).data(pictures(400, Some(77))).validation(pictures(40, None));
    trainer.callback(told.clone()).run_layers(layers, loss)
}

#[test]
fn a_nan_is_found_at_its_step_on_any_rank() {
    let steps = |layout| {
        let told = Told::default();
        let error = spoilt(config(layout, 0), &told).unwrap_err().to_string();
        assert!(error.contains("the loss is NaN") && error.contains("tensor 0 of the batch"), "{error}");
        let step = format!("step {}", told.losses().len());
        assert!(error.contains(&step), "{error}, wanted {step}");
        told.losses().len()
    };
    let one = steps(Layout::default());
    assert!(one < 10);
    assert_eq!(steps(Layout { dp: 2, ..Layout::default() }), one);
}

#[test]
fn a_step_with_a_nan_is_skipped_and_training_goes_on() {
    let told = Told::default();
    let config = Config {
        on_divergence: OnDivergence::Skip { most: 1 },
        ..config(Layout { dp: 2, ..Layout::default() }, 3)
    };
    let summary = spoilt(config, &told).unwrap();
    assert_eq!((told.losses().len(), told.events().len()), (12, 1));
    assert!(summary.last_loss.is_finite());
    // Nor does the batch stay in batch norm's running statistics.
    assert!(summary.validation_loss.is_some_and(f64::is_finite));
    let odd = told.losses().iter().filter(|bits| f64::from_bits(**bits).is_nan()).count();
    assert_eq!(odd, 1);
}

#[test]
fn a_run_goes_back_to_its_checkpoint_and_on_with_other_data() {
    let (told, folder) = (Told::default(), Folder::new());
    let out = Some(folder.path().to_path_buf());
    let on_divergence = OnDivergence::Rollback { most: 1 };
    let config =
        Config { on_divergence, save_every: 1, out, ..config(Layout { dp: 2, ..Layout::default() }, 1) };
    let summary = spoilt(config.clone(), &told).unwrap();
    assert!(told.events().iter().any(|event| event.starts_with("back from")), "{:?}", told.events());
    assert!(summary.last_loss.is_finite());
    assert_eq!(numbers_in(&folder.path().join("metrics.jsonl"), "loss").len(), 12);
    let table = std::fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 13, "{table}");
    // There is nothing to go back to.
    let never = Config { save_every: 100, out: Some(Folder::new().path().into()), ..config };
    let error = spoilt(never, &Told::default()).unwrap_err().to_string();
    assert!(error.contains("the loss is NaN"), "{error}");
}

#[test]
fn an_exploding_loss_is_found() {
    let config = Config {
        explodes_at: 3.0,
        steps: 40,
        clip: None,
        lr: Schedule::Step { lr: 1e-3, step_size: 10, gamma: 1e7 },
        ..config(Layout::default(), 0)
    };
    let dp = Config { layout: Layout { dp: 2, ..Layout::default() }, ..config.clone() };
    for config in [config, dp] {
        let error = run(config, &Told::default()).unwrap_err().to_string();
        assert!(error.contains("more than 3 times the last ones' mean"), "{error}");
        let named = error.split("; the largest gradient is that of ").nth(1).unwrap_or_default();
        assert!(named.contains("weight") || named.contains("bias"), "{error}");
    }
}

/// What losses are compared with is in the checkpoint: a run that has just gone on knows what its losses were.
#[test]
fn an_exploding_loss_is_found_behind_a_resume() {
    let folder = Folder::new();
    let change = |config: Config| {
        let lr = Schedule::Step { lr: 1e-3, step_size: 10, gamma: 1e7 };
        Config { explodes_at: 3.0, steps: 16, clip: None, lr, ..config }
    };
    settings::on(&folder, Some(8), change);
    let base = Config { out: Some(folder.path().into()), ..config(Layout::default(), 0) };
    let trainer = Trainer::new(change(base)).data(pictures(100, None)).validation(pictures(40, None));
    let error = trainer.resume_if_there().run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("more than 3 times the last ones' mean"), "{error}");
}
