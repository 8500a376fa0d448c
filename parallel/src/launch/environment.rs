//! [`environment`]: this process as one rank of a run that a launcher has started. [`WorkerEnv`]: the rank, size and address that
//! the launcher gave this process in its environment.

use std::fmt::Display;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_rendezvous::{Credentials, Master, rendezvous};
use phalanx_tensor::Device;

use super::devices::{Cores, RankDevices};
use super::{JOIN_TIMEOUT, Rank, TIMEOUT};
use crate::catch_panic::catch_panic;
use crate::comm::wire::tcp::Tcp;
use crate::comm::wire::{Process, Wire, connect};
use crate::comm::{Comm, Error, Result};

/// Runs `f` as this process's rank of a run, over TCP. See [`Environment`].
///
/// # Errors
/// The first error or panic of the run, of this rank or another.
pub fn environment<T, E: Display>(f: impl FnOnce(Rank) -> Result<T, E>) -> Result<T> {
    Environment::new().run(f)
}

/// Whether a launcher has started this process as one of several, as far as its environment says.
pub fn is_launched() -> bool {
    WorkerEnv::is_named(|name| std::env::var(name).ok())
}

/// The transport of messages between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Sockets. Ranks meet at `MASTER_ADDR:MASTER_PORT`, or by the file of `PHALANX_RENDEZVOUS=file:///PATH`.
    Tcp,
    /// MPI, whose own launcher has started the processes.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// How this process joins a run whose processes were started by `mpirun`, `srun`, `torchrun` or anything that sets
/// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as `phalanx-launch` does. Without any it is a run of one rank.
///
/// If `PHALANX_SECRET` is set, or `PHALANX_SECRET_FILE` names a file that has it, processes prove to each other that they know it
/// before they meet; `phalanx-launch` sets one. `PHALANX_JOB` names the run, so that two runs on one port do not mix. With
/// `PHALANX_TLS=1` on every rank all that they send is encrypted and authenticated, in programs that are built with the feature `tls`.
/// Otherwise what is sent after they have met is neither: use it inside a network that you trust.
#[derive(Clone, Debug)]
pub struct Environment {
    worker: Option<WorkerEnv>,
    backend: Backend,
    timeout: Duration,
    join_timeout: Option<Duration>,
    secret: Option<String>,
    tls: Option<bool>,
    cores: Option<usize>,
    devices: RankDevices,
}

impl Default for Environment {
    fn default() -> Environment {
        Environment {
            worker: None,
            backend: Backend::Tcp,
            timeout: TIMEOUT,
            join_timeout: None,
            secret: None,
            tls: None,
            cores: None,
            devices: RankDevices::Cpu,
        }
    }
}

impl Environment {
    /// Over TCP.
    pub fn new() -> Environment {
        Environment::default()
    }

    /// As rank `rank` of `size` on this machine, meeting at port `port` of it, whatever the environment says.
    pub fn local(mut self, rank: usize, size: usize, port: u16) -> Environment {
        let (local_rank, local_size, master) = (rank, size, Master::Address("127.0.0.1".into(), port));
        let known = Credentials::default();
        self.worker = Some(WorkerEnv { rank, size, local_rank, local_size, master, known });
        self
    }

    /// Over something else.
    pub fn backend(mut self, backend: Backend) -> Environment {
        self.backend = backend;
        self
    }

    /// How long ranks wait for each other in a collective or a transfer ([`TIMEOUT`] unless set).
    pub fn timeout(mut self, timeout: Duration) -> Environment {
        self.timeout = timeout;
        self
    }

    /// How long processes wait for each other at the start. Unless set it is [`JOIN_TIMEOUT`], or the other timeout if that is shorter.
    pub fn join_timeout(mut self, timeout: Duration) -> Environment {
        self.join_timeout = Some(timeout);
        self
    }

    /// The run's secret, in place of that of `PHALANX_SECRET` or `PHALANX_SECRET_FILE`.
    pub fn secret(mut self, secret: &str) -> Environment {
        self.secret = Some(secret.into());
        self
    }

