//! [`MeshParallel`]: the data-parallel wrapper of a model that is split over a mesh: tied tables, norms and state over
//! all its ranks.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_nn::models::RouterBias;
use phalanx_nn::{Parameter, Parameters, Peers, Square, Squares};
use phalanx_tensor::{DType, Device, Tensor};

use crate::all_gather::all_gather_object;
use crate::all_gather::gather_sums;
use crate::comm::{Comm, Traffic};
use crate::data_parallel::Gathered;
use crate::data_parallel::{DataParallel, Entries, NoSync, SingleDevice};
use crate::expert_parallel::{divided_experts, without_divided_experts};
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::TiedTable;
use crate::pipeline::schedule::Schedule;
use crate::sharded::{Zero, ZeroConfig};
use crate::sharded_tensor::{self, ShardedTensor};
use crate::tensor_parallel::{gather_parts, sum_squares};
use crate::{Error, Result, WholeParameters};

/// A [`DataParallel`] for a rank's part of a model on a mesh of ranks. It adds replicas by the [`DataParallel`] that it wraps, keeps the
/// two copies of a tied table equal, and computes the norm of the whole model, with the bits of one device if layers are not
/// split. Experts that ranks divide have a wrapper of their own ([`MeshParallel::with_experts`]).
///
/// ```text
/// begin()              pipeline.train(stages)            finish()
/// replicas begin       schedule, last pass synchronises  tied table's sites exchanged, replicas finish
/// ```
pub struct MeshParallel {
    replicas: Box<dyn DataParallel>,
    /// The wrapper of experts that ranks divide.
    experts: Option<Box<dyn DataParallel>>,
    /// Biases of routers that move with the loads of all replicas.
    biases: Vec<RouterBias>,
    groups: Groups,
    tied: Option<TiedTable>,
    /// For every rank of the pipeline, and of its expert groups ([`Groups::line`]), the names of its parameters that count in the norm.
    counted: Vec<Vec<String>>,
    /// The device of the model.
    device: Device,
}

impl MeshParallel {
    /// Wraps `replicas`, the data parallelism of `model`, this rank's part of a model, or of all but the experts that ranks divide
    /// ([`without_divided_experts`]). All ranks of the mesh call it.
    ///
    /// # Errors
    /// If the schedule has other ranks than the pipeline, or as [`crate::comm::Pending::wait`].
    pub fn new(
        model: &impl Parameters,
        replicas: Box<dyn DataParallel>,
        groups: Groups,
        schedule: &Schedule,
    ) -> Result<MeshParallel> {
        let pipeline = groups.along(Axis::Pp);
        let tied = TiedTable::new(model, schedule, pipeline)?;
        let duplicate =
            tied.as_ref().filter(|tied| tied.is_duplicate()).map(|tied| tied.table().name().to_string());
        // The ranks of an expert group have equal gradients of all but the experts, of which the first's count.
        let first = groups.experts().is_none_or(|group| group.rank() == 0);
        let counted = |p: &Parameter| p.is_trained() && (first || p.has_replica_sites());
        let parameters = model.parameters();
        let mut names: Vec<String> =
            parameters.iter().filter(|p| counted(p)).map(|p| p.name().into()).collect();
        // Replicas of a stage have equal gradients, of which the first's count.
        let counts = |stage| schedule.ranks_of(stage).start == pipeline.rank();
        let counts = schedule.stages_of(pipeline.rank()).all(counts);
        names.retain(|name| counts && Some(name) != duplicate.as_ref());
        names.sort();
        names.dedup();
        let counted = all_names(groups.line(), &names)?;
        let device = model.parameters().first().map_or(Device::CPU, Parameter::device);
        Ok(MeshParallel { replicas, experts: None, biases: Vec::new(), groups, tied, counted, device })
    }

