//! [`Place`]: one rank among all ranks, with its device and communicators. [`start`] and [`ranks`] start the ranks of a run.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx_nn::{Parameters, Scope};
use phalanx_parallel::comm::{self, Comm, Observer, observed};
use phalanx_parallel::data_parallel::{Buckets, DataParallel, Ddp, DdpConfig, SingleDevice};
use phalanx_parallel::mesh::{Axis, Coordinates, Groups, Mesh};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::{self as parallel, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::identity::digest;
use crate::{Backend, Config, Error, Result};

/// A rank that fails waits this long for each rank before it, in case one of those has reported the failure already.
const PATIENCE: Duration = Duration::from_millis(100);

/// The number of gradient buckets that is aimed at, and the smallest size of a bucket.
const BUCKETS: usize = 8;
const BUCKET_BYTES_MIN: usize = 1 << 16;

/// Makes the observer of a group's calls from the group's name.
pub type Observers = Arc<dyn Fn(&'static str) -> Observer>;

/// One rank among all ranks: its device and its communicators.
#[derive(Clone, Debug)]
pub struct Place {
    /// This rank's own device.
    pub device: Device,
    /// All ranks.
    comm: Comm,
    /// Those along each axis.
    pub groups: Groups,
}

/// Runs `f` in this process. If a launcher has started several processes, each is one rank. If they fail, one of them returns the
/// error, and the others return [`Error::Elsewhere`]. The one with the error calls `tell` with the message first, because launchers such
/// as `mpirun` end all processes as soon as one has failed.
///
/// # Errors
/// That of `f`, or of joining the other processes.
pub fn start<T>(
    config: &Config,
    tell: impl FnOnce(&str),
    f: impl FnOnce(Option<&launch::Rank>) -> Result<T>,
) -> Result<T> {
    let backend = backend(config)?;
    // Finds out whether the device exists.
    Tensor::empty(&[0], DType::F32, config.device)
        .map_err(|e| Error::Config(format!("`device` {}: {e}", config.device)))?;
    let Some(backend) = backend else { return f(None) };
    let mut own = None;
    let outcome = environment(config, backend).run(|rank| {
        let done = fits(config, rank.size()).and_then(|()| f(Some(&rank)));
        done.inspect_err(|error| {
            own = said(rank.comm(), error);
            if let Some(text) = &own {
                tell(text);
            }
        })
    });
    outcome.map_err(|error| match (own, error) {
        (Some(said), _) => Error::Config(said),
        (None, comm) if matches!(&comm, comm::Error::Reported { .. }) && !comm.is_loss() => {
            // Time for the other process to print it.
            std::thread::sleep(3 * PATIENCE);
            Error::Elsewhere
        }
        (None, comm) => comm.into(),
    })
}

/// How processes communicate; `None` if all ranks are in this process.
fn backend(config: &Config) -> Result<Option<launch::Backend>> {
    match config.backend {
        Some(Backend::Threads) => Ok(None),
        #[cfg(feature = "mpi")]
        Some(Backend::Mpi) => Ok(Some(launch::Backend::Mpi)),
        #[cfg(not(feature = "mpi"))]
        Some(Backend::Mpi) => Err(Error::Config(
            "`backend` mpi: built without MPI, wanted a build with `--features mpi`".into(),
        )),
        Some(Backend::Nccl) => {
            check_nccl(config)?;
            #[cfg(feature = "mpi")]
            if is_under_mpi() {
                return Ok(Some(launch::Backend::Mpi));
            }
            Ok(launch::is_launched().then_some(launch::Backend::Tcp))
        }
        None => {
            let launched = ["RANK", "WORLD_SIZE"].iter().all(|name| std::env::var_os(name).is_some());
            Ok(launched.then_some(launch::Backend::Tcp))
        }
    }
}

/// Whether MPI's own launcher has started this process, and no variable names another place where ranks meet.
#[cfg(feature = "mpi")]
fn is_under_mpi() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().any(is_set) && !is_set("RANK") && !is_set("MASTER_ADDR")
}

/// Refuses NCCL if the device is no GPU or the library is missing.
fn check_nccl(config: &Config) -> Result<()> {
    if !config.device.is_cuda() {
        let why =
            format!("`backend` nccl is between GPUs, got `device` {}, wanted `device` cuda", config.device);
        return Err(Error::Config(why));
    }
    #[cfg(feature = "nccl")]
    return comm::check_nccl().map(drop).map_err(|e| Error::Config(format!("`backend` nccl: {e}")));
    #[cfg(not(feature = "nccl"))]
    Err(Error::Config("`backend` nccl: built without NCCL, wanted a build with `--features nccl`".into()))
}

/// How this process joins the others.
fn environment(config: &Config, backend: launch::Backend) -> launch::Environment {
    let environment = launch::Environment::new().backend(backend);
    match config.device {
        #[cfg(feature = "nccl")]
        Device::Cuda(_) if config.backend == Some(Backend::Nccl) => environment.nccl(Default::default()),
        Device::Cuda(_) => environment.cuda(),
        _ => environment,
    }
}

/// How the ranks of this process are started.
fn threads(config: &Config) -> launch::Threads {
    let ranks = config.ranks();
    let threads = launch::Threads::new(ranks);
    let threads = config.threads.map_or(threads, |each| threads.cores(each * ranks));
    match config.device {
        #[cfg(feature = "nccl")]
        Device::Cuda(_) if config.backend == Some(Backend::Nccl) => threads.nccl(Default::default()),
        Device::Cuda(_) => threads.cuda(),
        _ => threads,
    }
}

/// Refuses a layout with another number of ranks than the launcher has started.
fn fits(config: &Config, started: usize) -> Result<()> {
    let (wanted, layout) = (config.ranks(), &config.layout);
    match wanted == started {
        true => Ok(()),
        false => Err(Error::Config(format!(
            "dp {} x tp {} x pp {} wants {wanted} ranks, and the launcher has started {started}",
            layout.dp, layout.tp, layout.pp
        ))),
    }
}

/// The error that ended the run, or `None` if another rank reports it: ranks often fail of one cause. A lost process is reported by all
/// others, since they may be on different machines.
fn said(comm: &Comm, error: &Error) -> Option<String> {
    let (begin, patience) = (Instant::now(), PATIENCE * comm.rank().min(10) as u32);
    while comm.failure().is_none() && begin.elapsed() < patience {
        std::thread::sleep(PATIENCE / 20);
    }
    match comm.failure() {
        Some(failure @ comm::Error::Reported { .. }) if !failure.is_loss() => None,
        Some(failure) => Some(failure.to_string()),
        None => Some(format!("rank {} failed: {error}", comm.rank())),
    }
}

/// Runs `f` on every rank of this process, or as the one rank that the process is. Returns the results in order of the ranks. On a meta
/// device one rank of each pipeline stage runs for all ranks of its stage.
///
/// # Errors
/// The first error of a rank, which ends all ranks.
pub fn ranks<T: Send>(
    config: &Config,
    process: Option<&launch::Rank>,
    f: impl Fn(Place) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (ranks, mesh) = (config.ranks(), config.layout.mesh()?);
    let run = |device, comm| f(Place::new(device, comm, mesh)?);
    if config.device.is_meta() && ranks > 1 {
        let first = |pp| mesh.rank(Coordinates { tp: 0, dp: 0, pp });
        let stand = |pp| run(config.device, comm::meta(first(pp), ranks)?);
        return (0..mesh.size(Axis::Pp)).map(stand).collect();
    }
    if ranks == 1 || process.is_some() {
        if let (Device::Cpu(_), Some(threads)) = (config.device, config.threads) {
            config.device.set_threads(threads)?;
        }
        let (device, comm) = match process.filter(|_| ranks > 1) {
            Some(rank) if config.device.is_cuda() => (rank.device(), rank.comm().clone()),
            Some(rank) => (config.device, rank.comm().clone()),
            None => (config.device, comm::threads::world(1, launch::TIMEOUT).swap_remove(0)),
        };
        return Ok(vec![run(device, comm)?]);
    }
    Ok(threads(config).run(|rank| run(rank.device(), rank.comm().clone()))?)
}

impl Place {
    /// The place of `comm`'s rank on a mesh, computing on `device`. All ranks call it.
    ///
    /// # Errors
    /// If the mesh is of another number of ranks.
    pub fn new(device: Device, comm: Comm, mesh: Mesh) -> Result<Place> {
        let groups = Groups::new(mesh, &comm)?;
        Ok(Place { device, comm, groups })
    }

    /// The same place, with observers on the calls of each group along an axis. The run's own exchanges among all ranks are not observed.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn observed(self, observers: Option<Observers>) -> Result<Place> {
        let Some(of) = observers else { return Ok(self) };
        Ok(Place { groups: self.groups.wrapped(|name, comm| observed(comm, of(name))), ..self })
    }

    /// The scope in which this rank's part of the model is made.
    pub fn scope(&self, config: &Config) -> Scope {
        Scope::new(config.seed, config.dtype, self.device)
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

    /// The ranks that share the batch with this one.
    pub fn replicas(&self) -> &Comm {
        self.groups.along(Axis::Dp)
    }

    /// Whether this rank's losses count. The tensor-parallel ranks of a stage all have the same loss, of which one counts.
    pub(crate) fn tells_loss(&self) -> bool {
        self.groups.at().tp == 0
    }

    /// The data-parallel wrapper of a model: none, DDP or ZeRO.
    pub(crate) fn share(&self, model: &impl Parameters, config: &Config) -> Result<Box<dyn DataParallel>> {
        let (replicas, grad_dtype, find_unused) = (self.replicas(), config.grad_dtype(), config.find_unused);
        Ok(match config.zero {
            0 if replicas.size() == 1 => Box::new(SingleDevice::new(model)),
            0 => Box::new(self.ddp(model, replicas, grad_dtype, find_unused)?),
            stage => {
                let config = ZeroConfig::new(ZeroStage::try_from(stage)?);
                let config = ZeroConfig { grad_dtype: Some(grad_dtype), find_unused, ..config };
                Box::new(Zero::new(model, replicas.clone(), config)?)
            }
        })
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
    /// If it differs; the error names two ranks.
    pub fn agree(&self, told: &str) -> Result<()> {
        let digests = self.all((digest(told.as_bytes()) >> 12) as f64)?;
        match digests.iter().position(|other| *other != digests[0]) {
            None => Ok(()),
            Some(other) => {
                Err(Error::Config(format!("ranks 0 and {other} were given different flags or texts")))
            }
        }
    }

    /// The sum of a number of each rank, added in their order.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn sum(&self, own: f64) -> Result<f64> {
        Ok(self.all(own)?.into_iter().fold(0.0, |sum, x| sum + x))
    }

    /// A number of each rank, in their order.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn all(&self, own: f64) -> Result<Vec<f64>> {
        self.all_of(&[own])
    }

    /// Some numbers of each rank, as many of each, rank after rank.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn all_of(&self, own: &[f64]) -> Result<Vec<f64>> {
        let own = Tensor::from_slice(own, &[own.len()], Device::CPU)?;
        let mut all = Tensor::zeros(&[self.size() * own.numel()], DType::F64, Device::CPU)?;
        self.comm.all_gather(&mut all, &own)?;
        Ok(all.to_vec()?)
    }

    /// Whether all ranks are threads of this process. All ranks call it.
    pub(crate) fn is_one_process(&self) -> Result<bool> {
        let (_, own) = process();
        Ok(self.all_of(&own)?.chunks(2).all(|rank| rank == own))
    }
}

/// The identity of this process: when this was first called, and its birth time with its process id.
pub(crate) fn process() -> (Instant, [f64; 2]) {
    static PROCESS: OnceLock<(Instant, [f64; 2])> = OnceLock::new();
    let born = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_nanos() as f64);
    *PROCESS.get_or_init(|| (Instant::now(), [born(), f64::from(std::process::id())]))
}
