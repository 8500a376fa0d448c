//! What runs come to, on ranks and on one device that does the same additions, and how the two are held together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, Documents};
use phalanx_nn::{Clip, Optimizer, Parameters, Rule, Scope};
use phalanx_parallel::Result;
use phalanx_parallel::checkpoint::{self, Checkpoint, Trained};
use phalanx_parallel::comm;
use phalanx_parallel::data_parallel::{DataParallel, SingleDevice};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::case::Case;
use crate::gpt::add_chains;
use crate::run::{CLIP, Run, SEED, Update, context, grad_dtype, number};

/// Steps that runs are compared over; few without optimisation, which takes a hundred times as long.
pub const STEPS: u64 = if cfg!(debug_assertions) { 2 } else { 20 };

/// One device's run: of each step the micro-batches' losses, replica by replica, and the norm; the tensors at the end.
pub struct Alike {
    pub losses: Vec<Vec<f64>>,
    pub norms: Vec<f64>,
    pub tensors: BTreeMap<String, Vec<f64>>,
}

/// The same of one rank: losses if the last stage is here, and its parts of the tensors.
pub struct Own {
    pub losses: Vec<Vec<f64>>,
    pub norms: Vec<f64>,
    pub parts: Vec<ShardedTensor>,
}

impl Own {
    /// A rank's part of a run.
    pub fn train(run: &mut Run, steps: Range<u64>) -> Result<Own> {
        let (losses, norms) =
            steps.map(|step| run.step(step)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        Ok(Own { losses, norms, parts: run.parts()? })
    }
}

/// All ranks of a case, by what one of them does.
pub fn on_ranks<T: Send>(case: &Case, f: impl Fn(Rank) -> Result<T> + Sync) -> comm::Result<Vec<T>> {
    Threads::new(case.ranks()).timeout(Duration::from_secs(120)).run(f)
}

/// All ranks of a case.
pub fn together(case: &Case, steps: Range<u64>) -> Vec<Own> {
    let rank = |rank: Rank| {
        Own::train(&mut Run::new(case, rank.comm(), rank.device(), Update::AdamW)?, steps.clone())
    };
    on_ranks(case, rank).unwrap_or_else(|e| panic!("{case}: {e}"))
}

/// A model on one device, which does what replicas and micro-batches do.
pub struct Single {
    case: Case,
    pub model: Decoder,
    pub share: SingleDevice,
    pub optimizer: Optimizer<Box<dyn Rule>>,
}

impl Single {
    pub fn new(case: &Case, update: Update) -> Single {
        let model = case.model.init(&Scope::new(SEED, case.dtype, Device::CPU)).unwrap();
        model.parameters().iter().for_each(|p| p.set_grad_dtype(grad_dtype(case)).unwrap());
        case.freeze(&model.parameters());
        let share = SingleDevice::new(&model);
        let optimizer = update.optimizer(share.parameters()).unwrap();
        Single { case: case.clone(), share, model, optimizer }
    }

    /// Goes on from a checkpoint.
    pub fn restore(&mut self, saved: &Checkpoint) {
        let comm = comm::threads::world(1, Duration::ZERO).swap_remove(0);
        let trained = [Trained { model: &self.model, wrapper: &self.share }];
        saved.restore(&comm, &trained, &mut [&mut self.optimizer]).unwrap();
    }

    /// Every replica's micro-batches are a chain of its own; the losses of all.
    pub fn pass(&self, step: u64) -> Vec<f64> {
        let (model, mut losses) = (&self.model, Vec::new());
        self.optimizer.zero_grad().unwrap();
        add_chains(&model.parameters(), self.case.layout.dp, |replica| {
            let (batches, counted) = self.case.batches(step, replica, Device::CPU);
            for batch in batches {
                let _row = Context::with(|c| c.batch_offset = batch.first_row as u64);
                let vars: Vec<Var> = batch.tensors.into_iter().map(Var::new).collect();
                let (inputs, targets) = (&vars[0], &vars[1]);
                let x = match vars.get(2) {
                    None => model.forward(inputs).unwrap(),
                    Some(starts) => model.forward_packed(inputs, &Documents::new(starts).unwrap()).unwrap(),
                };
                let loss = model.loss(&x, targets, 1.0 / counted as f64).unwrap();
                loss.backward().unwrap();
                losses.push(number(loss.tensor()).unwrap());
            }
        });
        losses
    }

    /// Clips and updates; the norm before.
    pub fn update(&mut self) -> f64 {
        let norm = self.share.grad_norm().unwrap();
        self.optimizer.step_scaled(Clip::new(norm, CLIP).scale).unwrap();
        norm
    }

    /// The model and its optimizer.
    pub fn parts(&self) -> Vec<ShardedTensor> {
        let trained = [Trained { model: &self.model, wrapper: &self.share }];
        checkpoint::parts(&trained, &[&self.optimizer]).unwrap()
    }

