//! Ranks with different numbers of batches.

use phalanx_nn::autograd::ContextMode;
use phalanx_nn::autograd::Var;
use phalanx_nn::{BatchNormConfig, Module, Parameters, Scope};
use phalanx_parallel::data_parallel::{Average, Ddp, DdpConfig, Divisor, JoinConfig};
use phalanx_parallel::{Error, Result, launch};
use phalanx_tensor::{Context, DType, Tensor};

use crate::threaded;
use crate::{Small, add_shares};

/// Batches of each rank.
const COUNTS: [&[usize]; 10] = [
    &[3],
    &[2, 4],
    &[0, 3],
    &[3, 0],
    &[0, 2, 5],
    &[4, 0, 1],
    &[1, 0, 3, 3],
    &[0, 0, 0, 0],
    &[2, 2, 2, 2],
    &[5, 1, 0, 2],
];

/// How a run goes.
#[derive(Clone, Copy, Debug)]
struct Run {
    micros: usize,
    bucket_bytes: usize,
    average: Average,
    divisor: Divisor,
    /// Whether ranks without a batch step as well.
    all_step: bool,
    /// Whether one part of the model is seldom used.
    unused: bool,
    /// Whether buckets' work has a thread of its own.
    threaded: bool,
}

impl Run {
    /// Whether a batch uses that part.
    fn spare(self, rank: usize, number: usize) -> bool {
        !self.unused || rank == 1 && number == 1
    }
}

/// A rank's batch: its micro-batches, one after the other.
fn seed(rank: usize, number: usize, micro: usize) -> u64 {
    (rank * 100 + number * 10 + micro) as u64
}

fn alone(counts: &[usize], run: Run) -> Vec<Vec<u8>> {
    let model = Small::new(phalanx_tensor::Device::CPU);
    let mut optimizer = model.optimizer();
    for number in 0..counts.iter().copied().max().unwrap_or(0) {
        let active: Vec<usize> = (0..counts.len()).filter(|&rank| number < counts[rank]).collect();
        let divisor = match (run.average, run.divisor) {
            (Average::Sum, _) => 1,
            (_, Divisor::World) => counts.len(),
            (_, Divisor::Active) => active.len(),
        };
        let model = &model;
        let share = |rank: usize| {
            move || {
                (0..run.micros).try_for_each(|micro| {
                    Ok(model.loss(seed(rank, number, micro), 2, run.spare(rank, number))?.backward()?)
                })
            }
        };
        add_shares(model, 1.0 / divisor as f64, active.into_iter().map(share));
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    model.bytes()
}

fn together(counts: &[usize], run: Run) -> Vec<Vec<Vec<u8>>> {
    let body = |rank: launch::Rank| -> Result<Vec<Vec<u8>>> {
        let model = Small::new(rank.device());
        let config = DdpConfig {
            first_bucket_bytes: run.bucket_bytes,
            bucket_bytes: run.bucket_bytes,
            average: run.average,
            find_unused: run.unused,
            engine: if run.threaded { threaded() } else { None },
            ..DdpConfig::default()
        };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let mut optimizer = model.optimizer();
        let uneven = JoinConfig { divisor: run.divisor, ..JoinConfig::default() };
        ddp.join(0..counts[rank.rank()], uneven, |number| {
            if let Some(number) = number {
                for micro in 0..run.micros {
                    let loss =
                        model.loss(seed(rank.rank(), number, micro), 2, run.spare(rank.rank(), number))?;
                    let _accumulate = (micro + 1 < run.micros).then(|| ddp.no_sync());
                    ddp.backward(&loss)?;
                }
            }
            if number.is_some() || run.all_step {
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            Ok(())
        })?;
        // Another pass finds nothing of the last.
        ddp.backward(&model.loss(rank.rank() as u64, 2, true)?)?;
        let sums: Vec<f32> = model.grads().into_iter().flatten().flatten().collect();
        let same = Small::new(rank.device());
        same.parameters()
            .iter()
            .zip(model.parameters())
            .try_for_each(|(to, from)| to.load(&from.tensor()))?;
        let shares = (0..counts.len()).map(|r| {
            let same = &same;
            move || Ok(same.loss(r as u64, 2, true)?.backward()?)
        });
        let scale = if run.average == Average::Mean { 1.0 / counts.len() as f64 } else { 1.0 };
        add_shares(&same, scale, shares);
        assert_eq!(sums, same.grads().into_iter().flatten().flatten().collect::<Vec<f32>>());
        Ok(model.bytes())
    };
    launch::threads(counts.len(), body).unwrap()
}

#[test]
fn ranks_with_any_numbers_of_batches_have_the_bits_of_one_device() {
    let plain = Run {
        micros: 1,
        bucket_bytes: 1 << 20,
        average: Average::Sum,
        divisor: Divisor::World,
        all_step: true,
        unused: true,
        threaded: false,
    };
    let runs = [
        plain,
        Run { bucket_bytes: 1, micros: 2, ..plain },
        Run { bucket_bytes: 64, all_step: false, ..plain },
        Run { bucket_bytes: 1, threaded: true, ..plain },
        Run { average: Average::Mean, bucket_bytes: 1, unused: false, ..plain },
        Run { average: Average::Mean, divisor: Divisor::Active, micros: 2, all_step: false, ..plain },
    ];
    for counts in COUNTS {
        for run in runs {
            let wanted = alone(counts, run);
            for (rank, got) in together(counts, run).into_iter().enumerate() {
                assert!(got == wanted, "rank {rank} of {counts:?}, {run:?}");
            }
        }
    }
}

#[test]
fn a_rank_that_runs_out_early_can_be_an_error_on_all_ranks() {
    let body = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        let refuse = JoinConfig { refuse: true, ..JoinConfig::default() };
        let step = |number: Option<usize>| match number {
            Some(number) => {
                ddp.backward(&model.loss(number as u64, 2, true)?).and_then(|()| model.zero_grad())
            }
            None => Ok(()),
        };
        ddp.join(0..2, refuse, step)?;
        let error = ddp.join(0..2 + usize::from(rank.rank() != 1), refuse, step).unwrap_err();
        assert!(matches!(&error, Error::Exhausted { ranks } if ranks == &[1]), "{error}");
        Err(error)
    };
    let error = launch::threads(3, body).unwrap_err().to_string();
    assert!(error.contains("[1]") && error.contains("run out"), "{error}");
}

#[test]
fn different_numbers_of_passes_and_failing_steps_end_all_ranks() {
    let passes = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        ddp.join(0..3, JoinConfig::default(), |_| {
            let twice = 1 + usize::from(rank.rank() == 1);
            (0..twice).try_for_each(|_| ddp.backward(&model.loss(1, 2, true)?))?;
            model.zero_grad()
        })
    };
    let error = launch::threads(3, passes).unwrap_err().to_string();
    assert!(error.contains("[1] begin a pass") && error.contains("[0, 2]"), "{error}");
    let failing = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        ddp.join(0..2 * rank.rank(), JoinConfig::default(), |number| match number {
            Some(3) => Err(phalanx_nn::Error::invalid("step", "no more").into()),
            Some(number) => ddp.backward(&model.loss(number as u64, 2, true)?),
            None => Ok(()),
        })
    };
    let error = launch::threads(3, failing).unwrap_err().to_string();
    assert!(error.contains("rank 2") && error.contains("no more"), "{error}");
}

