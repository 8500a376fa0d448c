//! Starts the ranks of a run: [`start`] joins the process group of a launcher, and [`ranks`] runs a function on every rank of this process.

use std::time::{Duration, Instant};

use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::launch;
use phalanx_parallel::mesh::{Axis, Coordinates};
use phalanx_parallel::{self as parallel, comm};
use phalanx_tensor::{DType, Device, Tensor};

use crate::memory_checkpoints::count_trainers;
use crate::mesh_rank::MeshRank;
use crate::{Backend, Config, Error, Result};

/// A rank that fails waits this long for each rank before it, in case one of those has reported the failure already.
const PATIENCE: Duration = Duration::from_millis(100);

/// Runs `f` in this process. If a launcher has started several processes, each is one rank. If they fail, one of them returns the
/// error, and the others return [`Error::Elsewhere`]; what all have found together (a disagreement, [`Error::Differs`]) all return. The
/// one with the error calls `tell` with the message first, because launchers such as `mpirun` end all processes as soon as one has
/// failed.
///
/// Where the launcher starts lost processes again, `f` is called anew in each [epoch](launch::Rank::epoch) of the run
/// ([`launch::Environment::run_elastic`]). There may be other ranks then: with [`Config::dp_auto`] the layout of an epoch is that of
/// [`Config::for_process`].
///
/// # Errors
/// That of `f`, or of joining the other processes.
pub fn start<T>(
    config: &Config,
    tell: impl Fn(&str),
    mut f: impl FnMut(Option<&launch::Rank>) -> Result<T>,
) -> Result<T> {
    outlive_full_quotas();
    let backend = backend(config)?;
    // Finds out whether the device exists.
    Tensor::empty(&[0], DType::F32, config.device)
        .map_err(|e| Error::Config(format!("`device` {}: {e}", config.device)))?;
    let Some(backend) = backend else { return f(None) };
    let mut reported = None;
    let outcome = environment(config, backend).run_elastic(|rank| {
        reported = None;
        count_trainers();
        let done = config.for_process(Some(&rank)).and_then(|_| f(Some(&rank)));
        done.inspect_err(|error| {
            if rank.is_left_to_rejoin() {
                return;
            }
            reported = error_to_report(&rank, error);
            if let Some(error) = &reported {
                tell(&error.to_string());
            }
        })
    });
    outcome.map_err(|error| match (reported, error) {
        (Some(reported), _) => reported,
        (None, comm) if matches!(&comm, comm::Error::Reported { .. }) && !comm.is_loss() => {
            // Time for the other process to print it.
            std::thread::sleep(3 * PATIENCE);
            Error::Elsewhere
        }
        (None, comm) => comm.into(),
    })
}

/// A write beyond the limit of a file's size (`ulimit -f`) is an error that is reported, where the system would end the process without
/// a word.
fn outlive_full_quotas() {
    #[cfg(unix)]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        // A signal that is handled ends nothing. Where the handler cannot be set, all is as before.
        ONCE.call_once(|| {
            drop(signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Default::default()))
        });
    }
}