    /// Wraps the experts of `model` that the ranks of an expert group divide, if the mesh has such groups. Their gradients are added over the
    /// ranks that have the same ones, in the order of all replicas. If there are several, each keeps a shard of what `config` says; if there is
    /// one, it keeps all of them, or what `config` offloads on the other device. All ranks of the mesh call it.
    ///
    /// # Errors
    /// If the model has no such experts, memory is short, or as [`Zero::new`].
    pub fn with_experts(self, model: &impl Parameters, config: ZeroConfig) -> Result<MeshParallel> {
        let Some(same) = self.groups.expert_replicas() else { return Ok(self) };
        let (experts, line) = (divided_experts(model), self.groups.line());
        let has_own = !experts.parameters().is_empty();
        let has_some = match line.has_peers() {
            true => all_gather_object(line, &has_own)?.contains(&true),
            false => true,
        };
        if !has_some {
            let ep = self.groups.mesh().expert_ranks();
            return Err(Error::Config(format!(
                "expert parallelism: got ep {ep} for a model without experts that were made over these ranks, wanted 1"
            )));
        }
        let experts: Box<dyn DataParallel> = match (same.size(), config.offload) {
            (1, None) => {
                experts.parameters().iter().try_for_each(Parameter::materialize)?;
                Box::new(SingleDevice::new(&experts))
            }
            _ => Box::new(Zero::new(&experts, same.clone(), config)?),
        };
        Ok(MeshParallel { experts: Some(experts), ..self })
    }

    /// Moves the biases of routers after each update, by the loads of the tokens of all replicas since the gradients were zeroed.
    #[must_use]
    pub fn with_router_biases(self, biases: Vec<RouterBias>) -> MeshParallel {
        MeshParallel { biases, ..self }
    }

    /// Adds the loads over the replicas, and moves the biases.
    fn move_biases(&self) -> Result<()> {
        let replicas = self.groups.along(Axis::Dp);
        let own: Vec<Vec<u64>> = self.biases.iter().map(RouterBias::loads).collect();
        let all = match self.biases.is_empty() || replicas.size() == 1 || !replicas.has_peers() {
            true => vec![own],
            false => all_gather_object(replicas, &own)?,
        };
        for (i, bias) in self.biases.iter().enumerate() {
            let mut sum = vec![0; all[0][i].len()];
            all.iter().for_each(|own| sum.iter_mut().zip(&own[i]).for_each(|(sum, load)| *sum += load));
            bias.update(&sum)?;
        }
        Ok(())
    }

    /// The wrappers of the model's parameters.
    fn wrappers(&self) -> impl Iterator<Item = &dyn DataParallel> {
        std::iter::once(&*self.replicas).chain(self.experts.as_deref())
    }

    /// The sums of squares of the gradients that this rank has, of all wrappers.
    fn own_squares(&self) -> Result<Squares> {
        let mut own = self.replicas.grad_squares()?;
        let Some(experts) = &self.experts else { return Ok(own) };
        let experts = experts.grad_squares()?;
        let (first, all) = (own.of.len(), own.of.len() + experts.of.len());
        let sums = Tensor::zeros(&[all], DType::F64, self.device)?;
        for (start, from) in [(0, &own.sums), (first, &experts.sums)] {
            kernels::copy_(&mut sums.narrow(0, start, from.numel())?, &from.to_device(self.device, false)?)?;
        }
        own.of.extend(experts.of);
        Ok(Squares { of: own.of, sums })
    }

    /// The communicators.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The sums of squares of the parameters of all stages.
    fn of_all_stages(&self, own: Squares) -> Result<Squares> {
        let pipeline = self.groups.line();
        if pipeline.size() == 1 || !pipeline.has_peers() {
            return Ok(own);
        }
        let place = |name: &String| own.of.iter().position(|square| square.name == *name);
        let places: Option<Vec<usize>> = self.counted[pipeline.rank()].iter().map(place).collect();
        let missing = || Error::Config("the parameters that are trained have changed".into());
        let places = places.ok_or_else(missing)?;
        // If this rank trains nothing, its sums are not on the model's device.
        let mut sums = Tensor::zeros(&[places.len() + own.of.len()], DType::F64, self.device)?;
        let all = own.sums.to_device(self.device, false)?;
        kernels::copy_(&mut sums.narrow(0, places.len(), own.of.len())?, &all)?;
        let chosen = places.iter().enumerate().map(|(to, from)| (to, places.len() + from));
        kernels::add_pairs_(&mut sums, &chosen.collect::<Vec<_>>())?;

        let counts: Vec<usize> = self.counted.iter().map(Vec::len).collect();
        let mut names: Vec<(&String, usize)> = self.counted.iter().flatten().zip(0..).collect();
        names.sort();
        let pairs = names.iter().enumerate().map(|(to, &(_, from))| (to, from));
        let sums = gather_sums(pipeline, &sums.narrow(0, 0, places.len())?, &counts, names.len(), pairs)?;
        let of = names.into_iter().map(|(name, _)| Square { name: name.clone(), whole: true }).collect();
        Ok(Squares { of, sums })
    }
}

