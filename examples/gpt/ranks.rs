//! The ranks of a run: this process alone, several in it, or one of several that a launcher has started.

use std::time::{Duration, Instant};

use phalanx::nn::Parameters;
use phalanx::parallel::comm::{self, Comm, Error, Observer, observed};
use phalanx::parallel::data_parallel::{Alone, Buckets, DataParallel, Ddp, DdpConfig};
use phalanx::parallel::hybrid::Layout;
use phalanx::parallel::mesh::{Axis, Coordinates, Groups, Mesh};
use phalanx::parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx::parallel::{Result, launch};
use phalanx::{DType, Device, Tensor};

use crate::args::{Backend, TrainArgs};

/// How long a rank that fails listens, for each rank before it, whether one of those has said so already.
const PATIENCE: Duration = Duration::from_millis(100);

/// How many buckets of gradients there are to be, and how small one may become for it.
const BUCKETS: usize = 8;
const BUCKET_BYTES_MIN: usize = 1 << 16;

/// One rank's place among all.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device that is this rank's alone.
    pub device: Device,
    /// All ranks.
    comm: Comm,
    /// Those along each axis.
    pub groups: Groups,
}

/// Runs `f` in this process; as one rank, where a launcher has made it one. An error without text was printed already,
/// here or by another rank.
pub fn start(
    args: &TrainArgs,
    f: impl FnOnce(Option<&launch::Rank>) -> Result<(), String>,
) -> Result<(), String> {
    let Some(backend) = backend(args)? else { return f(None) };
    let mut said = false;
    let outcome = environment(args, backend).run(|rank| {
        let done = fits(args, rank.size()).and_then(|()| f(Some(&rank)));
        said = done.as_ref().is_err_and(|error| say(rank.comm(), error));
        done
    });
    outcome.map_err(|error| match error {
        _ if said => String::new(),
        Error::Reported { .. } if !error.is_loss() => String::new(),
        error => error.to_string(),
    })
}