    /// Whether ranks over TCP encrypt what they send, in place of `PHALANX_TLS`. All ranks must, or none; and they need a secret.
    pub fn tls(mut self, tls: bool) -> Environment {
        self.tls = Some(tls);
        self
    }

    /// The cores that the ranks of this machine share (all unless set).
    pub fn cores(mut self, cores: usize) -> Environment {
        self.cores = Some(cores);
        self
    }

    /// Each rank on a GPU of its machine, by its number there. Its tensors are
    /// exchanged by way of the host's memory.
    pub fn cuda(mut self) -> Environment {
        self.devices = RankDevices::Cuda;
        self
    }

    /// [`Environment::cuda`], but tensors on the GPUs are exchanged over NCCL.
    #[cfg(feature = "nccl")]
    pub fn nccl(mut self, config: crate::comm::NcclConfig) -> Environment {
        self.devices = RankDevices::Nccl(config);
        self
    }

    /// Runs `f` as this process's rank, and waits for the others to end.
    ///
    /// # Errors
    /// As [`environment`]; and if the environment makes no sense or ranks do not come in time.
    pub fn run<T, E: Display>(self, f: impl FnOnce(Rank) -> Result<T, E>) -> Result<T> {
        let mut worker = match &self.worker {
            Some(worker) => worker.clone().checked()?,
            None => WorkerEnv::find(|name| std::env::var(name).ok())?,
        };
        worker.known.secret = self.secret.clone().unwrap_or(worker.known.secret);
        worker.known.tls = self.tls.unwrap_or(worker.known.tls);
        let _cores = Cores::divide(self.cores, worker.local_size, &[(worker.local_rank, Device::CPU)])?;
        let (devices, local) = (self.devices, worker.local_rank);
        let first = worker.rank.saturating_sub(local);
        let here = first..(first + worker.local_size).min(worker.size);
        let (mut process, control) = self.join(worker)?;
        // A rank without a GPU ends the run of all ranks.
        let seated = catch_panic(|| {
            // Processes share no memory: their CPUs need no numbers.
            let device = if let RankDevices::Cpu = devices { Device::CPU } else { devices.device(local)? };
            devices.join(&control, device).map(|(comm, session)| (Rank::new(comm, device, here), session))
        });
        let outcome = seated.map_err(|cause| control.fail(&cause)).and_then(|(me, session)| {
            let outcome = catch_panic(|| f(me)).map_err(|cause| control.fail(&cause));
            session.leave();
            outcome
        });
        process.leave();
        match (process.failure(), outcome) {
            (None, Ok(result)) => Ok(result),
            (failure, _) => {
                Err(failure.unwrap_or_else(|| Error::Launch("the run ended without a result".into())))
            }
        }
    }

    fn join(self, worker: WorkerEnv) -> Result<(Process, Comm)> {
        let WorkerEnv { rank, size, master, known, .. } = worker;
        let timeout = self.timeout;
        let (events, heard) = channel();
        let told = events.clone();
        match self.backend {
            Backend::Tcp => {
                let join_timeout = self.join_timeout.unwrap_or(timeout.min(JOIN_TIMEOUT));
                let streams = rendezvous((rank, size), &master, &known, join_timeout).map_err(not_met)?;
                let wire =
                    Tcp::new(streams, &told).map_err(|e| Error::Launch(format!("rank {rank}: {e}")))?;
                connect((rank, size), timeout, (events, heard), move || Ok(Box::new(wire) as Box<dyn Wire>))
            }
            #[cfg(feature = "mpi")]
            Backend::Mpi => {
                use crate::comm::wire::mpi::Mpi;
                let wire = move || Mpi::new((rank, size)).map(|wire| Box::new(wire) as Box<dyn Wire>);
                connect((rank, size), timeout, (events, heard), wire)
            }
        }
    }
}

/// Why ranks have not met.
fn not_met(error: phalanx_rendezvous::Error) -> Error {
    Error::Launch(error.to_string())
}

