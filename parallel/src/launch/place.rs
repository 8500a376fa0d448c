//! [`Place`]: what the launcher of processes has told this one, through its environment.

use crate::comm::{Error, Result};

/// This process among those of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Among those of this machine.
    pub(super) local_rank: usize,
    pub(super) local_size: usize,
    /// Where rank 0 listens.
    pub(super) master: (String, u16),
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

/// Where rank 0 listens unless told otherwise.
const PORT: u16 = 29_500;

impl Place {
    /// From variables; the first launcher that names a rank counts. A process that no launcher has started is alone.
    ///
    /// # Errors
    /// If a variable is no number, the rank is not below the size, or several machines have no address to meet at.
    pub(super) fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Place> {
        let number = |name: &str| -> Result<Option<usize>> {
            let wrong = |text: &String| Error::Launch(format!("got {name}={text}, wanted a number"));
            variable(name).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()
        };
        let Some(names) = Place::names(&variable) else {
            let master = ("127.0.0.1".into(), PORT);
            return Ok(Place { rank: 0, size: 1, local_rank: 0, local_size: 1, master });
        };
        let (rank, size) = (number(names[0])?.unwrap_or(0), number(names[1])?.unwrap_or(1));
        let local_size = number(names[3])?.filter(|&n| n > 0 && n <= size);
        let local_rank = number(names[2])?.filter(|&r| r < local_size.unwrap_or(size));
        let address = match variable("MASTER_ADDR") {
            Some(address) => address,
            None if local_size.unwrap_or(size) == size => "127.0.0.1".into(),
            None => {
                return Err(Error::Launch(
                    "the ranks are on several machines: set MASTER_ADDR to rank 0's".into(),
                ));
            }
        };
        let port = number("MASTER_PORT")?.unwrap_or(PORT.into());
        let wrong = |_| Error::Launch(format!("got MASTER_PORT={port}, wanted a number below 65536"));
        let master = (address, u16::try_from(port).map_err(wrong)?);
        let local_size = local_size.unwrap_or(size);
        let local_rank = local_rank.unwrap_or(rank % local_size.max(1));
        Place { rank, size, local_rank, local_size, master }.checked()
    }

    /// Whether a launcher has named a rank.
    pub(super) fn is_named(variable: impl Fn(&str) -> Option<String>) -> bool {
        Place::names(&variable).is_some()
    }

    fn names(variable: &impl Fn(&str) -> Option<String>) -> Option<&'static [&'static str; 4]> {
        NAMES.iter().find(|names| variable(names[0]).is_some() && variable(names[1]).is_some())
    }

    /// This, if there is such a rank.
    pub(super) fn checked(self) -> Result<Place> {
        let why = || Error::Launch(format!("got rank {} of {}, wanted one below that", self.rank, self.size));
        if self.rank < self.size { Ok(self) } else { Err(why()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<Place> {
        Place::find(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    fn place(rank: usize, size: usize, local: (usize, usize), master: (&str, u16)) -> Place {
        let master = (master.0.into(), master.1);
        Place { rank, size, local_rank: local.0, local_size: local.1, master }
    }

    #[test]
    fn every_launcher_is_understood() {
        let alone = place(0, 1, (0, 1), ("127.0.0.1", PORT));
        assert_eq!(find(&[]).unwrap(), alone);
        assert_eq!(find(&[("RANK", "0")]).unwrap(), alone);
        let named =
            |variables: &[&str]| Place::is_named(|name| variables.contains(&name).then(|| "1".into()));
        assert!(!named(&[]) && !named(&["RANK"]) && named(&["PMI_RANK", "PMI_SIZE"]));
        let torchrun =
            [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "1234")];
        assert_eq!(find(&torchrun).unwrap(), place(3, 4, (3, 4), ("node0", 1234)));
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.1"),
        ];
        assert_eq!(find(&mpirun).unwrap(), place(5, 8, (1, 4), ("10.0.0.1", PORT)));
        let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "1")];
        assert_eq!(find(&srun).unwrap(), place(1, 2, (1, 2), ("127.0.0.1", PORT)));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = |variables: &[(&str, &str)]| find(variables).unwrap_err().to_string();
        assert!(error(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("RANK=x"));
        assert!(error(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("rank 2 of 2"));
        let apart = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(error(&apart).contains("MASTER_ADDR"));
    }
}
