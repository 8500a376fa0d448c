//! What runs come to, on ranks and on their twin, which does the same additions without replicas and stages; and how the two are held
//! together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, DecoderStage, Documents, Lora, RouterBias};
use phalanx_nn::{Batch, Clip, LayerFactory, OneDevice, Optimizer, Parameters, Rule, Scope, norm_of};
use phalanx_parallel::Result;
use phalanx_parallel::checkpoint::{self, Checkpoint, Trained};
use phalanx_parallel::comm::{self, Comm};
use phalanx_parallel::data_parallel::{DataParallel, SingleDevice};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::tensor_parallel::{TensorParallel, sum_squares};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::case::Case;
use crate::gpt::add_chains;
use crate::run::{CLIP, Run, SEED, Update, context, grad_dtype, number};

/// Steps that runs are compared over; few without optimisation, which takes a hundred times as long.
pub const STEPS: u64 = if cfg!(debug_assertions) { 2 } else { 20 };

/// A twin's run: of each step the micro-batches' losses, replica by replica, and the norm; the tensors at the end.
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

/// The twin of a case's ranks: as many ranks as share each layer (one, if layers are whole), which do by themselves, one after the other,
/// what replicas, stages and micro-batches do.
pub struct Twin<L: LayerFactory = OneDevice> {
    case: Case,
    comm: Comm,
    pub model: Decoder<L>,
    pub share: SingleDevice,
    pub optimizer: Optimizer<Box<dyn Rule>>,
}

impl<L: LayerFactory> Twin<L> {
    pub fn new(case: &Case, layers: L, comm: &Comm, update: Update) -> Result<Twin<L>> {
        let scope = Scope::new(SEED, case.dtype, Device::Cpu(comm.rank() as u16));
        let stage = DecoderStage::whole(case.model.layers());
        let model = case.model.init_stage(&Arc::new(layers), &scope, stage)?;
        model.parameters().iter().try_for_each(|p| p.set_grad_dtype(grad_dtype(case)))?;
        case.prepare(&model.parameters());
        let share = SingleDevice::new(&model);
        let optimizer = update.optimizer(share.parameters())?;
        Ok(Twin { case: case.clone(), comm: comm.clone(), share, model, optimizer })
    }

    /// Goes on from a checkpoint.
    fn restore(&mut self, saved: &Checkpoint) -> Result<()> {
        let trained = [Trained::new(&self.model, &self.share)];
        saved.restore(&self.comm, &trained, &mut [&mut self.optimizer])
    }

    /// Every replica's micro-batches are a chain of its own. Chains are added in order, first of the replicas that share a copy. The losses
    /// of all.
    pub fn pass(&self, step: u64) -> Result<Vec<f64>> {
        let (parameters, mut losses) = (self.model.parameters(), Vec::new());
        let dp = self.case.layout.dp;
        let sharing = self.case.shard_ranks.unwrap_or(dp);
        self.optimizer.zero_grad()?;
        self.model.router_biases().iter().for_each(RouterBias::reset);
        add_chains(&parameters, dp / sharing, |group| {
            add_chains(&parameters, sharing, |rank| {
                let replica = self.replica(step, group * sharing + rank);
                losses.extend(replica.unwrap_or_else(|e| panic!("{}: {e}", self.case)));
            });
        });
        Ok(losses)
    }

    /// Adds the gradients of a replica's micro-batches in order; their losses.
    fn replica(&self, step: u64, replica: usize) -> Result<Vec<f64>> {
        let (batches, counted) = self.case.batches(step, replica, self.model.device());
        let run = |batch: Batch| {
            let _row = Context::with(|c| c.batch_offset = batch.first_row as u64);
            let vars: Vec<Var> = batch.tensors.into_iter().map(Var::new).collect();
            let (inputs, targets) = (&vars[0], &vars[1]);
            let x = match vars.get(2) {
                None => self.model.forward(inputs)?,
                Some(starts) => self.model.forward_packed(inputs, &Documents::new(starts)?)?,
            };
            let loss = self.model.loss(&x, targets, 1.0 / counted as f64)?;
            loss.backward()?;
            number(loss.tensor())
        };
        batches.into_iter().map(run).collect()
    }

    /// Clips and updates; the norm before.
    pub fn update(&mut self) -> Result<f64> {
        let norm = norm_of(&sum_squares(self.share.grad_squares()?, &self.comm)?)?;
        self.optimizer.step_scaled(Clip::new(norm, CLIP).scale)?;
        self.model.router_biases().iter().try_for_each(|bias| bias.update(&bias.loads()))?;
        Ok(norm)
    }

    /// The model and its optimizer.
    pub fn parts(&self) -> Result<Vec<ShardedTensor>> {
        let trained = [Trained::new(&self.model, &self.share)];
        checkpoint::parts(&trained, &[&self.optimizer])
    }

    fn train(&mut self, saved: Option<&Path>, steps: Range<u64>) -> Result<Own> {
        saved.map_or(Ok(()), |folder| self.restore(&Checkpoint::open(folder)?))?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in steps {
            let _context = context(step);
            losses.push(self.pass(step)?);
            norms.push(self.update()?);
        }
        Ok(Own { losses, norms, parts: self.parts()? })
    }
}

