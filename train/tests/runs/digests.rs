//! Digests: the same under every layout that adds in the same order; a wrong bit is found to its step, parameter and rank.

use phalanx_nn::OneDevice;
use phalanx_nn::models::ModelConfig;
use phalanx_nn::{AdamW, Group, Optimizer, Parameter, Parameters, Rule, StepHyperparameters};
use phalanx_train::{AnyRule, Error, Replay, Replayed, Run, StepDigests, adafactor, lamb, muon};

use super::packed::{CONTEXT, models, packed, part};
use super::*;

/// The digests of a run's steps.
#[derive(Clone, Default)]
struct Digests(Arc<Mutex<Vec<Option<StepDigests>>>>);

impl Callback for Digests {
    fn step(&mut self, record: &Record) -> Result<()> {
        self.0.lock().unwrap().push(record.digests.clone());
        Ok(())
    }
}

fn digests(config: Config) -> Vec<Option<StepDigests>> {
    let (told, [training, held_out]) = (Digests::default(), data());
    let config = Config { digests: 2, steps: 4, check_replicas: 1, ..config };
    let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
    trainer.run_layers(layers, loss).unwrap();
    let told = told.0.lock().unwrap();
    told.clone()
}

#[test]
fn digests_are_those_of_one_rank_under_every_layout() {
    let layout = |dp, pp, micro_batches| Layout { dp, pp, micro_batches, ..Layout::default() };
    let one = digests(Config { chains: 2, ..config(layout(1, 1, 2), 0) });
    let due: Vec<bool> = one.iter().map(Option::is_some).collect();
    assert_eq!(due, [false, true, false, true]);
    let [first, second] = [1, 3].map(|step| one[step].clone().unwrap());
    let names = |of: &StepDigests| of.parameters.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&first), ["0.bias", "0.weight", "1.bias", "1.weight", "6.bias", "6.weight"]);
    assert!(first.gradients.len() == 6 && first.gradients != second.gradients);
    assert!(first.parameters.iter().all(|(name, digest)| second.parameters[name] != *digest));
    for (dp, pp, zero) in [(2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3), (2, 2, 0), (2, 2, 3), (2, 3, 1)] {
        let got = digests(config(layout(dp, pp, 2), zero));
        assert_eq!(got, one, "dp {dp}, pp {pp}, ZeRO {zero}");
    }
}

/// State that belongs to whole parameters, too.
#[test]
fn optimizer_state_of_every_rule_is_alike_on_the_ranks_that_share_it() {
    for rule in ["muon", "lamb", "adafactor"] {
        for (dp, zero) in [(2, 0), (2, 1), (2, 3)] {
            let layout = Layout { dp, ..Layout::default() };
            let config = Config { steps: 3, check_replicas: 1, validate_every: 0, ..config(layout, zero) };
            let trainer = Trainer::new(config).data(data()[0].clone());
            let trainer = trainer.optimizers(move |parameters, lr| match rule {
                "muon" => muon(parameters, lr, 0.1, Parameter::is_matrix),
                "lamb" => lamb(parameters, lr, 0.1),
                _ => adafactor(parameters, lr, 0.1),
            });
            let done = trainer.run_layers(layers, loss);
            assert!(done.is_ok(), "{rule}, ZeRO {zero}: {}", done.unwrap_err());
        }
    }
}

/// Flips a bit of a number.
pub fn flip(tensor: &mut Tensor, at: usize, bit: u32) -> phalanx_tensor::Result<()> {
    let mut values = tensor.to_vec::<f32>()?;
    values[at] = f32::from_bits(values[at].to_bits() ^ (1 << bit));
    tensor.copy_from(&Tensor::from_slice(&values, tensor.shape(), Device::CPU)?)
}

/// AdamW, on whose rank a bit of the first gradient of the eighth step is wrong after the ranks have added theirs.
struct Flipping(AdamW);

impl Rule for Flipping {
    fn state(&self) -> Vec<&'static str> {
        self.0.state()
    }

    fn update(
        &self,
        step: phalanx_kernels::optim::Step<'_>,
        hyper: StepHyperparameters,
    ) -> phalanx_nn::Result<()> {
        if hyper.step == 8 {
            flip(&mut step.items[0].slice.grad.clone(), 0, 31)?;
        }
        self.0.update(step, hyper)
    }
}

/// The error of a run of `dp` replicas in which `rank` has a wrong bit: in a weight after `step` steps, or in a gradient.
fn with_a_wrong_bit(dp: usize, rank: usize, step: Option<u64>) -> String {
    let config = Config {
        check_replicas: 1,
        batch: 12,
        validate_every: 0,
        ..config(Layout { dp, ..Layout::default() }, 0)
    };
    let flips = move |run: &Run| {
        if run.mesh_rank().rank() == rank && Some(run.done()) == step {
            flip(&mut run.model().parameters()[4].tensor(), 5, 0)?;
        }
        Ok(None)
    };
    let made = AtomicU64::new(0);
    let optimizers = move |parameters: Vec<phalanx_nn::Parameter>, lr: f64| {
        // One rank's rule is wrong; which rank's, is found out.
        let first = made.fetch_add(1, Ordering::Relaxed) == 0 && step.is_none();
        let rule: AnyRule =
            if first { Box::new(Flipping(AdamW::default())) } else { Box::new(AdamW::default()) };
        Ok(vec![Optimizer::new(rule, vec![Group::new(parameters, lr)])?])
    };
    let trainer = Trainer::new(config).data(pictures(120, None)).every(1, flips).optimizers(optimizers);
    trainer.run_layers(layers, loss).unwrap_err().to_string()
}