/// What the ranks see of a running mean after each batch, theirs or another's, and at the end.
fn running(broadcast_buffers: bool) -> Vec<Vec<f32>> {
    let body = |rank: launch::Rank| -> Result<Vec<f32>> {
        let model = BatchNormConfig::new(2).init_1d(&Scope::new(0, DType::F32, rank.device()))?;
        let config = DdpConfig { broadcast_buffers, ..DdpConfig::default() };
        let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
        let _train = Context::with(|c| c.set_train(true));
        let mean = || -> Result<f32> { Ok(model.running_mean.as_ref().unwrap().tensor().to_vec()?[1]) };
        let mut seen = Vec::new();
        ddp.join(0..[1, 2, 2][rank.rank()], JoinConfig::default(), |number| {
            if let Some(number) = number {
                let x = [0f32, 0.0, 2.0, (10 * (rank.rank() + 1) + number) as f32];
                let x = Var::new(Tensor::from_slice(&x, &[2, 2], rank.device())?);
                ddp.backward(&model.forward(&x)?.sum_all()?)?;
            }
            seen.push(mean()?);
            Ok(model.parameters().iter().try_for_each(|p| p.zero_grad())?)
        })?;
        seen.push(mean()?);
        Ok(seen)
    };
    launch::threads(3, body).unwrap()
}

#[test]
fn buffers_are_those_of_the_first_rank_that_computes_and_at_the_end_of_the_last() {
    let close = |seen: &[f32], wanted: [f32; 3]| {
        assert_eq!(seen.len(), wanted.len(), "{seen:?}, wanted {wanted:?}");
        assert!(seen.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{seen:?}, wanted {wanted:?}");
    };
    // 0.1 times 10 / 2 of rank 0; then 0.9 of that and 0.1 times 21 / 2 of rank 1.
    running(true).iter().for_each(|seen| close(seen, [0.5, 0.9 * 0.5 + 1.05, 0.9 * 0.5 + 1.05]));
    let all = running(false);
    let end = 0.9 * 1.5 + 1.55;
    close(&all[0], [0.5, 0.5, end]);
    close(&all[1], [1.0, 0.9 * 1.0 + 1.05, end]);
    close(&all[2], [1.5, end, end]);
}
