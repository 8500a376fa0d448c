//! A run's steps: captured steps have the bits of plain ones, and the host neither waits nor allocates memory.

use std::sync::{Arc, Mutex};

use phalanx::nn::models::{GptConfig, ModelConfig, RecomputeMode};
use phalanx::nn::{
    AdamW, Batch, Group, LinearConfig, Module, OneDevice, Optimizer, Parameter, Parameters, Schedule,
};
use phalanx::parallel::comm;
use phalanx::parallel::hybrid::Layout;
use phalanx::parallel::launch::TIMEOUT;
use phalanx::parallel::pipeline::ranks::Chunks;
use phalanx::tensor::cuda::{Calls, Readback, calls};
use phalanx::train::data::{TensorDataset, TokenWindows};
use phalanx::train::{
    AnyRule, Config, Data, Error, MeshRank, Offload, OnDivergence, Result, Run, Trace, Trainer,
};
use phalanx::{DType, Device, Tensor, Var, kernels};

const GPU: Device = Device::Cuda(0);
const CONTEXT: usize = 12;
const STEPS: u64 = 6;

/// The model.
#[derive(Clone, Copy)]
struct Form {
    dtype: DType,
    micro_batches: usize,
    groups: usize,
    recompute: RecomputeMode,
    clip: f64,
}

/// The kinds of steps.
#[derive(Clone, Copy, PartialEq)]
enum How {
    OneByOne,
    Captured,
    /// With an operation in each step that cannot be captured.
    Spoilt,
    /// With optimizer state and activations in the host's memory.
    Offloaded,
}

/// The result of a training: losses and norms in their order, and all parameters.
type Trained = (Vec<f64>, Vec<f64>);

/// A run on the GPU, whose batches are given to it.
fn run(form: Form, how: How) -> Result<Run> {
    let layout = Layout { micro_batches: form.micro_batches / form.groups, ..Layout::default() };
    let config = Config {
        steps: STEPS,
        batch: form.micro_batches,
        lr: Schedule::Cosine { lr: 1e-2, warmup: 2, total: STEPS, cycles: 0.5, min: 0.0 },
        clip: (form.clip > 0.0).then_some(form.clip),
        dtype: form.dtype,
        device: GPU,
        layout,
        chains: form.groups,
        capture: how != How::OneByOne,
        offload: if how == How::Offloaded { Offload::Optimizer } else { Offload::None },
        offload_activations: how == How::Offloaded,
        ..Config::default()
    };
    let comm = comm::threads::world(1, TIMEOUT).swap_remove(0);
    let rank = MeshRank::new(GPU, comm, config.layout.mesh()?)?;
    let model = ModelConfig::Gpt(GptConfig::new(101, CONTEXT, 2, 2, 16).with_dropout(0.1));
    let mut model =
        Chunks::build(&model, &Arc::new(OneDevice), &rank.scope(&config), &config.layout.schedule()?, 0)?;
    model.iter_mut().for_each(|stage| stage.set_recompute(form.recompute));
    let samples = TokenWindows::new(vec![0; 2 * CONTEXT], CONTEXT, 1)?;
    let data = Data { samples: Arc::new(samples), counted: CONTEXT, validation: None };
    let trace = Trace::new(&config, None)?.rank(0);
    let run = Run::new(&config, rank, trace, model, data, &|parameters, lr| {
        let rule: AnyRule = Box::<AdamW>::default();
        Ok(vec![Optimizer::new(rule, Group::decay_matrices(parameters, lr, 0.1))?])
    })?;
    Ok(match how {
        // An observer of actions may read the device.
        How::Spoilt => run.with_observer(Arc::new(|_| drop(GPU.synchronize()))),
        _ => run,
    })
}

/// The micro-batches of a step, on `device`.
fn micros(form: Form, step: u64, device: Device) -> Result<Vec<Batch>> {
    let tokens = |row: usize, from: u64| {
        let token = |i: usize| (7 * (i as u64 + step % 3 + from) + row as u64) as i64 % 101;
        let tokens: Vec<i64> = (0..CONTEXT).map(token).collect();
        Tensor::from_slice(&tokens, &[1, CONTEXT], device)
    };
    let micro =
        |row| Ok::<_, Error>(Batch { tensors: vec![tokens(row, 0)?, tokens(row, 1)?], first_row: row });
    (0..form.micro_batches).map(micro).collect()
}