    pub fn train(mut self, steps: Range<u64>) -> Alike {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in steps {
            let _context = context(step);
            losses.push(self.pass(step));
            norms.push(self.update());
        }
        Alike { losses, norms, tensors: named(self.parts()) }
    }
}

/// One device in the place of a case's ranks.
pub fn alone(case: &Case, steps: Range<u64>) -> Alike {
    Single::new(case, Update::AdamW).train(steps)
}

/// Whole tensors by their names.
pub fn named(parts: Vec<ShardedTensor>) -> BTreeMap<String, Vec<f64>> {
    parts.into_iter().map(|part| (part.name.clone(), numbers(&part.values))).collect()
}

fn numbers(values: &Tensor) -> Vec<f64> {
    kernels::cast(values, DType::F64).unwrap().to_vec().unwrap()
}

/// The numbers of a part's elements in the whole.
fn elements(part: &ShardedTensor) -> Vec<i64> {
    let shape = &part.shard.window.global;
    let all: Vec<i64> = (0..shape.iter().product::<usize>() as i64).collect();
    let all = Tensor::from_slice(&all, shape, Device::CPU).unwrap();
    part.shard.of(&all).unwrap().to_vec::<i64>().unwrap()[part.range.clone()].to_vec()
}

/// Panics unless parts that ranks have are those of whole tensors, to a part of the largest element, and all there are.
pub fn assert_parts(
    case: &Case,
    parts: &[&ShardedTensor],
    wanted: &BTreeMap<String, Vec<f64>>,
    tolerance: f64,
) {
    let mut missing: BTreeMap<&str, Vec<bool>> =
        wanted.iter().map(|(name, values)| (&**name, vec![true; values.len()])).collect();
    for part in parts {
        let whole = wanted.get(&part.name).unwrap_or_else(|| panic!("{case}: there is no {}", part.name));
        let largest = whole.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        for (got, at) in numbers(&part.values).into_iter().zip(elements(part)) {
            let (name, at) = (&part.name, at as usize);
            let same = got.to_bits() == whole[at].to_bits() || (got - whole[at]).abs() <= tolerance * largest;
            assert!(same, "{case}: {name}, element {at}: {got:e}, wanted {:e} (of {largest:e})", whole[at]);
            missing.get_mut(&**name).unwrap()[at] = false;
        }
    }
    for (name, missing) in missing {
        assert!(!missing.contains(&true), "{case}: no rank has some elements of {name}");
    }
}

/// What losses of a case may differ by, relative to themselves, from those of one device.
pub fn tolerance(case: &Case) -> f64 {
    match (case.layout.tp, case.dtype) {
        (1, _) => 0.0,
        (_, DType::F64) => 1e-11,
        _ => 1e-5,
    }
}

/// Panics unless the ranks have what the one device has. Norms of cut models agree to a hundred times the
/// tolerance of losses: AdamW makes as much of a small gradient as of a large one, and so of its rounding.
pub fn assert_same(case: &Case, ranks: &[Own], wanted: &Alike) {
    let tolerance = tolerance(case);
    let close = |what: &str, got: f64, wanted: f64, tolerance: f64| {
        let same = got.to_bits() == wanted.to_bits() || (got - wanted).abs() <= tolerance * wanted.abs();
        assert!(same, "{case}: {what}: {got:e}, wanted {wanted:e}");
    };
    let last: Vec<&Own> =
        ranks.iter().filter(|rank| rank.losses.iter().any(|losses| !losses.is_empty())).collect();
    assert_eq!(last.len(), case.layout.dp * case.layout.tp, "{case}: ranks with the last stage");
    for (step, all) in wanted.losses.iter().enumerate() {
        for (replica, wanted) in last.chunks(case.layout.tp).zip(all.chunks(case.layout.micro_batches)) {
            assert!(
                replica.iter().all(|rank| rank.losses[step] == replica[0].losses[step]),
                "{case}: step {step}"
            );
            for (got, wanted) in replica[0].losses[step].iter().zip(wanted) {
                close(&format!("loss of step {step}"), *got, *wanted, tolerance);
            }
        }
    }
    for (rank, own) in ranks.iter().enumerate() {
        assert_eq!(own.norms, ranks[0].norms, "{case}: norms of rank {rank}");
        for (step, (&got, &wanted)) in own.norms.iter().zip(&wanted.norms).enumerate() {
            close(&format!("norm of step {step}"), got, wanted, 100.0 * tolerance);
        }
    }
    if case.layout.tp == 1 {
        assert_parts(
            case,
            &ranks.iter().flat_map(|rank| &rank.parts).collect::<Vec<_>>(),
            &wanted.tensors,
            0.0,
        );
    }
}
