//! Training on a GPU a rank: the CPU's losses, whatever the layout.

use std::time::Duration;

use phalanx_nn::models::{Family, ModelConfig};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::Device;

use crate::Test;
use crate::case::{Case, gpt, llama, mixture};
use crate::run::{Run, Update};
#[cfg(feature = "nccl")]
use {
    crate::run::{CLIP, context, number},
    phalanx_nn::Clip,
    phalanx_parallel::comm::NcclConfig,
    phalanx_parallel::hybrid::Step,
    phalanx_tensor::{DType, Tensor, cuda::calls},
    std::sync::Arc,
};

pub fn tests() -> Vec<Test> {
    let tests: Vec<Test> = vec![
        ("training by way of the host: replicas", || staged(replicas(0))),
        ("by way of the host shards in its memory change no bit", || offloaded(3, Threads::cuda)),
        ("training by way of the host: tensor parallel", || staged(tensor_parallel(false))),
        ("training by way of the host: pipeline", || staged(pipeline("1f1b"))),
        ("training by way of the host: divided experts", || staged(divided_experts(0))),
    ];
    #[cfg(feature = "nccl")]
    let tests = [tests, nccl()].concat();
    tests
}

#[cfg(feature = "nccl")]
fn nccl() -> Vec<Test> {
    vec![
        ("training over NCCL: replicas", || over_nccl(replicas(0))),
        ("training over NCCL: replicas, ZeRO-1", || over_nccl(replicas(1))),
        ("training over NCCL: replicas, ZeRO-2", || over_nccl(replicas(2))),
        ("training over NCCL: replicas, ZeRO-3", || over_nccl(replicas(3))),
        ("over NCCL offloaded shards change no bit", || {
            (1..=3).try_for_each(|zero| offloaded(zero, |threads| threads.nccl(NcclConfig::default())))
        }),
        ("training over NCCL: tensor parallel", || over_nccl(tensor_parallel(false))),
        ("training over NCCL: tensor and sequence parallel", || over_nccl(tensor_parallel(true))),
        ("training over NCCL: divided experts", || over_nccl(divided_experts(0))),
        ("training over NCCL: divided experts, ZeRO-1", || over_nccl(divided_experts(1))),
        ("training over NCCL: pipeline", || over_nccl(pipeline("1f1b"))),
        ("over NCCL layouts in bf16 have each other's bits", layouts_of_halves),
        ("over NCCL no step of replicas waits for a GPU", || {
            [0, 1, 2, 3].map(replicas).iter().try_for_each(goes_on)
        }),
        ("over NCCL no step of a cut model waits for a GPU", || {
            [false, true].map(tensor_parallel).iter().try_for_each(goes_on)
        }),
        ("training over NCCL: zero-bubble pipeline of two replicas", || {
            let case = pipeline("zb-h1");
            let layout = Layout { dp: 2, ..case.layout.clone() };
            over_nccl(Case { zero: 2, ..Case::new(case.model, layout) })
        }),
    ]
}

/// Steps that are compared.
const STEPS: u64 = 2;

fn case(model: ModelConfig, layout: Layout) -> Case {
    Case::new(model, layout)
}

fn replicas(zero: u8) -> Case {
    let layout = Layout { dp: 2, micro_batches: 2, ..Layout::default() };
    Case { zero, ..case(gpt(2, 2), layout) }
}

fn tensor_parallel(sequence_parallel: bool) -> Case {
    case(llama(2, 2, 2), Layout { tp: 2, sequence_parallel, ..Layout::default() })
}

fn divided_experts(zero: u8) -> Case {
    let layout = Layout { dp: 2, ep: 2, micro_batches: 2, ..Layout::default() };
    Case { zero, ..case(mixture(Family::Mixtral, 2), layout) }
}

fn pipeline(schedule: &str) -> Case {
    case(gpt(2, 2), Layout { pp: 2, schedule: schedule.into(), micro_batches: 3, ..Layout::default() })
}

/// Of each step the losses of the last stages, rank by rank, and the norm.
type Outcome = Vec<(Vec<Vec<f64>>, f64)>;

fn train(case: &Case, threads: Threads) -> Result<Outcome, String> {
    let rank = |rank: Rank| -> phalanx_parallel::Result<_> {
        let mut run = Run::new(case, rank.comm(), rank.device(), Update::AdamW)?;
        (0..STEPS).map(|step| run.step(step)).collect::<phalanx_parallel::Result<Vec<_>>>()
    };
    let ranks = threads.timeout(Duration::from_secs(120)).run(rank).map_err(|e| e.to_string())?;
    let step = |step: usize| (ranks.iter().map(|steps| steps[step].0.clone()).collect(), ranks[0][step].1);
    Ok((0..STEPS as usize).map(step).collect())
}

/// All losses and norms.
fn numbers(outcome: &Outcome) -> Vec<f64> {
    outcome.iter().flat_map(|(losses, norm)| losses.iter().flatten().copied().chain([*norm])).collect()
}

