//! Training on a GPU a rank: the CPU's losses, whatever the layout.

use std::time::Duration;

use phalanx_nn::models::ModelConfig;
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::{Rank, Threads};

use crate::Test;
use crate::case::{Case, gpt, llama};
use crate::run::{Run, Update};

pub fn tests() -> Vec<Test> {
    let tests: Vec<Test> = vec![
        ("training by way of the host: replicas", || staged(replicas(0))),
        ("training by way of the host: tensor parallel", || staged(tensor_parallel(false))),
        ("training by way of the host: pipeline", || staged(pipeline("1f1b"))),
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
        ("training over NCCL: tensor parallel", || over_nccl(tensor_parallel(false))),
        ("training over NCCL: tensor and sequence parallel", || over_nccl(tensor_parallel(true))),
        ("training over NCCL: pipeline", || over_nccl(pipeline("1f1b"))),
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

fn compare(case: &Case, threads: Threads) -> Result<(), String> {
    let wanted = train(case, Threads::new(case.ranks()))?;
    let got = train(case, threads)?;
    let numbers = |outcome: &Outcome| -> Vec<f64> {
        outcome.iter().flat_map(|(losses, norm)| losses.iter().flatten().copied().chain([*norm])).collect()
    };
    let (wanted, got) = (numbers(&wanted), numbers(&got));
    let close = |a: &f64, b: &f64| (a - b).abs() <= 1e-4 * b.abs().max(1.0);
    match got.len() == wanted.len() && got.iter().zip(&wanted).all(|(a, b)| close(a, b)) {
        true => Ok(()),
        false => Err(format!("got {got:?}, wanted {wanted:?}")),
    }
}

fn staged(case: Case) -> Result<(), String> {
    compare(&case, Threads::new(case.ranks()).cuda())
}

#[cfg(feature = "nccl")]
fn over_nccl(case: Case) -> Result<(), String> {
    compare(&case, Threads::new(case.ranks()).nccl(phalanx_parallel::comm::NcclConfig::default()))
}
