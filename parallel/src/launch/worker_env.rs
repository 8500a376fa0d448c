//! [`WorkerEnv`]: the rank, size and address that the launcher gave this process in its environment.

use std::path::Path;

use phalanx_rendezvous::{Credentials, Master};

use crate::comm::{Error, Result};

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
    /// Where ranks meet in place of rank 0, for one epoch after the other.
    pub(super) store: Option<(String, u16)>,
    /// How often the launcher starts a rank again.
    pub(super) restarts: usize,
    /// Whether this process is one that it has started again.
    pub(super) is_restart: bool,
}

/// The same where no launcher says it.
pub(super) const RESTARTS: usize = 3;

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
            let (store, restarts) = (None, RESTARTS);
            return Ok(WorkerEnv {
                rank: 0,
                size: 1,
                local_rank: 0,
                local_size: 1,
                master,
                known,
                store,
                restarts,
                is_restart: false,
            });
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
        let known = Credentials::find(&variable).map_err(|error| Error::Launch(error.to_string()))?;
        let store = variable("PHALANX_STORE").map(|place| store(&place)).transpose()?;
        let restarts = number("TORCHELASTIC_MAX_RESTARTS")?.unwrap_or(RESTARTS);
        let is_restart = number("PHALANX_RESTART_COUNT")?.unwrap_or(0) > 0;
        WorkerEnv { rank, size, local_rank, local_size, master, known, store, restarts, is_restart }.checked()
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

/// The host and port of a store. An address of IPv6 is in brackets.
fn store(place: &str) -> Result<(String, u16)> {
    let found = place.rsplit_once(':').and_then(|(host, port)| {
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        Some((host.to_string(), port.parse().ok().filter(|port| *port > 0)?)).filter(|_| !host.is_empty())
    });
    found.ok_or_else(|| Error::Launch(format!("got PHALANX_STORE={place}, wanted HOST:PORT")))
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
        let (local_rank, local_size) = local;
        let (store, restarts, is_restart) = (None, RESTARTS, false);
        WorkerEnv { rank, size, local_rank, local_size, master, known, store, restarts, is_restart }
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
        assert!(!more(&[("PHALANX_RESTART_COUNT", "0")]).unwrap().is_restart);
        assert!(more(&[("PHALANX_RESTART_COUNT", "1")]).unwrap().is_restart);
        let apart = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(error(&apart).contains("MASTER_ADDR"));
        let by_file = |url| find(&[&apart[..], &[("PHALANX_RENDEZVOUS", url)]].concat());
        assert_eq!(by_file("file:///shared/run7").unwrap().master, Master::File("/shared/run7".into()));
        assert!(by_file("file://run7").unwrap_err().to_string().contains("wanted file:///PATH"));
        let store = |place| more(&[("PHALANX_STORE", place)]).map(|worker| worker.store.unwrap());
        assert_eq!(store("node0:29500").unwrap(), ("node0".into(), 29_500));
        assert_eq!(store("[::1]:5").unwrap(), ("::1".into(), 5));
        for wrong in ["node0", ":5", "node0:0", "node0:99999"] {
            assert!(store(wrong).unwrap_err().to_string().contains("wanted HOST:PORT"), "{wrong}");
        }
    }
}
