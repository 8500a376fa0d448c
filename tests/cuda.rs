//! Training on a GPU, or on the emulator: the losses and the ledger of a CPU.

#[path = "cuda/adapters.rs"]
mod adapters;
#[path = "cuda/allocations.rs"]
mod allocations;
#[path = "../kernels/tests/cuda/driver.rs"]
mod driver;
#[path = "cuda/launches.rs"]
mod launches;
#[path = "cuda/perceptron.rs"]
mod perceptron;
#[path = "cuda/steps.rs"]
mod steps;
#[path = "cuda/trace.rs"]
mod trace;

use phalanx::autograd::ContextMode;
use std::process::ExitCode;

use phalanx::nn::models::{Decoder, GptConfig, LlamaConfig, RecomputeMode};
use phalanx::nn::{AdamW, CapturedStep, Clip, Group, Parameters, Result, Rule, Scope, grad_norm};
use phalanx::tensor::RngKey;
use phalanx::{Context, DType, Device, Tensor, Var};

type Test = (&'static str, fn() -> std::result::Result<(), String>);

const TESTS: [Test; 26] = [
    ("a tiny GPT's losses are the CPU's", || same_losses(gpt, DType::F32, 20, 1e-4)),
    ("a tiny Llama's losses are the CPU's", || same_losses(llama, DType::F32, 8, 1e-4)),
    ("in bf16 the losses are the CPU's to its rounding", || same_losses(gpt, DType::BF16, 8, 0.02)),
    ("in bf16 beside a stream in f32 GPT's losses are the CPU's", || {
        same_losses(mixed_gpt, DType::BF16, 8, 0.02)
    }),
    ("in bf16 beside a stream in f32 Llama's losses are the CPU's", || {
        same_losses(mixed_llama, DType::BF16, 8, 0.02)
    }),
    ("heads too deep for attention's tiles train as on the CPU", || same_losses(deep, DType::F32, 3, 1e-4)),
    ("in f64 the losses are the CPU's", || same_losses(gpt, DType::F64, 4, 1e-11)),
    ("training repeats itself bit for bit", repeats),
    ("adapters with magnitudes beside 8-bit weights train as on the CPU", adapters::train_as_on_the_cpu),
    ("a step launches so many kernels", launches::a_step_launches_so_many_kernels),
    ("a captured step trains as one that is not", captured_step),
    ("an MLP has the gradients of a CPU", perceptron::has_the_gradients_of_a_cpu),
    ("an MLP is six launches", perceptron::is_six_launches),
    ("an MLP shows the gradients that are asked for", perceptron::shows_the_gradients_that_are_asked_for),
    ("an MLP frees what it has used", perceptron::frees_what_it_has_used),
    ("an MLP has the same bits however it is run", perceptron::has_the_same_bits_however_it_is_run),
    ("a run's captured steps have the bits of others", steps::captured_have_the_bits_of_others),
    ("what cannot be captured trains all the same", steps::what_cannot_be_captured_trains_all_the_same),
    ("a run's offloaded steps have the losses of others", steps::offloaded_have_the_losses_of_others),
    ("a wrong token is told late", steps::a_wrong_token_is_told_late),
    ("a step that is not finite changes no weight", steps::a_step_that_is_not_finite_changes_no_weight),
    (
        "each allocation that fails is an error and leaves nothing",
        allocations::each_one_that_fails_is_an_error_and_leaves_nothing,
    ),
    (trace::TRACED, trace::traced),
    ("a trace is the work in its order", trace::spans_are_the_work_in_its_order),
    ("a traced graph is one span", || trace::a_graph_is_one_span(|| dropout_steps(true).map(drop))),
    ("a traced process leaves a table and a file", trace::a_process_leaves_a_table_and_a_file),
];

fn main() -> ExitCode {
    driver::serve("cuda", TESTS.len(), &[], |filter| {
        let chosen = TESTS.iter().filter(|(name, _)| filter.is_none_or(|f| name.contains(f)));
        let run = |(name, test): &Test| match test() {
            Ok(()) => {
                println!("cuda: {name} ... ok");
                true
            }
            Err(why) => {
                println!("cuda: {name} ... FAILED: {why}");
                false
            }
        };
        let outcomes: Vec<bool> = chosen.map(run).collect();
        outcomes.into_iter().all(|passed| passed)
    })
}

const CONTEXT: usize = 24;
const VOCABULARY: usize = 101;

fn gpt(scope: &Scope) -> Result<Decoder> {
    let mut model = GptConfig::new(VOCABULARY, CONTEXT, 2, 2, 32).with_dropout(0.1).init(scope)?;
    model.set_recompute(RecomputeMode::ExceptLast);
    Ok(model)
}

fn mixed_gpt(scope: &Scope) -> Result<Decoder> {
    let config = GptConfig::new(VOCABULARY, CONTEXT, 2, 2, 32).with_dropout(0.1);
    GptConfig { stream: Some(DType::F32), ..config }.init(scope)
}

fn mixed_llama(scope: &Scope) -> Result<Decoder> {
    LlamaConfig { stream: Some(DType::F32), ..LlamaConfig::new(VOCABULARY, CONTEXT, 2, 4, 32) }.init(scope)
}

/// One head of 272.
fn deep(scope: &Scope) -> Result<Decoder> {
    GptConfig::new(VOCABULARY, CONTEXT, 1, 1, 272).with_dropout(0.1).init(scope)
}

fn llama(scope: &Scope) -> Result<Decoder> {
    LlamaConfig::new(VOCABULARY, CONTEXT, 2, 4, 32).init(scope)
}

/// The result of a training: its losses, and all parameters one after the other.
type Trained = (Vec<f64>, Vec<f64>);

/// A training with dropout, clipping and AdamW over groups.
fn train(model: fn(&Scope) -> Result<Decoder>, dtype: DType, device: Device, steps: u64) -> Result<Trained> {
    let model = model(&Scope::new(1, dtype, device))?;
    for parameter in model.parameters().iter().filter(|p| p.dtype() == DType::BF16) {
        parameter.set_grad_dtype(DType::F32)?;
    }
    let groups = Group::decay_matrices(model.parameters(), 1e-2, 0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(groups)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 1, step };
        });
        optimizer.zero_grad()?;
        let hidden = model.forward(&ids(device, 0)?)?;
        let loss = model.loss(&hidden, &ids(device, 1)?, 1.0 / (3 * CONTEXT) as f64)?;
        loss.backward()?;
        let norm = grad_norm(&optimizer.parameters())?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        losses.push(phalanx::kernels::cast(loss.tensor(), DType::F64)?.item()?);
    }
    let values =
        |p: &phalanx::nn::Parameter| phalanx::kernels::cast(&p.tensor(), DType::F64)?.to_vec::<f64>();
    let parameters: Vec<Vec<f64>> =
        model.parameters().iter().map(values).collect::<std::result::Result<_, phalanx::tensor::Error>>()?;
    Ok((losses, parameters.concat()))
}

