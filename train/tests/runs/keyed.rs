//! What configurations by keys bring to runs: files that repeat them, the best weights at the end, data that is told apart, rows that are
//! drawn, pipelines without flushes.

use phalanx_train::{Asynchronous, Settings};

use super::*;

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
        // Labels that have nothing to do with the pictures, so that what is learned makes their loss larger.
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