/// A training whose numbers are read one step late, at rates that begin with 0. `watch` gets the driver calls and the kernel
/// launches of each step.
fn train(form: Form, how: How, watch: &mut dyn FnMut(u64, Calls, u64)) -> Result<Trained> {
    let (mut run, mut numbers) = (run(form, how)?, Vec::new());
    let mut readbacks = [Readback::new(GPU, 2)?, Readback::new(GPU, 2)?];
    for step in 0..STEPS {
        let on_gpu = matches!(how, How::OneByOne | How::Offloaded);
        let batch = micros(form, step, if on_gpu { GPU } else { Device::CPU })?;
        let (before, launched) = (calls(), GPU.gpu()?.launches());
        let results = run.step(&batch)?;
        readbacks[step as usize % 2].start(&results)?;
        let after = calls();
        let asked =
            Calls { waits: after.waits - before.waits, allocations: after.allocations - before.allocations };
        watch(step, asked, GPU.gpu()?.launches() - launched);
        if step > 0 {
            numbers.extend(readbacks[(step as usize - 1) % 2].finish()?);
        }
    }
    numbers.extend(readbacks[(STEPS as usize - 1) % 2].finish()?);
    if (how == How::Spoilt) != run.why_not_captured().is_some_and(|why| why.contains("capture")) {
        return Err(Error::Config(format!("steps that are not captured: {:?}", run.why_not_captured())));
    }
    let mut parameters = Vec::new();
    for parameter in run.model().parameters() {
        parameters.extend(kernels::cast(&parameter.tensor(), DType::F64)?.to_vec::<f64>()?);
    }
    Ok((numbers, parameters))
}

const FORMS: [Form; 3] = [
    Form { dtype: DType::F32, micro_batches: 1, groups: 1, recompute: RecomputeMode::Never, clip: 1.0 },
    Form { dtype: DType::BF16, micro_batches: 4, groups: 2, recompute: RecomputeMode::Always, clip: 0.1 },
    Form { dtype: DType::F32, micro_batches: 3, groups: 1, recompute: RecomputeMode::ExceptLast, clip: 0.0 },
];

/// Captured steps have the bits of plain ones. None waits, and launched graphs allocate no memory and launch no single kernel.
pub fn captured_have_the_bits_of_others() -> std::result::Result<(), String> {
    for (number, form) in FORMS.into_iter().enumerate() {
        let mut wrong = Vec::new();
        let mut note = |what: &str, step: u64, fine: bool, asked: Calls, launched: u64| {
            if !fine {
                wrong.push(format!("{what}, step {step}: {asked:?}, {launched} kernels launched"));
            }
        };
        let plain = train(form, How::OneByOne, &mut |step, asked, launched| {
            // The first step compiles, and allocates the record of faults.
            note("one by one", step, step == 0 || asked.waits == 0, asked, launched);
        });
        let fast = train(form, How::Captured, &mut |step, asked, launched| {
            let fine = step < 2 || (asked, launched) == (Calls::default(), 0);
            note("captured", step, fine, asked, launched);
        });
        let (plain, fast) = (plain.map_err(|e| e.to_string())?, fast.map_err(|e| e.to_string())?);
        if !wrong.is_empty() {
            return Err(format!("form {number}: {wrong:?}"));
        }
        if plain != fast {
            return Err(format!("form {number}: got {:?}, wanted {:?}", fast.0, plain.0));
        }
    }
    Ok(())
}

/// A step that waits for the device runs without a graph and has the same result.
pub fn what_cannot_be_captured_trains_all_the_same() -> std::result::Result<(), String> {
    let wanted = train(FORMS[1], How::OneByOne, &mut |_, _, _| {}).map_err(|e| e.to_string())?;
    let mut launches = Vec::new();
    let got = train(FORMS[1], How::Spoilt, &mut |_, _, launched| launches.push(launched));
    let got = got.map_err(|e| e.to_string())?;
    match got == wanted && launches.iter().all(|&launched| launched > 0) {
        true => Ok(()),
        false => Err(format!("{launches:?} launches, got {:?}, wanted {:?}", got.0, wanted.0)),
    }
}

/// A run with offload has the losses of one without: the passes are the same, and the CPU's optimizer makes the update.
pub fn offloaded_have_the_losses_of_others() -> std::result::Result<(), String> {
    for form in [FORMS[2], Form { groups: 1, micro_batches: 2, ..FORMS[1] }] {
        let run = |how| train(form, how, &mut |_, _, _| {}).map_err(|e| e.to_string());
        let ((wanted, _), (got, _)) = (run(How::OneByOne)?, run(How::Offloaded)?);
        let tolerance = if form.dtype == DType::F32 { 1e-5 } else { 1e-2 };
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs();
        if got.len() != wanted.len() || !got.iter().zip(&wanted).all(close) {
            return Err(format!("got {got:?}, wanted {wanted:?}"));
        }
    }
    Ok(())
}