#[test]
fn a_replica_with_a_wrong_bit_is_named_at_its_step() {
    for (dp, rank, step) in [(3, 1, 7), (4, 3, 2), (3, 0, 9)] {
        let error = with_a_wrong_bit(dp, rank, Some(step));
        let others: Vec<String> =
            (0..dp).filter(|other| *other != rank).map(|other| other.to_string()).collect();
        let wanted = format!(
            "step {step}: silent data corruption: of parameter 6.weight, rank {rank} has a copy unlike that of ranks {}; copies of 1",
            others.join(", ")
        );
        assert!(error.contains(&wanted), "dp {dp}: {error}, wanted {wanted}");
    }
    let two = with_a_wrong_bit(2, 1, Some(6));
    assert!(
        two.contains("step 6: ") && two.contains("ranks 0, 1 have copies that differ, of which none"),
        "{two}"
    );
    let gradient = with_a_wrong_bit(3, 0, None);
    assert!(gradient.contains("step 7: silent data corruption: of parameter 0.weight, rank "), "{gradient}");
}

fn of_texts(folder: &Folder, layout: Layout, zero: u8) -> (Config, ModelConfig, Trainer) {
    let base = Config { validate_every: 0, digests: 1, ..config(layout, zero) };
    let out = Some(folder.path().to_path_buf());
    let config = Config { steps: 9, save_every: 3, keep_last: 3, out, ..base };
    let trainer = Trainer::new(config.clone()).samples(packed(), CONTEXT);
    (config, models()[0].clone(), trainer)
}

/// A run of two replicas, in whose weights a bit is wrong on all ranks after some step.
fn recorded(wrong_after: Option<u64>) -> Folder {
    let folder = Folder::new();
    let (config, model, trainer) = of_texts(&folder, Layout { dp: 2, ..Layout::default() }, 0);
    let flips = move |run: &Run| {
        if Some(run.done()) == wrong_after {
            flip(&mut run.model().parameters()[2].tensor(), 7, 22)?;
        }
        Ok(None)
    };
    trainer.every(1, flips).run_parts(|rank| part(&config, &model, Arc::new(OneDevice), rank)).unwrap();
    folder
}

fn replayed(folder: &Folder, layout: Layout, zero: u8, steps: std::ops::Range<u64>) -> Result<Replayed> {
    let (config, model, trainer) = of_texts(folder, layout, zero);
    let replay = Replay { from: folder.path().join("checkpoint-00000003"), steps };
    trainer.replay(&replay, |rank| part(&config, &model, Arc::new(OneDevice), rank))
}

#[test]
fn repeated_steps_have_the_recorded_digests_up_to_the_wrong_bit() {
    let layout = |dp, micro_batches| Layout { dp, micro_batches, ..Layout::default() };
    let folder = recorded(None);
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    let before = (files(), std::fs::read(folder.path().join("metrics.jsonl")).unwrap());
    for (layout, zero) in [(layout(2, 1), 0), (layout(2, 1), 3), (layout(1, 2), 0)] {
        let replayed = replayed(&folder, layout, zero, 4..9).unwrap();
        assert_eq!(replayed, Replayed { compared: 5, difference: None });
        assert!(replayed.check().is_ok());
    }
    assert_eq!(
        before,
        (files(), std::fs::read(folder.path().join("metrics.jsonl")).unwrap()),
        "no file is written"
    );
    let wrong = replayed(&recorded(Some(5)), layout(2, 1), 0, 3..9).unwrap();
    assert_eq!((wrong.compared, wrong.difference.as_ref().map(|(step, _)| *step)), (3, Some(5)));
    // One digest of a parameter.
    let (path, name) = (folder.path().join("metrics.jsonl"), "h.1.mlp.c_fc.weight");
    let text = std::fs::read_to_string(&path).unwrap();
    let changed = text.lines().enumerate().map(|(step, line)| {
        let at = line.rfind(&format!("\"{name}\":\"")).filter(|_| step == 6);
        let (start, end) = line.split_at(at.map_or(0, |at| at + name.len() + 4));
        let digit = if end.starts_with('0') { "1" } else { "0" };
        if at.is_some() { format!("{start}{digit}{}\n", &end[1..]) } else { format!("{line}\n") }
    });
    std::fs::write(&path, changed.collect::<String>()).unwrap();
    let error = replayed(&folder, layout(2, 1), 0, 3..9).unwrap().check().unwrap_err();
    assert!(matches!(error, Error::Differs(_)));
    let wanted = format!(
        "step 6: the first difference is in the updated parameter {name}; 0 gradients and 1 parameters"
    );
    assert!(error.to_string().starts_with(&wanted), "{error}, wanted {wanted}");
    // Before the checkpoint, and without digests.
    let error = replayed(&folder, layout(2, 1), 0, 2..9).unwrap_err().to_string();
    assert!(error.contains("it has done 3 steps, wanted at most 2"), "{error}");
    let error = replayed(&folder, layout(2, 1), 0, 20..30).unwrap_err().to_string();
    assert!(error.contains("of the steps 20..30 none has digests"), "{error}");
}