/// This process's rank in the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerEnv {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The rank among the processes of this machine.
    pub(super) local_rank: usize,
    pub(super) local_size: usize,
    /// Where rank 0 listens.
    pub(super) master: Master,
    /// By which the processes of the run know each other.
    pub(super) known: Credentials,
}

/// Names of the rank, the number of ranks, and the same on this machine: torchrun's, Open MPI's, MPICH's and Intel's,
/// Slurm's.
const NAMES: [[&str; 4]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"],
];

/// Ranks at most. Each has a socket to every other.
const SIZE_MAX: usize = 65_535;

/// Where rank 0 listens unless told otherwise.
const PORT: u16 = 29_500;

impl WorkerEnv {
    /// From variables; the first launcher that names a rank counts. A process that no launcher has started is alone.
    ///
    /// # Errors
    /// If a variable is no number, the rank is not below the size, or several machines have no address to meet at.
    pub(super) fn find(variable: impl Fn(&str) -> Option<String>) -> Result<WorkerEnv> {
        let number = |name: &str| number(&variable, name);
        let Some(names) = WorkerEnv::names(&variable) else {
            let (master, known) = (Master::Address("127.0.0.1".into(), PORT), Credentials::default());
            return Ok(WorkerEnv { rank: 0, size: 1, local_rank: 0, local_size: 1, master, known });
        };
        let (rank, size) = (number(names[0])?.unwrap_or(0), number(names[1])?.unwrap_or(1));
        let local_size = number(names[3])?.filter(|&n| n > 0 && n <= size);
        let local_rank = number(names[2])?.filter(|&r| r < local_size.unwrap_or(size));
        let master = match variable("PHALANX_RENDEZVOUS") {
            Some(url) => file(&url)?,
            None => address(&variable, local_size.unwrap_or(size) == size)?,
        };
        let local_size = local_size.unwrap_or(size);
        let local_rank = local_rank.unwrap_or(rank % local_size.max(1));
        let known = Credentials::find(&variable).map_err(not_met)?;
        WorkerEnv { rank, size, local_rank, local_size, master, known }.checked()
    }

    /// Whether a launcher has named a rank.
    pub(super) fn is_named(variable: impl Fn(&str) -> Option<String>) -> bool {
        WorkerEnv::names(&variable).is_some()
    }

    fn names(variable: &impl Fn(&str) -> Option<String>) -> Option<&'static [&'static str; 4]> {
        NAMES.iter().find(|names| variable(names[0]).is_some() && variable(names[1]).is_some())
    }

    /// Itself, if there are not too many ranks and the rank is below their number.
    pub(super) fn checked(self) -> Result<WorkerEnv> {
        let WorkerEnv { rank, size, .. } = self;
        match rank < size {
            _ if size > SIZE_MAX => {
                Err(Error::Launch(format!("got {size} ranks (WORLD_SIZE), wanted at most {SIZE_MAX}")))
            }
            true => Ok(self),
            false => Err(Error::Launch(format!("got rank {rank} of {size}, wanted one below that"))),
        }
    }
}

/// The variable as a number.
fn number(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    let wrong = |text: &String| Error::Launch(format!("got {name}={text}, wanted a number"));
    variable(name).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()
}

/// The address of rank 0. Ranks that are all on this machine need none.
fn address(variable: &impl Fn(&str) -> Option<String>, one_machine: bool) -> Result<Master> {
    let address = match variable("MASTER_ADDR") {
        Some(address) => address,
        None if one_machine => "127.0.0.1".into(),
        None => {
            return Err(Error::Launch(
                "the ranks are on several machines: set MASTER_ADDR to rank 0's".into(),
            ));
        }
    };
    let port = number(variable, "MASTER_PORT")?.unwrap_or(PORT.into());
    let wrong = || Error::Launch(format!("got MASTER_PORT={port}, wanted a number from 1 to 65535"));
    let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(wrong)?;
    // An address of IPv6 may be in brackets, as it is beside a port.
    let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map(String::from);
    Ok(Master::Address(bare.unwrap_or(address), port))
}