impl DataParallel for MeshParallel {
    fn parameters(&self) -> Vec<Parameter> {
        self.wrappers().flat_map(DataParallel::parameters).collect()
    }

    fn no_sync(&self) -> NoSync {
        let own = self.replicas.no_sync();
        self.experts.iter().fold(own, |own, experts| own.and(experts.no_sync()))
    }

    fn zero_grad(&self) -> Result<()> {
        self.biases.iter().for_each(RouterBias::reset);
        self.wrappers().try_for_each(DataParallel::zero_grad)
    }

    fn begin(&self) -> Result<()> {
        self.wrappers().try_for_each(DataParallel::begin)
    }

    /// To be called after the pipeline's schedule.
    fn finish(&self) -> Result<()> {
        self.tied.iter().try_for_each(TiedTable::exchange)?;
        self.wrappers().try_for_each(DataParallel::finish)
    }

    fn grad_squares(&self) -> Result<Squares> {
        self.of_all_stages(sum_squares(self.own_squares()?, self.groups.along(Axis::Tp))?)
    }

    fn updated(&self) -> Result<()> {
        self.move_biases()?;
        self.wrappers().try_for_each(DataParallel::updated)
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        if self.groups.along(Axis::Tp).size() == 1 && self.experts.is_none() {
            return self.replicas.peers();
        }
        Some(Arc::new(WholeParameters::new(self.groups.stage().clone(), self.device)))
    }

    fn traffic(&self) -> Traffic {
        let along = [Axis::Tp, Axis::Pp].map(|axis| self.groups.along(axis).traffic());
        let exchanges = self.groups.experts().map(|experts| experts.traffic());
        let all = self.wrappers().map(DataParallel::traffic).chain(along).chain(exchanges);
        all.fold(Traffic::default(), |sum, more| sum + more)
    }

    fn gathered(&self) -> Result<Option<Gathered>> {
        let held: Vec<Gathered> =
            self.wrappers().filter_map(|wrapper| wrapper.gathered().transpose()).collect::<Result<_>>()?;
        Ok((!held.is_empty()).then(|| Gathered::new(held)))
    }

    /// The parameters and buffers of all stages, on rank 0 of each replica; buffers are those of that replica.
    fn full_state_dict(&self, model: &dyn Parameters) -> Result<Entries> {
        let _values = self.gathered()?;
        gather_parts(&ShardedTensor::all_values_of(model)?, self.groups.model())
    }

    fn load_full_state_dict(&self, model: &dyn Parameters, entries: Entries) -> Result<()> {
        let whole = |(name, values): (String, Tensor)| Ok(ShardedTensor::whole(name, values.contiguous()?));
        let given = entries.into_iter().map(whole).collect::<Result<Vec<ShardedTensor>>>()?;
        // The entries of other stages are unknown to this rank, so unknown names are allowed.
        sharded_tensor::load("state dict", &self.parts(model)?, &given, false)?;
        self.reloaded()
    }

    fn full_optimizer_state(&self, _: Entries, _: &[&'static str]) -> Result<Entries> {
        Err(Error::Config(WHOLE_OPTIMIZER.into()))
    }

    fn part_of_optimizer_state(&self, _: Entries) -> Result<Entries> {
        Err(Error::Config(WHOLE_OPTIMIZER.into()))
    }

    fn parts(&self, model: &dyn Parameters) -> Result<Vec<ShardedTensor>> {
        let Some(experts) = &self.experts else { return self.replicas.parts(model) };
        let mut parts = self.replicas.parts(&without_divided_experts(model))?;
        parts.extend(experts.parts(&divided_experts(model))?);
        Ok(parts)
    }

    fn reloaded(&self) -> Result<()> {
        self.wrappers().try_for_each(DataParallel::reloaded)
    }
}

const WHOLE_OPTIMIZER: &str =
    "no rank of a mesh has room for the whole optimizer's state; save and restore it in parts (`checkpoint`)";

/// The names that each rank has.
fn all_names(comm: &Comm, own: &[String]) -> Result<Vec<Vec<String>>> {
    if comm.size() == 1 || !comm.has_peers() {
        return Ok(vec![own.to_vec(); comm.size()]);
    }
    all_gather_object(comm, &own.to_vec())
}