/// What the twin of a case comes to, from its beginning or from a checkpoint.
pub fn twin(case: &Case, saved: Option<&Path>, steps: Range<u64>) -> Alike {
    let rank = |rank: Rank| {
        let (comm, update) = (rank.comm(), Update::AdamW);
        let cut = TensorParallel::new(comm).with_sequence_parallel(case.layout.sequence_parallel);
        let steps = steps.clone();
        match (case.layout.tp, case.lora.clone()) {
            (1, None) => Twin::new(case, OneDevice, comm, update)?.train(saved, steps),
            (1, Some(lora)) => {
                Twin::new(case, Lora::new(OneDevice, lora)?, comm, update)?.train(saved, steps)
            }
            (_, None) => Twin::new(case, cut, comm, update)?.train(saved, steps),
            (_, Some(lora)) => Twin::new(case, Lora::new(cut, lora)?, comm, update)?.train(saved, steps),
        }
    };
    let ranks = Threads::new(case.layout.tp).timeout(Duration::from_secs(120)).run(rank);
    let mut ranks = ranks.unwrap_or_else(|e| panic!("the twin of {case}: {e}"));
    for own in &ranks {
        assert!(
            own.losses == ranks[0].losses && own.norms == ranks[0].norms,
            "{case}: ranks of a layer differ"
        );
    }
    let tensors = whole(case, ranks.iter_mut().flat_map(|own| std::mem::take(&mut own.parts)));
    let Own { losses, norms, .. } = ranks.swap_remove(0);
    Alike { losses, norms, tensors }
}

/// The same case on one device that has whole layers.
pub fn of_whole_layers(case: &Case) -> Case {
    Case { layout: Layout { tp: 1, sequence_parallel: false, ..case.layout.clone() }, ..case.clone() }
}

/// Whole tensors of their parts. What several ranks have, they have in the same bits.
fn whole(case: &Case, parts: impl Iterator<Item = ShardedTensor>) -> BTreeMap<String, Vec<f64>> {
    let mut found: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    for part in parts {
        let size = part.shard.window.global.iter().product();
        let whole = found.entry(part.name.clone()).or_insert_with(|| vec![None; size]);
        for (value, at) in numbers(&part.values).into_iter().zip(elements(&part)) {
            let known = whole[at as usize].replace(value);
            let same = known.is_none_or(|known| known.to_bits() == value.to_bits());
            assert!(same, "{case}: {}, element {at}: {known:?} and {value}", part.name);
        }
    }
    let all = |(name, values): (String, Vec<Option<f64>>)| {
        let values =
            values.into_iter().map(|value| value.unwrap_or_else(|| panic!("{case}: {name} has gaps")));
        (name.clone(), values.collect())
    };
    found.into_iter().map(all).collect()
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

/// What losses of cut layers may differ by, relative to themselves, from those of one device. A sum that is cut over ranks has
/// another order of additions, and 20 updates pass on how it was rounded.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-11 } else { 1e-5 }
}

/// Panics unless ranks that share layers come near one device. Norms agree to a hundred times the
/// tolerance of losses: AdamW makes as much of a small gradient as of a large one, and so of its rounding.
pub fn assert_near(case: &Case, cut: &Alike, one: &Alike) {
    let close = |what: String, got: f64, wanted: f64, tolerance: f64| {
        let near = (got - wanted).abs() <= tolerance * wanted.abs();
        assert!(near, "{case}: {what}: {got:e}, on one device {wanted:e}");
    };
    let tolerance = tolerance(case.dtype);
    assert_eq!((cut.losses.len(), cut.norms.len()), (one.losses.len(), one.norms.len()));
    for (step, (got, wanted)) in cut.losses.iter().zip(&one.losses).enumerate() {
        assert!(!got.is_empty() && got.len() == wanted.len(), "{case}: step {step}");
        got.iter().zip(wanted).for_each(|(&a, &b)| close(format!("loss of step {step}"), a, b, tolerance));
    }
    for (step, (&got, &wanted)) in cut.norms.iter().zip(&one.norms).enumerate() {
        close(format!("norm of step {step}"), got, wanted, 100.0 * tolerance);
    }
}

/// Panics unless the ranks have the bits of their twin.
pub fn assert_same(case: &Case, ranks: &[Own], wanted: &Alike) {
    let same = |what: &str, got: &[f64], wanted: &[f64]| {
        let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(got), bits(wanted), "{case}: {what}: {got:?}, wanted {wanted:?}");
    };
    let last: Vec<&Own> =
        ranks.iter().filter(|rank| rank.losses.iter().any(|losses| !losses.is_empty())).collect();
    assert_eq!(last.len(), case.layout.dp * case.layout.tp, "{case}: ranks with the last stage");
    for (step, all) in wanted.losses.iter().enumerate() {
        for (replica, wanted) in last.chunks(case.layout.tp).zip(all.chunks(case.layout.micro_batches)) {
            replica
                .iter()
                .for_each(|rank| same(&format!("losses of step {step}"), &rank.losses[step], wanted));
        }
    }
    ranks
        .iter()
        .enumerate()
        .for_each(|(rank, own)| same(&format!("norms of rank {rank}"), &own.norms, &wanted.norms));
    let parts = ranks.iter().flat_map(|rank| &rank.parts).collect::<Vec<_>>();
    assert_parts(case, &parts, &wanted.tensors, 0.0);
}