fn compare(case: &Case, threads: Threads) -> Result<(), String> {
    let wanted = train(case, Threads::new(case.ranks()))?;
    let got = train(case, threads)?;
    let (wanted, got) = (numbers(&wanted), numbers(&got));
    let close = |a: &f64, b: &f64| (a - b).abs() <= 1e-4 * b.abs().max(1.0);
    match got.len() == wanted.len() && got.iter().zip(&wanted).all(|(a, b)| close(a, b)) {
        true => Ok(()),
        false => Err(format!("got {got:?}, wanted {wanted:?}")),
    }
}

/// Training with shards, their gradients and the optimizer's state in the host's memory, beside the same with all of it on the GPU.
fn offloaded(zero: u8, on_gpus: fn(Threads) -> Threads) -> Result<(), String> {
    let case = replicas(zero);
    let run = |offload| {
        let case = Case { offload, ..case.clone() };
        train(&case, on_gpus(Threads::new(case.ranks())))
    };
    let (wanted, got) = (run(None)?, run(Some(Device::CPU))?);
    match bits(&wanted) == bits(&got) {
        true => Ok(()),
        false => Err(format!("ZeRO-{zero}: got {got:?}, wanted {wanted:?}")),
    }
}

fn bits(outcome: &Outcome) -> Vec<u64> {
    numbers(outcome).into_iter().map(f64::to_bits).collect()
}

/// Schedules and ZeRO's stages change no bit of halves, whose products have gelu, its slope and biases' gradients in their epilogues. A
/// zero-bubble schedule computes weights' gradients apart.
#[cfg(feature = "nccl")]
fn layouts_of_halves() -> Result<(), String> {
    let run = |layout: Layout, zero: u8| {
        let case = Case { dtype: DType::BF16, zero, ..Case::new(gpt(2, 2), layout) };
        let outcome = train(&case, Threads::new(case.ranks()).nccl(NcclConfig::default()))?;
        Ok::<_, String>((case, outcome))
    };
    let cut =
        |pp, schedule: &str| Layout { pp, schedule: schedule.into(), micro_batches: 3, ..Layout::default() };
    let replicas = || Layout { dp: 2, micro_batches: 2, ..Layout::default() };
    let cuts = [(cut(1, "1f1b"), 0), (cut(2, "1f1b"), 0), (cut(2, "zb-h1"), 0)];
    let shards = [0, 1, 2, 3].map(|zero| (replicas(), zero));
    for group in [&cuts[..], &shards] {
        let mut runs = group.iter().map(|(layout, zero)| run(layout.clone(), *zero));
        let Some(first) = runs.next() else { continue };
        let (_, wanted) = first?;
        for other in runs {
            let (case, got) = other?;
            if bits(&got) != bits(&wanted) {
                return Err(format!("{case}: got {got:?}, wanted {wanted:?}"));
            }
        }
    }
    Ok(())
}

fn staged(case: Case) -> Result<(), String> {
    compare(&case, Threads::new(case.ranks()).cuda())
}

#[cfg(feature = "nccl")]
fn over_nccl(case: Case) -> Result<(), String> {
    compare(&case, Threads::new(case.ranks()).nccl(NcclConfig::default()))
}

/// Steps that leave their numbers on the device wait for no GPU, but for the first, which compiles; the numbers are those of
/// steps whose norm comes to the host.
#[cfg(feature = "nccl")]
fn goes_on(case: &Case) -> Result<(), String> {
    let rank = |rank: Rank| -> phalanx_parallel::Result<_> {
        let new = || Run::new(case, rank.comm(), rank.device(), Update::AdamW);
        let mut wanted = new()?;
        let wanted = (0..3).map(|step| wanted.step(step)).collect::<phalanx_parallel::Result<Vec<_>>>()?;
        let (mut run, mut got, mut waits) = (new()?, Vec::new(), Vec::new());
        for step in 0..3 {
            let before = calls().waits;
            let (losses, norm) = step_on_device(&mut run, case, step)?;
            waits.push(calls().waits - before);
            got.push((
                losses.iter().map(number).collect::<phalanx_parallel::Result<Vec<_>>>()?,
                norm.item()?,
            ));
        }
        Ok((wanted, got, waits))
    };
    let threads = Threads::new(case.ranks()).nccl(NcclConfig::default());
    for (wanted, got, waits) in
        threads.timeout(Duration::from_secs(120)).run(rank).map_err(|e| e.to_string())?
    {
        if got != wanted || waits[1..] != [0, 0] {
            return Err(format!("{case}: {waits:?} waits, got {got:?}, wanted {wanted:?}"));
        }
    }
    Ok(())
}

/// [`Run::step`] without the host's looking at losses and norm.
#[cfg(feature = "nccl")]
fn step_on_device(run: &mut Run, case: &Case, step: u64) -> phalanx_parallel::Result<(Vec<Tensor>, Tensor)> {
    let _context = context(step);
    let (micro_batches, counted) = case.batches(step, run.groups.at().dp, run.device);
    let (model, replicas) = (run.model.clone(), run.share.clone());
    let work = Arc::new(Step { model, replicas, micro_batches, scale: 1.0 / counted as f64 });
    run.share.zero_grad()?;
    run.share.begin()?;
    let losses = run.pipeline.train(&work)?;
    run.share.finish()?;
    let norm = run.share.grad_squares()?.norm()?;
    run.optimizer.step_by(&Clip::factor(&norm, CLIP)?)?;
    run.share.updated()?;
    Ok((losses, norm))
}
