//! What settings of a run promise: means over tokens, early ends, averages, plateaus, types; files of keys that repeat a run, the best
//! weights at its end, and data that a resumed run must not exchange.

use phalanx_train::{Asynchronous, Settings};

use super::*;

/// Rows that count several times, as sequences of tokens do, have the same mean.
#[test]
fn a_mean_over_tokens_is_the_mean_over_rows() {
    let (rows, tokens) = (Told::default(), Told::default());
    run(config(Layout::default(), 0), &rows).unwrap();
    let [training, held_out] = data();
    let trainer = Trainer::new(config(Layout::default(), 0)).validation(held_out).callback(tokens.clone());
    trainer.samples(Shuffled::new(training, 1).unwrap(), 64).run_layers(layers, loss).unwrap();
    assert_eq!(tokens.losses(), rows.losses());
}

/// Runs on a folder until the end, or until it is stopped after a step. Returns its reports.
pub fn on(folder: &Folder, stop_after: Option<u64>, change: impl Fn(Config) -> Config) -> (Told, Summary) {
    struct StopAfter(Option<u64>, Arc<AtomicBool>);
    impl Callback for StopAfter {
        fn step(&mut self, record: &Record) -> Result<()> {
            self.1.fetch_or(Some(record.step) == self.0, Ordering::Relaxed);
            Ok(())
        }
    }
    let base = Config { out: Some(folder.path().into()), steps: 40, ..config(Layout::default(), 0) };
    let (told, stop) = (Told::default(), Arc::new(AtomicBool::new(false)));
    let trainer = Trainer::new(change(base)).data(pictures(100, None)).validation(pictures(40, None));
    let trainer =
        trainer.callback(told.clone()).callback(StopAfter(stop_after, stop.clone())).stop_when(stop);
    let summary = trainer.resume_if_there().run_layers(layers, loss).unwrap();
    (told, summary)
}

#[test]
fn stops_and_resumes_do_not_change_when_a_run_ends_early() {
    let change = |config: Config| {
        let lr = Schedule::Constant { lr: 0.05, warmup: 0 };
        Config { lr, validate_every: 2, patience: Some(2), ..config }
    };
    let whole = Folder::new();
    let (told, summary) = on(&whole, None, change);
    let steps = told.losses().len();
    assert!((6..40).contains(&steps), "{steps}");
    let folder = Folder::new();
    let mut losses = Vec::new();
    for stop_after in [Some(1), Some(4), None] {
        losses.extend(on(&folder, stop_after, change).0.losses());
    }
    assert_eq!(losses, told.losses());
    // A run that has ended stays as it is.
    let (more, again) = on(&folder, None, change);
    assert_eq!(more.losses().len(), 0);
    assert_eq!((again.best_validation_loss, again.stopped), (summary.best_validation_loss, summary.stopped));
}

#[test]
fn a_validation_loss_that_is_no_number_is_never_the_best() {
    let mut first = true;
    let odd = pictures(40, None);
    let calls = Arc::new(AtomicU64::new(0));
    let counted = calls.clone();
    let odd = odd.map(move |mut tensors: Vec<Tensor>, _, _| {
        // The first pass over the data set.
        if counted.fetch_add(1, Ordering::Relaxed) < 40 {
            tensors[0] = Tensor::from_slice(&[f32::NAN; 64], &[1, 8, 8], Device::CPU)?;
        }
        Ok(tensors)
    });
    let told = Told::default();
    let config = Config { patience: Some(2), ..config(Layout::default(), 0) };
    let trainer = Trainer::new(config).data(pictures(100, None)).validation(odd).callback(told.clone());
    let summary = trainer.run_layers(layers, loss).unwrap();
    for bits in told.validations() {
        assert_eq!(f64::from_bits(bits).is_nan(), std::mem::take(&mut first));
    }
    assert!(summary.best_validation_loss.is_some_and(f64::is_finite));
}

#[test]
fn a_damaged_checkpoint_is_named_and_no_run_is_begun_in_its_place() {
    let folder = Folder::new();
    on(&folder, Some(3), |config| config);
    let file = folder.path().join("checkpoint/checkpoint.json");
    std::fs::write(&file, "{").unwrap();
    let config =
        Config { out: Some(folder.path().into()), validate_every: 0, ..config(Layout::default(), 0) };
    let trainer = Trainer::new(config).data(pictures(100, None)).resume_if_there();
    let error = trainer.run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("checkpoint.json"), "{error}");
}