/// The file of a URL.
fn file(url: &str) -> Result<Master> {
    let path = url.strip_prefix("file://").map(Path::new).filter(|path| path.is_absolute());
    let wrong = || Error::Launch(format!("got PHALANX_RENDEZVOUS={url}, wanted file:///PATH"));
    path.map(|path| Master::File(path.into())).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<WorkerEnv> {
        WorkerEnv::find(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    fn worker(rank: usize, size: usize, local: (usize, usize), master: (&str, u16)) -> WorkerEnv {
        let (master, known) = (Master::Address(master.0.into(), master.1), Credentials::default());
        WorkerEnv { rank, size, local_rank: local.0, local_size: local.1, master, known }
    }

    #[test]
    fn every_launcher_is_understood() {
        let alone = worker(0, 1, (0, 1), ("127.0.0.1", PORT));
        assert_eq!(find(&[]).unwrap(), alone);
        assert_eq!(find(&[("RANK", "0")]).unwrap(), alone);
        let named =
            |variables: &[&str]| WorkerEnv::is_named(|name| variables.contains(&name).then(|| "1".into()));
        assert!(!named(&[]) && !named(&["RANK"]) && named(&["PMI_RANK", "PMI_SIZE"]));
        let torchrun =
            [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "1234")];
        assert_eq!(find(&torchrun).unwrap(), worker(3, 4, (3, 4), ("node0", 1234)));
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.1"),
        ];
        assert_eq!(find(&mpirun).unwrap(), worker(5, 8, (1, 4), ("10.0.0.1", PORT)));
        let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "1")];
        assert_eq!(find(&srun).unwrap(), worker(1, 2, (1, 2), ("127.0.0.1", PORT)));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = |variables: &[(&str, &str)]| find(variables).unwrap_err().to_string();
        assert!(error(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("RANK=x"));
        assert!(error(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("rank 2 of 2"));
        let of = |size| error(&[("RANK", "0"), ("WORLD_SIZE", size)]);
        assert!(
            of("18446744073709551615")
                .contains("18446744073709551615 ranks (WORLD_SIZE), wanted at most 65535")
        );
        assert!(of("100000000").contains("wanted at most 65535"));
        let alone = [("RANK", "0"), ("WORLD_SIZE", "2")];
        let more = |more: &[(&'static str, &'static str)]| find(&[&alone[..], more].concat());
        assert!(
            more(&[("MASTER_PORT", "0")])
                .unwrap_err()
                .to_string()
                .contains("MASTER_PORT=0, wanted a number from 1")
        );
        let six = more(&[("MASTER_ADDR", "[::1]"), ("MASTER_PORT", "5")]).unwrap().master;
        assert_eq!((six.to_string(), six), ("[::1]:5".into(), Master::Address("::1".into(), 5)));
        for (variables, wanted) in [
            (&[("PHALANX_SECRET", " ")][..], "PHALANX_SECRET is empty"),
            (&[("PHALANX_SECRET", "a"), ("PHALANX_SECRET_FILE", "b")], "wanted one of them"),
            (&[("PHALANX_SECRET_FILE", "/nowhere/secret")], "PHALANX_SECRET_FILE=/nowhere/secret: "),
            (&[("PHALANX_TLS", "yes")], "got PHALANX_TLS=yes, wanted 0 or 1"),
        ] {
            let error = more(variables).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let known = more(&[("PHALANX_SECRET", "abc\n"), ("TORCHELASTIC_RUN_ID", "7")]).unwrap().known;
        assert_eq!(known, Credentials { secret: "abc".into(), job: "7".into(), tls: false });
        assert!(!format!("{known:?}").contains("abc"));
        assert!(more(&[("PHALANX_TLS", "1")]).unwrap().known.tls);
        let apart = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(error(&apart).contains("MASTER_ADDR"));
        let by_file = |url| find(&[&apart[..], &[("PHALANX_RENDEZVOUS", url)]].concat());
        assert_eq!(by_file("file:///shared/run7").unwrap().master, Master::File("/shared/run7".into()));
        assert!(by_file("file://run7").unwrap_err().to_string().contains("wanted file:///PATH"));
    }
}