/// A token beyond the vocabulary, among inputs or targets, is reported with its step's numbers, though the next step has begun.
pub fn a_wrong_token_is_told_late() -> std::result::Result<(), String> {
    let run = |of_inputs: bool| -> Result<String> {
        let form = FORMS[0];
        let run = self::run(form, How::OneByOne)?;
        let mut readback = Readback::new(GPU, 1)?;
        let (mut batch, mut tokens) = (micros(form, 0, GPU)?.remove(0), [1i64; CONTEXT]);
        tokens[5] = 101;
        let wrong = Tensor::from_slice(&tokens, &[1, CONTEXT], GPU)?;
        batch.tensors[usize::from(!of_inputs)] = wrong;
        let loss = run.model().run(0, None, &batch, 1.0)?;
        readback.start(&kernels::cast(loss.tensor(), DType::F64)?)?;
        let fine = micros(form, 1, GPU)?.remove(0);
        drop::<Var>(run.model().run(0, None, &fine, 1.0)?);
        Ok(readback.finish().map_or_else(|error| error.to_string(), |_| "nothing".into()))
    };
    for of_inputs in [false, true] {
        let said = run(of_inputs).map_err(|e| e.to_string())?;
        if !said.contains("index 101 (item 5)") {
            return Err(format!("{said} was said"));
        }
    }
    Ok(())
}

/// The numbers of a step are read when the next one is under way. Neither changes a weight if those are not finite, so the error names the
/// cause, and the weights stay those before the step; with Muon they stay finite. So do those of a run that goes back to its checkpoint.
pub fn a_step_that_is_not_finite_changes_no_weight() -> std::result::Result<(), String> {
    a_step_that_is_not_finite().map_err(|e| e.to_string())?
}

fn a_step_that_is_not_finite() -> Result<std::result::Result<(), String>> {
    let out = std::env::temp_dir().join(format!("phalanx-cuda-sanity-{}", std::process::id()));
    let train = |steps: u64, capture: bool, on_divergence: OnDivergence, muon: bool| {
        let values = (0..160).map(|i| if i == 77 { f32::NAN } else { (i % 7) as f32 - 3.0 });
        let x = Tensor::from_slice(&values.collect::<Vec<f32>>(), &[40, 4], Device::CPU)?;
        let saves = on_divergence != OnDivergence::Stop;
        let config = Config {
            steps,
            batch: 4,
            device: GPU,
            capture,
            on_divergence,
            save_every: u64::from(saves),
            out: saves.then(|| out.clone()),
            ..Config::default()
        };
        let model = Arc::new(Mutex::new(Vec::new()));
        let kept = model.clone();
        let mut trainer = Trainer::new(config).data(TensorDataset::new(vec![x])?);
        if muon {
            trainer = trainer
                .optimizers(|parameters, lr| phalanx::train::muon(parameters, lr, 0.1, Parameter::is_matrix));
        }
        let summary = trainer.run(
            move |scope| {
                let layer = LinearConfig::new(4, 1).init(scope)?;
                *kept.lock().unwrap() = layer.parameters();
                Ok(layer)
            },
            |layer, batch| {
                let [x] = batch.vars()?;
                Ok(layer.forward(&x)?.sub_scalar(1.0)?.square()?.mean_all()?)
            },
        );
        let mut weights = Vec::new();
        for parameter in model.lock().unwrap().iter() {
            weights.extend(parameter.tensor().to_vec::<f32>()?);
        }
        Ok::<_, Error>((summary.map_err(|e| e.to_string()), weights))
    };
    for capture in [false, true] {
        let (ended, weights) = train(14, capture, OnDivergence::Stop, false)?;
        let Err(error) = ended else { return Ok(Err("the run did not stop".into())) };
        let step = error.strip_prefix("step ").and_then(|text| text.split_once(':')?.0.parse().ok());
        let named =
            ["the loss is NaN", "tensor 0 of the batch of rank 0", "from `weight` (layer `the model`)"];
        let (Some(step), true) = (step, named.iter().all(|name| error.contains(name))) else {
            return Ok(Err(error));
        };
        let (_, wanted) = train(step, capture, OnDivergence::Stop, false)?;
        if weights != wanted || step < 2 {
            return Ok(Err(format!("{error}: captured: {capture}: got {weights:?}, wanted {wanted:?}")));
        }
        let (ended, weights) = train(14, capture, OnDivergence::Rollback { most: 3 }, false)?;
        std::fs::remove_dir_all(&out).map_err(|e| Error::file(&out, e))?;
        if let Some(error) =
            ended.err().or(weights.iter().any(|x| !x.is_finite()).then(|| format!("{weights:?}")))
        {
            return Ok(Err(format!("back at a checkpoint: {error}")));
        }
    }
    let (ended, weights) = train(14, false, OnDivergence::Stop, true)?;
    match ended.is_err() && weights.iter().all(|x| x.is_finite()) {
        true => Ok(Ok(())),
        false => Ok(Err(format!("Muon: {ended:?}, {weights:?}"))),
    }
}