#[test]
fn every_parameter_has_one_optimizer() {
    type Made = Result<Vec<phalanx_nn::Optimizer<phalanx_train::AnyRule>>>;
    let run = |make: fn(Vec<phalanx_nn::Parameter>, f64) -> Made| {
        let trainer = Trainer::new(Config { validate_every: 0, ..config(Layout::default(), 0) })
            .data(pictures(100, None))
            .optimizers(make);
        trainer.run_layers(layers, loss).map(drop).map_err(|e| e.to_string())
    };
    let error = run(|_, _| Ok(Vec::new())).unwrap_err();
    assert!(error.contains("got 0 optimizers for `0.weight`"), "{error}");
    let error = run(|all, lr| Ok([adamw(all.clone(), lr)?, adamw(all, lr)?].into_iter().flatten().collect()));
    assert!(error.unwrap_err().contains("got 2 optimizers"));
    run(adamw).unwrap();
}

#[test]
fn pictures_are_converted_to_the_models_type() {
    for dtype in [DType::BF16, DType::F64] {
        let told = Told::default();
        let summary =
            run(Config { dtype, ..config(Layout { dp: 2, ..Layout::default() }, 3) }, &told).unwrap();
        assert!(summary.last_loss.is_finite() && summary.validation_loss.is_some_and(f64::is_finite));
    }
}

#[test]
fn averages_of_weights_are_validated_kept_and_the_same_under_every_layout() {
    let average = |layout: Layout, zero| {
        let told = Told::default();
        run(Config { ema: Some(0.9), ..config(layout, zero) }, &told).unwrap();
        told
    };
    let (one, plain) = (average(Layout { micro_batches: 2, ..Layout::default() }, 0), Told::default());
    run(config(Layout { micro_batches: 2, ..Layout::default() }, 0), &plain).unwrap();
    assert_eq!(one.losses(), plain.losses());
    assert_ne!(one.validations(), plain.validations());
    let staged = average(Layout { pp: 2, micro_batches: 2, ..Layout::default() }, 0);
    assert_eq!((staged.losses(), staged.validations()), (one.losses(), one.validations()));
    let two = |zero| average(Layout { dp: 2, ..Layout::default() }, zero);
    for zero in [1, 2, 3] {
        assert_eq!(
            (two(zero).losses(), two(zero).validations()),
            (two(0).losses(), two(0).validations()),
            "{zero}"
        );
    }
    // A resume continues the average.
    let change = |config: Config| Config { ema: Some(0.9), steps: 12, validate_every: 4, ..config };
    let (whole, folder) = (Folder::new(), Folder::new());
    let wanted = on(&whole, None, change).0;
    on(&folder, Some(5), change);
    assert_eq!(on(&folder, None, change).0.validations().last(), wanted.validations().last());
}

#[test]
fn a_plateau_lowers_the_rate_and_a_resume_knows_it() {
    let still = Schedule::Constant { lr: 1e-9, warmup: 0 };
    let plateau = Some(phalanx_train::Plateau { factor: 0.5, patience: 1 });
    let rates = |folder: &Folder, stop_after| {
        on(folder, stop_after, |config| Config {
            lr: still,
            steps: 12,
            validate_every: 2,
            plateau,
            save_every: 2,
            ..config
        });
        numbers_in(&folder.path().join("metrics.jsonl"), "lr")
    };
    let (whole, folder) = (Folder::new(), Folder::new());
    let wanted = rates(&whole, None);
    assert!(wanted.last().is_some_and(|(_, lr)| *lr < 1e-9), "{wanted:?}");
    // Validations are behind steps 1, 3, ..; the rate that they lower is that of the steps after them.
    assert!(wanted.chunks(2).all(|pair| pair[0].1 == pair[1].1), "{wanted:?}");
    rates(&folder, Some(7));
    assert_eq!(rates(&folder, None), wanted);
}

#[test]
fn losses_of_a_model_in_f16_are_scaled() {
    let layers = || SequentialConfig::new().with(Flatten::default()).with(LinearConfig::new(64, 2));
    let train = |dtype, dp| {
        let told = Told::default();
        let config =
            Config { dtype, steps: 30, validate_every: 0, ..config(Layout { dp, ..Layout::default() }, 0) };
        let trainer = Trainer::new(config).data(pictures(100, None)).callback(told.clone());
        trainer.run_layers(layers, loss).unwrap();
        told
    };
    let (half, whole) = (train(DType::F16, 1), train(DType::F32, 1));
    let last = |told: &Told| f64::from_bits(*told.losses().last().unwrap());
    assert!((last(&half) - last(&whole)).abs() < 0.02, "{} {}", last(&half), last(&whole));
    // A factor of which gradients overflow is found on every rank, and its steps are left out.
    assert!(half.events().iter().all(|event| event.starts_with("skipped")) && !half.events().is_empty());
    assert_eq!(train(DType::F16, 2).losses().len(), 30);
}

