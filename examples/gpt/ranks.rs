//! The ranks of a run: this process alone, several in it, or one of several that a launcher has started. Each takes a
//! share of the batch.

use std::time::{Duration, Instant};

use phalanx::nn::Parameters;
use phalanx::parallel::comm::{self, Comm, Error, Observer, observed};
use phalanx::parallel::data_parallel::{Alone, Buckets, DataParallel, Ddp, DdpConfig};
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
    comm: Option<Comm>,
}

/// Runs `f` in this process; as one rank, where a launcher has made it one. An error without text was printed already,
/// here or by another rank.
pub fn start(
    args: &TrainArgs,
    f: impl FnOnce(Option<&launch::Rank>) -> Result<(), String>,
) -> Result<(), String> {
    let Some(backend) = backend(args)? else { return f(None) };
    let mut said = false;
    let outcome = launch::Environment::new().backend(backend).run(|rank| {
        let done = fits(args, rank.size()).and_then(|()| f(Some(&rank)));
        said = done.as_ref().is_err_and(|error| say(rank.comm(), error));
        done
    });
    outcome.map_err(|error| match error {
        Error::Reported { .. } => String::new(),
        _ if said => String::new(),
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
        Some(Backend::Nccl) => Err("--backend nccl: this version has no NCCL, wanted threads or mpi".into()),
        None => {
            let launched = ["RANK", "WORLD_SIZE"].iter().all(|name| std::env::var_os(name).is_some());
            Ok(launched.then_some(launch::Backend::Tcp))
        }
    }
}

/// Refuses a run of other ranks than the launcher has started.
fn fits(args: &TrainArgs, started: usize) -> Result<(), String> {
    let wanted = args.data_ranks();
    match wanted == started {
        true => Ok(()),
        false => Err(format!("--dp {wanted} wants {wanted} ranks, and the launcher has started {started}")),
    }
}

/// Prints what ended the run, unless another rank has; ranks often fail of one cause. True if it was printed here.
fn say(comm: &Comm, error: &str) -> bool {
    let (begin, patience) = (Instant::now(), PATIENCE * comm.rank().min(10) as u32);
    while comm.failure().is_none() && begin.elapsed() < patience {
        std::thread::sleep(PATIENCE / 20);
    }
    match comm.failure() {
        Some(Error::Reported { .. }) => return false,
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
    let ranks = args.data_ranks();
    if args.device.is_meta() && ranks > 1 {
        let comm = comm::meta(0, ranks).map_err(|e| e.to_string())?;
        return Ok(vec![f(Place { device: args.device, comm: Some(comm) })?]);
    }
    if ranks == 1 || process.is_some() {
        if let (Device::Cpu(_), Some(threads)) = (args.device, args.threads) {
            args.device.set_threads(threads).map_err(|e| e.to_string())?;
        }
        let comm = process.filter(|_| ranks > 1).map(|rank| rank.comm().clone());
        return Ok(vec![f(Place { device: args.device, comm })?]);
    }
    let threads = launch::Threads::new(ranks);
    let threads = args.threads.map_or(threads, |each| threads.cores(each * ranks));
    let place = |rank: launch::Rank| Place { device: rank.device(), comm: Some(rank.comm().clone()) };
    threads.run(|rank| f(place(rank))).map_err(|e| e.to_string())
}

impl Place {
    /// The same, its calls observed.
    pub fn observed(mut self, observer: Option<Observer>) -> Place {
        if let Some(observer) = observer {
            self.comm = self.comm.map(|comm| observed(comm, observer));
        }
        self
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.rank())
    }

    /// How many ranks share the batch.
    pub fn size(&self) -> usize {
        self.comm.as_ref().map_or(1, |comm| comm.size())
    }

    /// Whether this rank writes files and shows progress.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// What these ranks share of a model: gradients, or what ZeRO's stage `zero` spreads over them.
    pub fn share(
        &self,
        model: &impl Parameters,
        grad_dtype: DType,
        zero: u8,
    ) -> Result<Box<dyn DataParallel>> {
        Ok(match (zero, &self.comm) {
            (0, None) => Box::new(Alone::new(model)),
            (0, Some(comm)) => Box::new(self.ddp(model, comm, grad_dtype)?),
            (stage, comm) => {
                let alone = || comm::threads::world(1, launch::TIMEOUT).swap_remove(0);
                let config = ZeroConfig::new(Stage::try_from(stage)?);
                let config = ZeroConfig { grad_dtype: Some(grad_dtype), ..config };
                Box::new(Zero::new(model, comm.clone().unwrap_or_else(alone), config)?)
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

    /// The sum of a number of each rank, added in their order.
    pub fn sum(&self, own: f64) -> Result<f64> {
        Ok(self.all(own)?.into_iter().fold(0.0, |sum, x| sum + x))
    }

    /// A number of each rank, in their order.
    pub fn all(&self, own: f64) -> Result<Vec<f64>> {
        let Some(comm) = &self.comm else { return Ok(vec![own]) };
        let own = Tensor::from_slice(&[own], &[1], Device::CPU)?;
        let mut all = Tensor::zeros(&[comm.size()], DType::F64, Device::CPU)?;
        comm.all_gather(&mut all, &own)?;
        Ok(all.to_vec()?)
    }
}
