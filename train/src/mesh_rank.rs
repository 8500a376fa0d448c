//! [`MeshRank`]: one rank of a run's mesh, with its device, its communicators and its data-parallel wrapper.

use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use phalanx_nn::{Parameters, Scope};
use phalanx_parallel::comm::{Comm, Observer, observed};
use phalanx_parallel::data_parallel::{Buckets, DataParallel, Ddp, DdpConfig, SingleDevice};
use phalanx_parallel::expert_parallel::without_divided_experts;
use phalanx_parallel::hybrid::{MeshParallel, StagedModel};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{self as parallel, agree};
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Config, Offload, Result};

/// The number of gradient buckets that is aimed at, and the smallest size of a bucket.
const BUCKETS: usize = 8;
const BUCKET_BYTES_MIN: usize = 1 << 16;

/// Makes the observer of a group's calls from the group's name.
pub type Observers = Arc<dyn Fn(&'static str) -> Observer>;

/// One rank of a run's mesh: its device and its communicators.
#[derive(Clone, Debug)]
pub struct MeshRank {
    /// This rank's own device.
    pub device: Device,
    /// All ranks.
    comm: Comm,
    /// Its group along each axis of the mesh.
    pub groups: Groups,
}

impl MeshRank {
    /// The rank of `comm` on a mesh, computing on `device`. All ranks call it.
    ///
    /// # Errors
    /// If the mesh is of another number of ranks.
    pub fn new(device: Device, comm: Comm, mesh: Mesh) -> Result<MeshRank> {
        let groups = Groups::new(mesh, &comm)?;
        Ok(MeshRank { device, comm, groups })
    }

    /// The same rank, with observers on the calls of each group along an axis. The run's own exchanges among all ranks are not observed.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn observed(self, observers: Option<Observers>) -> Result<MeshRank> {
        let Some(of) = observers else { return Ok(self) };
        Ok(MeshRank { groups: self.groups.wrapped(|name, comm| observed(comm, of(name))), ..self })
    }

    /// The scope in which this rank's part of the model is made. If its parameters are to be sharded, their values are drawn when they are.
    pub fn scope(&self, config: &Config) -> Scope {
        let scope = Scope::new(config.seed, config.dtype, self.device);
        if config.zero == 3 { scope.deferred() } else { scope }
    }

    /// All ranks.
    pub fn all_ranks(&self) -> &Comm {
        &self.comm
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// Whether this rank writes files and shows progress.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// The data-parallel group: the ranks that train the same part of the model on other rows of the batch.
    pub fn replicas(&self) -> &Comm {
        self.groups.along(Axis::Dp)
    }

    /// Whether this rank's losses count. The tensor-parallel ranks of a stage all have the same loss, of which one counts.
    pub(crate) fn counts_loss(&self) -> bool {
        self.groups.at().tp == 0
    }

    /// The data-parallel wrapper of a model, or of all but the experts that ranks divide: none, DDP or ZeRO.
    pub(crate) fn data_parallel(
        &self,
        model: &impl Parameters,
        config: &Config,
    ) -> Result<Box<dyn DataParallel>> {
        let (replicas, grad_dtype, find_unused) = (self.replicas(), config.grad_dtype(), config.find_unused);
        Ok(match (config.zero, config.offload) {
            (0, Offload::None) if replicas.size() == 1 => Box::new(SingleDevice::new(model)),
            (0, Offload::None) => Box::new(self.ddp(model, replicas, grad_dtype, find_unused)?),
            _ => Box::new(Zero::new(model, replicas.clone(), self.zero_config(config)?)?),
        })
    }

    /// What ZeRO shards, and where the shards are.
    fn zero_config(&self, config: &Config) -> Result<ZeroConfig> {
        let offload = config.offload;
        // A rank without replicas that offloads its optimizer is ZeRO-1 of one rank.
        let stage = ZeroStage::try_from(config.zero.max(1))?;
        Ok(ZeroConfig {
            grad_dtype: Some(config.grad_dtype()),
            find_unused: config.find_unused,
            offload: (offload != Offload::None).then(|| self.offload_device(config)).transpose()?,
            offload_parameters: offload == Offload::Parameters,
            ..ZeroConfig::new(stage)
        })
    }

    /// The wrapper of all axes of the mesh.
    pub(crate) fn mesh_parallel(&self, model: &impl StagedModel, config: &Config) -> Result<MeshParallel> {
        let schedule = config.layout.schedule()?;
        let replicas = self.data_parallel(&without_divided_experts(model), config)?;
        let wrapped = MeshParallel::new(model, replicas, self.groups.clone(), &schedule)?;
        let wrapped = wrapped.with_experts(model, self.zero_config(config)?)?;
        Ok(wrapped.with_router_biases(model.router_biases()))
    }

    /// The device in the host's memory for what this rank offloads: a CPU device of its own, so that its ledger has that and nothing else.
    /// For a rank on a meta device it is another meta device.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn offload_device(&self, config: &Config) -> Result<Device> {
        // Ranks have the lower half of the numbers of devices.
        let other = |index: u16| (index + 512) % 1024;
        let host = match self.device {
            Device::Meta(index) => return Ok(Device::Meta(other(index))),
            Device::Cpu(index) | Device::Cuda(index) => Device::Cpu(other(index)),
        };
        match (self.device, config.threads) {
            (Device::Cuda(_), Some(threads)) => host.set_threads(threads)?,
            (Device::Cuda(_), None) => {
                let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
                host.set_threads((cores / self.size()).max(1))?;
            }
            // While one computes, the other waits.
            _ => host.set_pool(self.device.pool()?)?,
        }
        Ok(host)
    }

    /// DDP over these replicas. A small model's buckets are small too, so that most are reduced before backward is over.
    fn ddp(
        &self,
        model: &impl Parameters,
        comm: &Comm,
        grad_dtype: DType,
        find_unused: bool,
    ) -> parallel::Result<Ddp> {
        let elements: usize = model.parameters().iter().map(|p| p.tensor().numel()).sum();
        let bucket_bytes = (elements * grad_dtype.size() / BUCKETS).clamp(BUCKET_BYTES_MIN, Buckets::BYTES);
        let first_bucket_bytes = bucket_bytes.min(Buckets::FIRST_BYTES);
        let (grad_dtype, default) = (Some(grad_dtype), DdpConfig::default());
        let config = DdpConfig { first_bucket_bytes, bucket_bytes, grad_dtype, find_unused, ..default };
        Ddp::new(model, comm.clone(), config)
    }

    /// Compares a text between all ranks.
    ///
    /// # Errors
    /// If it differs; the error has the texts where they differ, and the ranks that have each.
    #[track_caller]
    pub fn check_equal(&self, text: &str) -> Result<()> {
        Ok(agree(&self.comm, &vec![("the text".into(), text.into())])?)
    }

    /// The sum of a number of each rank, added in order of the ranks.
    ///
    /// # Errors
    /// If a rank does not take part.
    #[track_caller]
    pub fn sum(&self, own: f64) -> Result<f64> {
        Ok(self.all_gather(own)?.into_iter().fold(0.0, |sum, x| sum + x))
    }

    /// All-gathers a number of each rank, in order of the ranks.
    ///
    /// # Errors
    /// If a rank does not take part.
    #[track_caller]
    pub fn all_gather(&self, own: f64) -> Result<Vec<f64>> {
        self.all_gather_slice(&[own])
    }

    /// All-gathers the numbers of each rank, as many of each, in order of the ranks. They count in the memory of each rank's own device or, on a
    /// GPU, of `cpu:0`.
    ///
    /// # Errors
    /// If a rank does not take part.
    #[track_caller]
    pub fn all_gather_slice(&self, own: &[f64]) -> Result<Vec<f64>> {
        let host = self.device.host();
        let own = Tensor::from_slice(own, &[own.len()], host)?;
        let mut all = Tensor::zeros(&[self.size() * own.numel()], DType::F64, host)?;
        self.comm.all_gather(&mut all, &own)?;
        Ok(all.to_vec()?)
    }

    /// Whether all ranks are threads of this process. All ranks call it.
    pub(crate) fn is_one_process(&self) -> Result<bool> {
        let (_, own) = process();
        Ok(self.all_gather_slice(&own)?.chunks(2).all(|rank| rank == own))
    }
}

/// The identity of this process: when this was first called, and its birth time with its process id.
pub(crate) fn process() -> (Instant, [f64; 2]) {
    static PROCESS: OnceLock<(Instant, [f64; 2])> = OnceLock::new();
    let born = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_nanos() as f64);
    *PROCESS.get_or_init(|| (Instant::now(), [born(), f64::from(std::process::id())]))
}
