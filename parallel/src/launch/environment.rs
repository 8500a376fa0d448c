//! [`environment`]: this process as one rank of a run that a launcher has started.

use std::fmt::Display;
use std::io::Write;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_rendezvous::{Credentials, Master, Member, rendezvous};
use phalanx_tensor::Device;

use super::devices::{Cores, RankDevices};
use super::rejoin::{Rejoin, Rejoins, Seat};
use super::worker_env::{RESTARTS, WorkerEnv};
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
/// Without TLS, nothing that ranks send after they have met is encrypted or authenticated: use it inside a network that you trust.
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
        let (store, restarts, is_restart) = (None, RESTARTS, false);
        let worker =
            WorkerEnv { rank, size, local_rank, local_size, master, known, store, restarts, is_restart };
        self.worker = Some(worker);
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
    /// Where they meet again, as [`Environment::run_elastic`] lets them, they wait for both timeouts.
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
        let worker = self.worker()?;
        let _cores = Cores::divide(self.cores, worker.local_size, &[(worker.local_rank, Device::CPU)])?;
        let seat = self.seat(&worker);
        let done = self.epoch(&worker, seat.as_ref(), Rejoin::Never, f).map_err(|ended| ended.error)?;
        match seat.is_none_or(|seat| seat.end(self.joins_within())) {
            true => Ok(done),
            false => Err(Error::Launch(format!("rank {}: {GONE}", worker.rank))),
        }
    }

    /// [`Environment::run`] that outlives other processes. Where the environment names a store (`PHALANX_STORE`, which `phalanx-launch
    /// --max-restarts` sets), the process that loses another one leaves the old communicator, meets the ranks again, among them the
    /// process that the launcher has started in place of the lost one, and calls `f` again in the next [epoch](Rank::epoch). `f`
    /// decides where it goes on: from what its memory holds, or from a checkpoint. Without a store this is [`Environment::run`].
    ///
    /// An error of `f` that another rank has caused is none of the run's ([`Rank::is_left_to_rejoin`]). One of its own ends this
    /// process, and the launcher may start it again. Ranks that are late without a loss are answered a bounded number of times.
    ///
    /// # Errors
    /// As [`Environment::run`]; and if not all ranks come to a later meeting within the sum of both timeouts, or the launcher has ended
    /// the run.
    pub fn run_elastic<T, E: Display>(self, mut f: impl FnMut(Rank) -> Result<T, E>) -> Result<T> {
        let worker = self.worker()?;
        let _cores = Cores::divide(self.cores, worker.local_size, &[(worker.local_rank, Device::CPU)])?;
        let seat = self.seat(&worker);
        let mut rejoins = Rejoins::new(worker.size, worker.restarts);
        // Why this process meets the others again.
        let mut cause = None;
        loop {
            let rejoin = if seat.is_some() { rejoins.next() } else { Rejoin::Never };
            match self.epoch(&worker, seat.as_ref(), rejoin, &mut f) {
                Ok(_) if seat.as_ref().is_some_and(Seat::is_to_meet_again) => {}
                Ok(result) if seat.as_ref().is_none_or(|seat| seat.end(self.joins_within())) => {
                    return Ok(result);
                }
                Ok(_) => cause = Some(say_again(worker.rank, GONE)),
                Err(Ended { error: Error::Launch(why), rejoins: false, .. }) => {
                    let after = cause.map_or_else(String::new, |cause| format!("; before that, {cause}"));
                    return Err(Error::Launch(why + &after));
                }
                Err(Ended { error, rejoins: false, .. }) => return Err(error),
                Err(Ended { error, rejoins: true, rank }) => {
                    rejoins.count(&error);
                    cause = Some(say_again(rank, &error.to_string()));
                }
            }
        }
    }

    fn worker(&self) -> Result<WorkerEnv> {
        let mut worker = match &self.worker {
            Some(worker) => worker.clone().checked()?,
            None => WorkerEnv::find(|name| std::env::var(name).ok())?,
        };
        worker.known.secret = self.secret.clone().unwrap_or(worker.known.secret);
        worker.known.tls = self.tls.unwrap_or(worker.known.tls);
        Ok(worker)
    }

    /// This process as the store knows it, if ranks meet at one.
    fn seat(&self, worker: &WorkerEnv) -> Option<Seat> {
        let (host, port) = worker.store.clone().filter(|_| self.backend == Backend::Tcp)?;
        // After a failure another process notices it, and comes, up to a timeout later. One that has not come then is ended, with time
        // left for a new one.
        let patience = self.timeout.saturating_add(self.joins_within() / 2);
        let member = Member::new(host, port, worker.known.clone()).with_patience(patience);
        Some(Seat::new(member, self.timeout, worker.is_restart))
    }

    /// How long processes wait for each other at the start.
    fn joins_within(&self) -> Duration {
        self.join_timeout.unwrap_or(self.timeout.min(JOIN_TIMEOUT))
    }

    /// Runs `f` as a rank of one epoch, and leaves it.
    fn epoch<T, E: Display>(
        &self,
        worker: &WorkerEnv,
        seat: Option<&Seat>,
        rejoin: Rejoin,
        f: impl FnOnce(Rank) -> Result<T, E>,
    ) -> Result<T, Ended> {
        let (devices, local) = (self.devices, worker.local_rank);
        let joined = self.join(worker, seat);
        let (mut process, control, epoch) = joined.map_err(|error| Ended::of_this(error, worker.rank))?;
        let (rank, size) = (control.rank(), control.size());
        let first = rank.saturating_sub(local);
        // Where ranks were left out, machines have others than their launchers have named.
        let here = if size == worker.size { first..(first + worker.local_size).min(size) } else { 0..size };
        let again = seat.filter(|_| rejoin != Rejoin::Never).cloned();
        // A rank without a GPU ends the run of all ranks.
        let seated = catch_panic(|| {
            // Processes share no memory: their CPUs need no numbers.
            let device = if let RankDevices::Cpu = devices { Device::CPU } else { devices.device(local)? };
            let (comm, session) = devices.join(&control, device)?;
            Ok::<_, Error>((Rank::new(comm, device, here).in_epoch(epoch, rejoin, again), session))
        });
        let outcome = seated.map_err(|cause| control.fail(&cause)).and_then(|(me, session)| {
            let outcome = catch_panic(|| f(me)).map_err(|cause| control.fail(&cause));
            session.leave();
            outcome
        });
        process.leave();
        match (process.failure(), outcome) {
            (None, Ok(result)) => Ok(result),
            (Some(error), _) => Err(Ended { rejoins: rejoin.follows(&error, rank), error, rank }),
            (None, Err(())) => {
                Err(Ended::of_this(Error::Launch("the run ended without a result".into()), rank))
            }
        }
    }

    /// Meets the other ranks, for this epoch.
    fn join(&self, worker: &WorkerEnv, seat: Option<&Seat>) -> Result<(Process, Comm, u64)> {
        let WorkerEnv { rank, size, master, known, .. } = worker;
        let (rank, size, timeout) = (*rank, *size, self.timeout);
        let (events, heard) = channel();
        let told = events.clone();
        match self.backend {
            Backend::Tcp => {
                let join_timeout = self.joins_within();
                let (epoch, rank, streams) = match seat {
                    Some(seat) => {
                        let met = seat.meet((rank, size), join_timeout).map_err(not_met)?;
                        (met.epoch, met.rank, met.streams)
                    }
                    None => {
                        (0, rank, rendezvous((rank, size), master, known, join_timeout).map_err(not_met)?)
                    }
                };
                let size = streams.len();
                let wire =
                    Tcp::new(streams, &told).map_err(|e| Error::Launch(format!("rank {rank}: {e}")))?;
                let wire = move || Ok(Box::new(wire) as Box<dyn Wire>);
                let (process, comm) = connect((rank, size), timeout, (events, heard), wire)?;
                Ok((process, comm, epoch))
            }
            #[cfg(feature = "mpi")]
            Backend::Mpi => {
                use crate::comm::wire::mpi::Mpi;
                let wire = move || Mpi::new((rank, size)).map(|wire| Box::new(wire) as Box<dyn Wire>);
                let (process, comm) = connect((rank, size), timeout, (events, heard), wire)?;
                Ok((process, comm, 0))
            }
        }
    }
}

/// Why a rank that has ended well is needed again.
const GONE: &str = "another rank has gone before all had ended well";

/// Says why this process meets the others again.
fn say_again(rank: usize, why: &str) -> String {
    // In one write, so that lines of several ranks do not mix. A closed stderr is no reason to stop.
    let _ =
        std::io::stderr().write_all(format!("rank {rank}: {why}; it meets the others again\n").as_bytes());
    why.into()
}

/// How an epoch has ended, if not well.
struct Ended {
    error: Error,
    /// Whether this process meets the others again.
    rejoins: bool,
    /// The rank that it was.
    rank: usize,
}

impl Ended {
    /// By an error that this process has made.
    fn of_this(error: Error, rank: usize) -> Ended {
        Ended { error, rejoins: false, rank }
    }
}

/// Why ranks have not met.
fn not_met(error: phalanx_rendezvous::Error) -> Error {
    Error::Launch(error.to_string())
}