/// Without running statistics, which only a replica's own rows change, validations are the same under replicas, too.
#[test]
fn replicas_validate_with_the_bits_of_one_rank() {
    let layers = || SequentialConfig::new().with(Flatten::default()).with(LinearConfig::new(64, 2));
    let validations = |layout: Layout, zero, chains| {
        let told = Told::default();
        let [training, held_out] = data();
        let config = Config { chains, ..config(layout, zero) };
        let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
        trainer.run_layers(layers, loss).unwrap();
        (told.losses(), told.validations())
    };
    let one = validations(Layout::default(), 0, 2);
    for (dp, pp, zero) in [(2, 1, 0), (2, 1, 3), (2, 2, 1)] {
        let layout = Layout { dp, pp, ..Layout::default() };
        assert_eq!(validations(layout, zero, 1), one, "dp {dp} x pp {pp}, ZeRO {zero}");
    }
}

#[test]
fn settings_of_validations_without_their_data_are_refused() {
    let base = || Config { validate_every: 0, ..config(Layout::default(), 0) };
    let plateau = Some(phalanx_train::Plateau { factor: 0.5, patience: 1 });
    for (config, name) in [
        (Config { validate_every: 3, ..base() }, "`validate-every`"),
        (Config { keep_best: true, out: Some(Folder::new().path().into()), ..base() }, "`keep-best`"),
        (Config { validate_every: 3, plateau, ..base() }, "`validate-every`"),
    ] {
        let error =
            Trainer::new(config).data(pictures(40, None)).run_layers(layers, loss).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("without validation data"), "{error}");
    }
    let config = Config { device: Device::Meta(0), ..base() };
    let error =
        Trainer::new(config).data(pictures(40, None)).run_layers(layers, loss).unwrap_err().to_string();
    assert!(error.contains("memory_report"), "{error}");
}

fn flat() -> SequentialConfig {
    SequentialConfig::new()
        .with(Flatten::default())
        .with(LinearConfig::new(64, 8))
        .with(LinearConfig::new(8, 2))
}

#[test]
fn a_run_writes_the_file_that_repeats_it_before_its_first_step() {
    let folder = Folder::new();
    let out = folder.path().to_path_buf();
    let config = Config { out: Some(out.clone()), ..config(Layout::default(), 0) };
    let written = out.join("config.toml");
    let seen = Arc::new(Mutex::new(Config::default()));
    let [training, held_out] = data();
    let read = seen.clone();
    let hook = move |run: &phalanx_train::Run| {
        if run.done() == 1 {
            let mut settings = Settings::new(Config::default());
            settings.read(&written)?;
            *read.lock().unwrap() = settings.resolve()?;
        }
        Ok(None)
    };
    let trainer = Trainer::new(config.clone()).data(training).validation(held_out).every(1, hook);
    trainer.run_layers(flat, loss).unwrap();
    assert_eq!(*seen.lock().unwrap(), config);
}

#[test]
fn a_run_ends_with_its_best_weights_if_it_is_to() {
    let best = |restore_best: bool| {
        let folder = Folder::new();
        let out = Some(folder.path().to_path_buf());
        let config = Config {
            lr: Schedule::Constant { lr: 0.05, warmup: 0 },
            keep_best: true,
            restore_best,
            validate_every: 2,
            out,
            ..config(Layout::default(), 0)
        };
        let told = Arc::new(Mutex::new((0.0, 0.0)));
        let end = told.clone();
        // Labels independent of the images, so that training increases their loss.
        let held_out = pictures(40, None).map(|item, index, _| {
            let label = Tensor::from_slice(&[(index / 20) as i64], &[1], Device::CPU)?.with_shape(&[])?;
            Ok(vec![item[0].clone(), label])
        });
        let trainer =
            Trainer::new(config).data(pictures(200, None)).validation(held_out).at_end(move |run| {
                *end.lock().unwrap() = (run.validate()?, run.best_loss().unwrap());
                Ok(())
            });
        trainer.run_layers(flat, loss).unwrap();
        let (last, best) = *told.lock().unwrap();
        last.to_bits() == best.to_bits()
    };
    assert_eq!((best(true), best(false)), (true, false));
}

#[test]
fn a_run_goes_on_with_its_own_data_only() {
    let folder = Folder::new();
    let run = |rows: usize, steps: u64, spoilt: Option<usize>| {
        let config = Config {
            steps,
            validate_every: 0,
            out: Some(folder.path().into()),
            ..config(Layout::default(), 0)
        };
        Trainer::new(config).data(pictures(rows, spoilt)).resume_if_there().run_layers(flat, loss)
    };
    run(100, 2, None).unwrap();
    let error = run(99, 3, None).unwrap_err().to_string();
    assert!(error.contains("the run began with `data` 100 items"), "{error}");
    run(100, 3, None).unwrap();
}

