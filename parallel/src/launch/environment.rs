//! [`environment`]: this process as one rank of a run that a launcher has started.

use std::fmt::Display;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_tensor::Device;

use super::caught::caught;
use super::cores::Cores;
use super::place::Place;
use super::rendezvous::rendezvous;
use super::seat::Seat;
use super::{Rank, TIMEOUT};
use crate::comm::wire::tcp::Tcp;
use crate::comm::wire::{Process, Wire, connect};
use crate::comm::{Comm, Error, Result};

/// Runs `f` as this process's rank of a run, over TCP. See [`Environment`].
///
/// # Errors
/// What went wrong first: this rank's error or panic, or that of another.
pub fn environment<T, E: Display>(f: impl FnOnce(Rank) -> Result<T, E>) -> Result<T> {
    Environment::new().run(f)
}

/// Whether a launcher has started this process as one of several, as far as its environment says.
pub fn is_launched() -> bool {
    Place::is_named(|name| std::env::var(name).ok())
}

/// What carries messages between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Sockets. Ranks meet at `MASTER_ADDR:MASTER_PORT`.
    Tcp,
    /// MPI, whose own launcher has started the processes.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// How this process joins a run whose processes were started by `mpirun`, `srun`, `torchrun` or anything that sets
/// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Without any it is a run of one rank.
///
/// Sockets are neither encrypted nor authenticated: whoever reaches rank 0's port while ranks are awaited can take part.
#[derive(Clone, Debug)]
pub struct Environment {
    place: Option<Place>,
    backend: Backend,
    timeout: Duration,
    cores: Option<usize>,
    seat: Seat,
}

impl Default for Environment {
    fn default() -> Environment {
        Environment { place: None, backend: Backend::Tcp, timeout: TIMEOUT, cores: None, seat: Seat::Cpu }
    }
}

impl Environment {
    /// Over TCP.
    pub fn new() -> Environment {
        Environment::default()
    }

    /// As rank `rank` of `size` on this machine, meeting at port `port` of it, whatever the environment says.
    pub fn local(mut self, rank: usize, size: usize, port: u16) -> Environment {
        let (local_rank, local_size, master) = (rank, size, ("127.0.0.1".into(), port));
        self.place = Some(Place { rank, size, local_rank, local_size, master });
        self
    }

    /// Over something else.
    pub fn backend(mut self, backend: Backend) -> Environment {
        self.backend = backend;
        self
    }

    /// How long ranks wait for each other ([`TIMEOUT`] unless set), at the start as well.
    pub fn timeout(mut self, timeout: Duration) -> Environment {
        self.timeout = timeout;
        self
    }

    /// The cores that the ranks of this machine share (all unless set).
    pub fn cores(mut self, cores: usize) -> Environment {
        self.cores = Some(cores);
        self
    }

    /// Each rank on a GPU of its machine, by its number there. What is there is exchanged by way of the host's memory.
    pub fn cuda(mut self) -> Environment {
        self.seat = Seat::Cuda;
        self
    }

    /// [`Environment::cuda`], but what is on the GPUs is exchanged over NCCL.
    #[cfg(feature = "nccl")]
    pub fn nccl(mut self, config: crate::comm::NcclConfig) -> Environment {
        self.seat = Seat::Nccl(config);
        self
    }

    /// Runs `f` as this process's rank, and waits for the others to end.
    ///
    /// # Errors
    /// As [`environment`]; and if the environment makes no sense or ranks do not come in time.
    pub fn run<T, E: Display>(self, f: impl FnOnce(Rank) -> Result<T, E>) -> Result<T> {
        let place = match &self.place {
            Some(place) => place.clone().checked()?,
            None => Place::find(|name| std::env::var(name).ok())?,
        };
        let _cores = Cores::share(self.cores, place.local_size, &[(place.local_rank, Device::CPU)])?;
        let (seat, local) = (self.seat, place.local_rank);
        let (mut process, control) = self.join(place)?;
        // Whoever has no GPU says so to all.
        let seated = caught(|| {
            // Processes share no memory: their CPUs need no numbers.
            let device = if let Seat::Cpu = seat { Device::CPU } else { seat.device(local)? };
            seat.join(&control, device).map(|(comm, session)| (Rank::new(comm, device), session))
        });
        let outcome = seated.map_err(|cause| control.fail(&cause)).and_then(|(me, session)| {
            let outcome = caught(|| f(me)).map_err(|cause| control.fail(&cause));
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

    fn join(self, place: Place) -> Result<(Process, Comm)> {
        let Place { rank, size, master: (host, port), .. } = place;
        let timeout = self.timeout;
        let (events, heard) = channel();
        let told = events.clone();
        match self.backend {
            Backend::Tcp => {
                let sockets = rendezvous(rank, size, (&host, port), timeout)?;
                let wire =
                    Tcp::new(sockets, &told).map_err(|e| Error::Launch(format!("rank {rank}: {e}")))?;
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