/// What carries messages between processes; none where all ranks are in this one.
fn backend(args: &TrainArgs) -> Result<Option<launch::Backend>, String> {
    match args.backend {
        Some(Backend::Threads) => Ok(None),
        #[cfg(feature = "mpi")]
        Some(Backend::Mpi) => Ok(Some(launch::Backend::Mpi)),
        #[cfg(not(feature = "mpi"))]
        Some(Backend::Mpi) => {
            Err("--backend mpi: built without MPI, wanted a build with `--features mpi`".into())
        }
        Some(Backend::Nccl) => {
            check_nccl(args)?;
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

/// Whether MPI's own launcher has started this process, and nobody says where else ranks meet.
#[cfg(feature = "mpi")]
fn is_under_mpi() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().any(is_set) && !is_set("RANK") && !is_set("MASTER_ADDR")
}

/// Refuses NCCL where it cannot be.
fn check_nccl(args: &TrainArgs) -> Result<(), String> {
    if !args.device.is_cuda() {
        return Err(format!(
            "--backend nccl is between GPUs, got --device {}, wanted --device cuda",
            args.device
        ));
    }
    #[cfg(feature = "nccl")]
    return comm::check_nccl().map(drop).map_err(|e| format!("--backend nccl: {e}"));
    #[cfg(not(feature = "nccl"))]
    Err("--backend nccl: built without NCCL, wanted a build with `--features nccl`".into())
}

/// How this process joins the others.
fn environment(args: &TrainArgs, backend: launch::Backend) -> launch::Environment {
    let environment = launch::Environment::new().backend(backend);
    match args.device {
        #[cfg(feature = "nccl")]
        Device::Cuda(_) if args.backend == Some(Backend::Nccl) => environment.nccl(Default::default()),
        Device::Cuda(_) => environment.cuda(),
        _ => environment,
    }
}

/// How the ranks of this process are started.
fn threads(args: &TrainArgs, ranks: usize) -> launch::Threads {
    let threads = launch::Threads::new(ranks);
    let threads = args.threads.map_or(threads, |each| threads.cores(each * ranks));
    match args.device {
        #[cfg(feature = "nccl")]
        Device::Cuda(_) if args.backend == Some(Backend::Nccl) => threads.nccl(Default::default()),
        Device::Cuda(_) => threads.cuda(),
        _ => threads,
    }
}

/// Refuses a run of other ranks than the launcher has started.
fn fits(args: &TrainArgs, started: usize) -> Result<(), String> {
    let (wanted, Layout { dp, tp, pp, .. }) = (args.all_ranks(), args.layout());
    match wanted == started {
        true => Ok(()),
        false => Err(format!(
            "--dp {dp} x --tp {tp} x --pp {pp} wants {wanted} ranks, and the launcher has started {started}"
        )),
    }
}

/// FNV-1a (Fowler, Noll, Vo).
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Prints what ended the run, unless another rank has; ranks often fail of one cause. That a process is gone is said by all
/// others, each perhaps on a machine of its own. True if it was printed here.
fn say(comm: &Comm, error: &str) -> bool {
    let (begin, patience) = (Instant::now(), PATIENCE * comm.rank().min(10) as u32);
    while comm.failure().is_none() && begin.elapsed() < patience {
        std::thread::sleep(PATIENCE / 20);
    }
    match comm.failure() {
        Some(failure @ Error::Reported { .. }) if !failure.is_loss() => return false,
        Some(failure) => crate::complain(&failure.to_string()),
        None => crate::complain(&format!("rank {} failed: {error}", comm.rank())),
    }
    true
}

/// Runs `f` on every rank of this process, or on the one that it is; the results in order.
pub fn run<T: Send>(
    args: &TrainArgs,
    process: Option<&launch::Rank>,
    f: impl Fn(Place) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let (ranks, mesh) = (args.all_ranks(), args.layout().mesh().map_err(|e| e.to_string())?);
    let run = |device, comm| f(Place::new(device, comm, mesh).map_err(|e| e.to_string())?);
    if args.device.is_meta() && ranks > 1 {
        // One rank of each stage stands for all of its stage.
        let first = |pp| mesh.rank(Coordinates { tp: 0, dp: 0, pp });
        let stand = |pp| run(args.device, comm::meta(first(pp), ranks).map_err(|e| e.to_string())?);
        return (0..mesh.size(Axis::Pp)).map(stand).collect();
    }
    if ranks == 1 || process.is_some() {
        if let (Device::Cpu(_), Some(threads)) = (args.device, args.threads) {
            args.device.set_threads(threads).map_err(|e| e.to_string())?;
        }
        let (device, comm) = match process.filter(|_| ranks > 1) {
            Some(rank) if args.device.is_cuda() => (rank.device(), rank.comm().clone()),
            Some(rank) => (args.device, rank.comm().clone()),
            None => (args.device, comm::threads::world(1, launch::TIMEOUT).swap_remove(0)),
        };
        return Ok(vec![run(device, comm)?]);
    }
    threads(args, ranks).run(|rank| run(rank.device(), rank.comm().clone())).map_err(|e| e.to_string())
}

impl Place {
    fn new(device: Device, comm: Comm, mesh: Mesh) -> Result<Place> {
        let groups = Groups::new(mesh, &comm)?;
        Ok(Place { device, comm, groups })
    }

    /// The same, its calls observed.
    pub fn observed(self, observer: Option<Observer>) -> Result<Place> {
        match observer {
            Some(observer) => Place::new(self.device, observed(self.comm, observer), *self.groups.mesh()),
            None => Ok(self),
        }
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

    /// Whether this rank's losses count: of those that hold a stage together all have the same.
    pub fn tells_loss(&self) -> bool {
        self.groups.at().tp == 0
    }

    /// What replicas share of a model: gradients, or what ZeRO's stage `zero` spreads over them.
    pub fn share(
        &self,
        model: &impl Parameters,
        grad_dtype: DType,
        zero: u8,
    ) -> Result<Box<dyn DataParallel>> {
        let replicas = self.replicas();
        Ok(match zero {
            0 if replicas.size() == 1 => Box::new(Alone::new(model)),
            0 => Box::new(self.ddp(model, replicas, grad_dtype)?),
            stage => {
                let config = ZeroConfig::new(Stage::try_from(stage)?);
                let config = ZeroConfig { grad_dtype: Some(grad_dtype), ..config };
                Box::new(Zero::new(model, replicas.clone(), config)?)
            }
        })
    }

    /// A small model's buckets are small too, so that most of them are on their way before backward is over.
    fn ddp(&self, model: &impl Parameters, comm: &Comm, grad_dtype: DType) -> Result<Ddp> {
        let elements: usize = model.parameters().iter().map(|p| p.tensor().numel()).sum();
        let bucket_bytes = (elements * grad_dtype.size() / BUCKETS).clamp(BUCKET_BYTES_MIN, Buckets::BYTES);
        let first_bucket_bytes = bucket_bytes.min(Buckets::FIRST_BYTES);
        let (grad_dtype, default) = (Some(grad_dtype), DdpConfig::default());
        let config = DdpConfig { first_bucket_bytes, bucket_bytes, grad_dtype, ..default };
        Ddp::new(model, comm.clone(), config)
    }

    /// Refuses to go on where ranks were told different things.
    pub fn agree(&self, told: &str) -> Result<(), String> {
        let digests = self.all((digest(told.as_bytes()) >> 12) as f64).map_err(|e| e.to_string())?;
        match digests.iter().position(|other| *other != digests[0]) {
            None => Ok(()),
            Some(other) => Err(format!("ranks 0 and {other} were given different flags or texts")),
        }
    }

    /// The sum of a number of each rank, added in their order.
    pub fn sum(&self, own: f64) -> Result<f64> {
        Ok(self.all(own)?.into_iter().fold(0.0, |sum, x| sum + x))
    }

    /// A number of each rank, in their order.
    pub fn all(&self, own: f64) -> Result<Vec<f64>> {
        let comm = &self.comm;
        let own = Tensor::from_slice(&[own], &[1], Device::CPU)?;
        let mut all = Tensor::zeros(&[comm.size()], DType::F64, Device::CPU)?;
        comm.all_gather(&mut all, &own)?;
        Ok(all.to_vec()?)
    }
}