/// Three sequences from position `from` on of a fixed sequence, which can be learned.
fn ids(device: Device, from: u64) -> Result<Var> {
    let id = |i: usize| (7 * (i % CONTEXT + from as usize) + i / CONTEXT) as i64 % VOCABULARY as i64;
    let ids: Vec<i64> = (0..3 * CONTEXT).map(id).collect();
    Ok(Var::new(Tensor::from_slice(&ids, &[3, CONTEXT], device)?))
}

fn same_losses(
    model: fn(&Scope) -> Result<Decoder>,
    dtype: DType,
    steps: u64,
    tolerance: f64,
) -> std::result::Result<(), String> {
    let on = |device| train(model, dtype, device, steps).map_err(|e| format!("on {device}: {e}"));
    let (cpu, gpu) = (on(Device::CPU)?, on(Device::Cuda(0))?);
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
    let (losses, parameters) = (apart(&cpu.0, &gpu.0), apart(&cpu.1, &gpu.1));
    // Adam divides by the root of its second moment: where that is near 0, rounding errors become steps.
    let (first, last) = (gpu.0[0], gpu.0[gpu.0.len() - 1]);
    println!(
        "cuda: losses from {first} to {last}, within {losses:.1e} of the CPU's; parameters within {parameters:.1e}"
    );
    match losses <= tolerance && parameters <= 100.0 * tolerance && last < first {
        true => Ok(()),
        false => Err(format!("got {:?}, wanted {:?}", gpu.0, cpu.0)),
    }
}

fn repeats() -> std::result::Result<(), String> {
    let once = || train(gpt, DType::F32, Device::Cuda(0), 3).map_err(|e| e.to_string());
    let (first, second) = (once()?, once()?);
    if first == second { Ok(()) } else { Err(format!("{:?}, then {:?}", first.0, second.0)) }
}

/// Losses and norms of a step that is captured, its draws and its learning rate changing, against those of plain steps.
fn captured_step() -> std::result::Result<(), String> {
    let (plain, fast) = (dropout_steps(false)?, dropout_steps(true)?);
    let worst = plain.iter().zip(&fast).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
    println!("cuda: losses and norms of captured steps within {worst:.1e} of plain ones");
    if worst <= 1e-5 && plain.len() == fast.len() {
        Ok(())
    } else {
        Err(format!("got {fast:?}, wanted {plain:?}"))
    }
}

fn dropout_steps(capture: bool) -> std::result::Result<Vec<f64>, String> {
    let device = Device::Cuda(0);
    let run = || -> Result<Vec<f64>> {
        let model = gpt(&Scope::new(1, DType::F32, device))?;
        let groups = Group::decay_matrices(model.parameters(), 1e-2, 0.1);
        let mut optimizer = AdamW::default().init(groups)?;
        let batch = |step| {
            Ok::<_, phalanx::nn::Error>([ids(device, step)?, ids(device, step + 1)?].map(Var::into_tensor))
        };
        let loss =
            |batch: &[Var]| model.loss(&model.forward(&batch[0])?, &batch[1], 1.0 / (3 * CONTEXT) as f64);
        let mut captured = CapturedStep::new(device, &batch(0)?, Some(1.0))?;
        let mut all = Vec::new();
        for step in 0..6 {
            let _context = Context::with(|c| {
                c.set_train(true);
                c.rng = RngKey { seed: 1, step };
            });
            optimizer.set_lr(1e-2 / (step + 1) as f64);
            if capture {
                captured.run(&mut optimizer, &batch(step)?, loss)?;
                all.extend(captured.results().to_vec::<f64>()?);
                if captured.is_captured() != (step > 0) {
                    let why = format!("step {step}: {:?}", captured.why_not_captured());
                    return Err(phalanx::nn::Error::invalid("captured_step", why));
                }
                continue;
            }
            optimizer.zero_grad()?;
            let loss = loss(&batch(step)?.map(Var::new))?;
            loss.backward()?;
            let norm = grad_norm(&optimizer.parameters())?;
            optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
            all.extend([phalanx::kernels::cast(loss.tensor(), DType::F64)?.item()?, norm]);
        }
        Ok(all)
    };
    run().map_err(|e| e.to_string())
}