/// The rows of a validation are a sample of all, the same each time, and another seed's are others.
#[test]
fn rows_of_a_validation_are_drawn() {
    let validations = |rows: Option<usize>, seed: u64| {
        let told = Told::default();
        let lr = Schedule::Constant { lr: 0.0, warmup: 0 };
        let config = Config {
            lr,
            validation_rows: rows,
            seed,
            steps: 4,
            validate_every: 2,
            ..config(Layout::default(), 0)
        };
        let rows: Vec<f32> = (0..50).map(|row| row as f32).collect();
        let held_out =
            TensorDataset::new(vec![Tensor::from_slice(&rows, &[50, 1], Device::CPU).unwrap()]).unwrap();
        let training =
            TensorDataset::new(vec![Tensor::from_slice(&rows, &[50, 1], Device::CPU).unwrap()]).unwrap();
        let model = move |scope: &phalanx_nn::Scope| Ok(LinearConfig::new(1, 1).init(scope)?);
        let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
        trainer
            .run(model, |model, batch| {
                let [x] = batch.vars()?;
                // The mean of the rows, with a gradient of zero for the weights.
                Ok(((&x + (model.forward(&x)? * 0.0)?)?).mean_all()?)
            })
            .unwrap();
        let all = told.validations();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "the same rows each time");
        f64::from_bits(all[0])
    };
    assert!((validations(None, 1) - 24.5).abs() < 1e-5);
    let (one, other) = (validations(Some(10), 1), validations(Some(10), 2));
    assert!((one - 4.5).abs() > 1e-3 && one != other && (10.0..40.0).contains(&one), "{one} {other}");
}

#[test]
fn a_pipeline_without_flushes_converts_batches_and_names_the_step_that_fails() {
    let layout = Layout { pp: 2, ..Layout::default() };
    let base = |dtype| Config {
        dtype,
        asynchronous: Some(Asynchronous::WeightStashing),
        validate_every: 0,
        ..config(layout.clone(), 0)
    };
    let train =
        |dtype| Trainer::new(base(dtype)).data(pictures(100, None)).run_layers(flat, loss).unwrap().last_loss;
    let (wide, single) = (train(DType::F64), train(DType::F32));
    assert!((wide - single).abs() < 1e-4, "{wide} {single}");
    // Of the 4 samples of each step, the 9th is in step 2.
    let config = Config { batch: 4, ..base(DType::F32) };
    let samples = Failing(Shuffled::new(pictures(100, None), 1).unwrap());
    let error =
        Trainer::new(config.clone()).samples(samples, 1).run_layers(flat, loss).unwrap_err().to_string();
    assert!(error.contains("step 2"), "{error}");
    let micro = Config { layout: Layout { micro_batches: 2, ..layout.clone() }, ..config };
    let error = micro.check().unwrap_err().to_string();
    assert!(error.contains("`micro-batches` 2, wanted 1"), "{error}");
}

struct Failing<S>(S);

impl<S: phalanx_train::data::Samples> phalanx_train::data::Samples for Failing<S> {
    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        match number {
            9 => Err(phalanx_train::Error::data("sample 9", "it is gone")),
            _ => self.0.sample(number),
        }
    }
}

/// A loss that is many times the last ones, but no more than the first, is that of a run that has learned nearly everything.
#[test]
fn small_losses_do_not_explode() {
    // Only small ones are among the last 32 when the peak comes.
    let losses: Vec<f32> = (0..70).map(|step| if step < 10 { 4.0 } else { 0.001 }).collect();
    let train = |peak: f32| {
        let mut losses = losses.clone();
        losses[60] = peak;
        let rows = Tensor::from_slice(&losses, &[70, 1], Device::CPU).unwrap();
        let data = TensorDataset::new(vec![rows]).unwrap();
        let lr = Schedule::Constant { lr: 0.0, warmup: 0 };
        let config = Config { batch: 1, steps: 70, lr, validate_every: 0, ..config(Layout::default(), 0) };
        let samples = phalanx_train::data::Ordered::new(data).unwrap();
        Trainer::new(config).samples(samples, 1).run(
            |scope| Ok(LinearConfig::new(1, 1).init(scope)?),
            |model, batch| {
                let [x] = batch.vars()?;
                Ok(((&x + (model.forward(&x)? * 0.0)?)?).mean_all()?)
            },
        )
    };
    train(3.9).unwrap();
    let error = train(50.0).unwrap_err().to_string();
    assert!(error.contains("step 60") && error.contains("more than 10 times"), "{error}");
}