/// How processes communicate; `None` if all ranks are in this process.
fn backend(config: &Config) -> Result<Option<launch::Backend>> {
    match config.backend {
        Some(Backend::Threads) => Ok(None),
        #[cfg(feature = "mpi")]
        Some(Backend::Mpi) if config.tls => Err(Error::Config(
            "`tls` is for ranks over TCP, got `backend` mpi: MPI has links of its own".into(),
        )),
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

/// A setting that may not have been checked yet.
fn seconds(setting: f64) -> Duration {
    Duration::try_from_secs_f64(setting).unwrap_or(launch::TIMEOUT)
}

/// How this process joins the others.
fn environment(config: &Config, backend: launch::Backend) -> launch::Environment {
    let (timeout, join_timeout) = (seconds(config.timeout_s), seconds(config.join_timeout_s));
    let environment = launch::Environment::new().backend(backend).timeout(timeout).join_timeout(join_timeout);
    let environment = if config.tls { environment.tls(true) } else { environment };
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
    let threads = launch::Threads::new(ranks).timeout(seconds(config.timeout_s));
    let threads = config.threads.map_or(threads, |each| threads.cores(each * ranks));
    match config.device {
        #[cfg(feature = "nccl")]
        Device::Cuda(_) if config.backend == Some(Backend::Nccl) => threads.nccl(Default::default()),
        Device::Cuda(_) => threads.cuda(),
        _ => threads,
    }
}

impl Config {
    /// This configuration with the layout of one epoch of a run, of which `process` is a rank: with [`Config::dp_auto`] it has as many
    /// replicas as the epoch's ranks make. Ranks that are threads have the layout's own number.
    ///
    /// # Errors
    /// If the layout is of another number of ranks than there are.
    pub fn for_process(&self, process: Option<&launch::Rank>) -> Result<Config> {
        process.map_or_else(|| Ok(self.clone()), |rank| self.for_ranks(rank.size()))
    }

    fn for_ranks(&self, started: usize) -> Result<Config> {
        let (wanted, &Layout { dp, tp, pp, .. }) = (self.ranks(), &self.layout);
        let each = tp.saturating_mul(pp);
        match self.dp_auto {
            true if started > 0 && started.checked_rem(each) == Some(0) => {
                let layout = Layout { dp: started / each, ..self.layout.clone() };
                Ok(Config { layout, ..self.clone() })
            }
            true => Err(Error::Config(format!(
                "`dp` auto wants a multiple of tp {tp} x pp {pp}, which is {each}, and the launcher has started {started} ranks"
            ))),
            false if wanted == started => Ok(self.clone()),
            false => Err(Error::Config(format!(
                "dp {dp} x tp {tp} x pp {pp} wants {wanted} ranks, and the launcher has started {started}; `--dp auto` takes as many as there are"
            ))),
        }
    }
}

/// The error that ended the run, or `None` if another rank reports it: ranks often fail of one cause. A lost process is reported by all
/// others. What all ranks have found together is reported by every rank: a disagreement, and other digests than were recorded. What
/// happened on another machine is reported by the first rank of this one.
fn error_to_report(rank: &launch::Rank, error: &Error) -> Option<Error> {
    let comm = rank.comm();
    match error.without_step() {
        Error::Parallel(parallel::Error::Disagreement(_)) => return Some(Error::Config(error.to_string())),
        Error::Differs(_) => return Some(error.clone()),
        _ => {}
    }
    let (begin, patience) = (Instant::now(), PATIENCE * comm.rank().min(10) as u32);
    while comm.failure().is_none() && begin.elapsed() < patience {
        std::thread::sleep(PATIENCE / 20);
    }
    let reported = match comm.failure() {
        Some(failure @ comm::Error::Reported { rank: reporter, .. }) if !failure.is_loss() => {
            let here = rank.on_this_machine();
            (!here.contains(&reporter) && here.start == rank.rank()).then_some(failure)
        }
        Some(failure) => Some(failure),
        None => Some(comm::Error::failed(comm.rank(), &error.to_string())),
    };
    reported.map(|failure| Error::Config(failure.to_string()))
}

/// Runs `f` on every rank of this process, or as the one rank that the process is, of a configuration whose layout is that of
/// [`Config::for_process`]. Returns the results in order of the ranks. On a meta
/// device one rank of each pipeline stage runs for all ranks of its stage.
///
/// # Errors
/// The first error of a rank, which ends all ranks.
pub fn ranks<T: Send>(
    config: &Config,
    process: Option<&launch::Rank>,
    f: impl Fn(MeshRank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (ranks, mesh) = (config.ranks(), config.layout.mesh()?);
    if let Some(started) = process.map(launch::Rank::size).filter(|started| *started != ranks) {
        let why = format!("the layout is of {ranks} ranks, and the launcher has started {started}");
        return Err(Error::Config(why));
    }
    let run = |device, comm| f(MeshRank::new(device, comm, mesh)?);
    if config.device.is_meta() && ranks > 1 {
        let first = |pp| mesh.rank(Coordinates { tp: 0, dp: 0, pp });
        let for_stage = |pp| {
            config.device.ledger()?.reset_peak();
            run(config.device, comm::meta(first(pp), ranks)?)
        };
        return (0..mesh.size(Axis::Pp)).map(for_stage).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_follow_the_number_of_ranks_if_they_are_to() {
        let layout = Layout { tp: 2, pp: 2, ..Layout::default() };
        let auto = Config { layout: layout.clone(), dp_auto: true, batch: 12, ..Config::default() };
        for dp in [1, 2, 3] {
            let settled = auto.for_ranks(4 * dp).unwrap();
            assert_eq!(settled, Config { layout: Layout { dp, ..layout.clone() }, ..auto.clone() });
            assert_eq!(settled.for_ranks(4).unwrap().layout.dp, 1);
        }
        for ranks in [0, 6] {
            let error = auto.for_ranks(ranks).unwrap_err().to_string();
            let wanted = format!("tp 2 x pp 2, which is 4, and the launcher has started {ranks} ranks");
            assert!(error.contains(&wanted), "{error}");
        }
        let error = Config { dp_auto: false, ..auto }.for_ranks(8).unwrap_err().to_string();
        let wanted = "wants 4 ranks, and the launcher has started 8; `--dp auto`";
        assert!(error.starts_with("dp 1 x tp 2 x pp 2") && error.contains(wanted), "{error}");
    }
}
