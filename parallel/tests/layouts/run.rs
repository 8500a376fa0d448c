//! How ranks train, as a program would: a run built of a layout, and its steps.

use phalanx_nn::autograd::ContextMode;
use std::sync::Arc;

use phalanx_nn::{AdamW, Clip, Group, Optimizer, Parameter, Parameters, Rule, Scope, Sgd, wrap_by_size};
use phalanx_parallel::checkpoint::{self, Checkpoint, Trained};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig, SingleDevice};
use phalanx_parallel::expert_parallel::without_divided_experts;
use phalanx_parallel::hybrid::{self, MeshParallel, Step};
use phalanx_parallel::mesh::{Axis, Groups};
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Error, Result};
use phalanx_tensor::{Context, DType, Device, RngKey, Tensor};

use crate::case::Case;

/// The bound of the gradients' norm, which clipping has to meet.
pub const CLIP: f64 = 0.5;

/// What a run begins with and draws by.
pub const SEED: u64 = 3;

/// How parameters are updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    AdamW,
    Sgd,
}

impl Update {
    pub fn optimizer(self, parameters: Vec<Parameter>) -> Result<Optimizer<Box<dyn Rule>>> {
        let (rule, lr): (Box<dyn Rule>, f64) = match self {
            Update::AdamW => (Box::new(AdamW::default()), 3e-3),
            Update::Sgd => (Box::new(Sgd::default()), 0.1),
        };
        Ok(rule.init(Group::decay_matrices(parameters, lr, 0.1))?)
    }
}

/// The gradients' dtype.
pub fn grad_dtype(case: &Case) -> DType {
    if case.dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A step's context.
pub fn context(step: u64) -> impl Drop {
    Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 5, step };
    })
}

pub fn number(loss: &Tensor) -> Result<f64> {
    Ok(phalanx_kernels::cast(loss, DType::F64)?.item()?)
}

/// One rank of a run.
pub struct Run {
    case: Case,
    pub device: Device,
    pub groups: Groups,
    pub model: Arc<dyn hybrid::StagedModel>,
    pub pipeline: Pipeline,
    pub share: Arc<dyn DataParallel>,
    pub optimizer: Optimizer<Box<dyn Rule>>,
}

impl Run {
    pub fn new(case: &Case, comm: &Comm, device: Device, update: Update) -> Result<Run> {
        case.layout.check(&case.model, case.rows, crate::case::LENGTH)?;
        let groups = Groups::new(case.layout.mesh()?, comm)?;
        let (line, schedule) = (groups.along(Axis::Pp).clone(), case.layout.schedule()?);
        let scope = Scope::new(SEED, case.dtype, device);
        let scope = if case.defers_values() { scope.deferred() } else { scope };
        let model = match &case.lora {
            None => hybrid::decoder(&case.model, &case.layout, &groups, &scope, None)?,
            Some(lora) => hybrid::adapted_decoder(&case.model, lora, &case.layout, &groups, &scope, None)?,
        };
        let mut pipeline = Pipeline::new(&schedule, line, device)?;
        if schedule.stages() > 1 {
            pipeline = pipeline.recompute(case.layout.recompute);
        }
        if case.layout.scatter_gather {
            pipeline = pipeline.scatter_gather(groups.along(Axis::Tp));
        }
        model.parameters().iter().try_for_each(|p| p.set_grad_dtype(grad_dtype(case)))?;
        case.prepare(&model.parameters());
        case.unit_elements.into_iter().for_each(|least| wrap_by_size(&model, least));
        let replicas = replicas(case, &without_divided_experts(&model), groups.along(Axis::Dp))?;
        let share = MeshParallel::new(&model, replicas, groups.clone(), &schedule)?;
        let share: Arc<dyn DataParallel> =
            Arc::new(share.with_experts(&model, zero(case)?)?.with_router_biases(model.router_biases()));
        let optimizer = update.optimizer(share.parameters())?;
        Ok(Run { case: case.clone(), device, groups, model: Arc::new(model), pipeline, share, optimizer })
    }

    /// Runs forward and backward of a step; the losses of this replica's micro-batches, if the last stage is here.
    pub fn pass(&self, step: u64) -> Result<Vec<f64>> {
        let (micro_batches, counted) = self.case.batches(step, self.groups.at().dp, self.device);
        let (model, replicas) = (self.model.clone(), self.share.clone());
        let work = Arc::new(Step { model, replicas, micro_batches, scale: 1.0 / counted as f64 });
        self.share.zero_grad()?;
        self.share.begin()?;
        let losses = self.pipeline.train(&work)?;
        self.share.finish()?;
        losses.iter().map(number).collect()
    }

    /// Clips and updates; the norm before.
    pub fn update(&mut self) -> Result<f64> {
        let norm = self.share.grad_norm()?;
        self.optimizer.step_scaled(Clip::new(norm, CLIP).scale)?;
        self.share.updated()?;
        Ok(norm)
    }

    /// A step: losses, and the norm.
    pub fn step(&mut self, step: u64) -> Result<(Vec<f64>, f64)> {
        let _context = context(step);
        Ok((self.pass(step)?, self.update()?))
    }

    /// What this rank has of the model and the optimizer.
    pub fn parts(&self) -> Result<Vec<ShardedTensor>> {
        let trained = Trained::new(&*self.model, &*self.share);
        checkpoint::parts(&[trained], &[&self.optimizer])
    }

    /// Overwrites the values, so that a load that reads nothing is found.
    pub fn forget(&self) -> Result<()> {
        let own = self.share.parts(&*self.model)?;
        Ok(own.into_iter().try_for_each(|mut part| phalanx_kernels::fill_(&mut part.values, 9.0))?)
    }

    /// Goes on from a checkpoint. The values before must differ from those in it.
    pub fn restore(&mut self, saved: &Checkpoint, comm: &Comm) -> Result<()> {
        self.forget()?;
        let trained = Trained::new(&*self.model, &*self.share);
        saved.restore(comm, &[trained], &mut [&mut self.optimizer])
    }
}

/// What adds up replicas, in buckets so small that there are several.
fn replicas(case: &Case, model: &impl Parameters, comm: &Comm) -> Result<Box<dyn DataParallel>> {
    let grad_dtype = Some(grad_dtype(case));
    let ddp =
        DdpConfig { first_bucket_bytes: 1 << 11, bucket_bytes: 1 << 13, grad_dtype, ..DdpConfig::default() };
    Ok(match (case.zero, comm.size()) {
        (0, 1) => Box::new(SingleDevice::new(model)),
        (0, _) => Box::new(Ddp::new(model, comm.clone(), ddp)?),
        _ => Box::new(Zero::new(model, comm.clone(), zero(case)?)?),
    })
}

fn zero(case: &Case) -> Result<ZeroConfig> {
    let Case { ownership, shard_ranks, offload, .. } = *case;
    let stage = ZeroConfig::new(ZeroStage::try_from(case.zero.max(1))?);
    Ok(ZeroConfig { grad_dtype: Some(grad_dtype(case)), ownership, shard_ranks, offload, ..stage })
}

/// Gradients of parameters or of parts of them.
pub fn gradients(share: &dyn DataParallel) -> Result<Vec<ShardedTensor>> {
    let of = |p: Parameter| {
        let grad = p.grad()?.ok_or_else(|| Error::Config(format!("no gradient of {}", p.name())))?;
        Ok(ShardedTensor { values: grad.contiguous()?.copy()?, ..ShardedTensor::of_parameter(&p) })
    };
    share.parameters().into_iter().map(of).collect()
}
