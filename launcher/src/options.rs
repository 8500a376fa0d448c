//! [`Options`]: the command line of the launcher.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lexopt::prelude::*;
use phalanx_rendezvous::Credentials;

pub(crate) const HELP: &str = "\
Starts the ranks of a run as processes.

usage: phalanx-launch [OPTIONS] PROGRAM [ARGUMENTS]

  -n, --nproc-per-node N      processes on this machine, or `gpu`: one for each NVIDIA GPU (1)
      --nnodes N              machines; start the launcher on each (1)
                              both may be MIN:MAX: the run goes on with fewer ranks, and with more when others come
      --node-rank I           which of them this is, from 0 (0)
      --master-addr HOST      the machine of rank 0 (127.0.0.1)
      --master-port PORT      where rank 0 listens (a free port; 29500 with several machines)
      --rendezvous file:///P  a file that all machines see, in place of an address
      --max-restarts N        how often a rank that fails is started again, while the others keep their processes (0)
      --backoff SECONDS       before its first restart; twice as long before each later one, 30 s at most (1)
      --store HOST:PORT       where ranks meet again, if not at this launcher or that of node 0
      --serve HOST:PORT       starts no ranks, but serves as the store of --nnodes times -n ranks until a signal comes
      --log-dir DIR           writes each rank's output to DIR/rankI/stdout.log and stderr.log too
      --quiet                 writes it there only
      --grace SECONDS         from SIGTERM to SIGKILL (30)
  -h, --help";

/// The port of rank 0 if there are several machines, which have to agree on it. It is torchrun's.
const PORT: u16 = 29_500;

/// Their numbers are of two bytes where they meet.
const RANKS_MAX: usize = u16::MAX as usize;

/// The longest time before a rank is started again.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// What to start, and how.
#[derive(Debug)]
pub(crate) struct Options {
    /// The fewest ranks with which the run goes on.
    pub(crate) least: usize,
    /// Processes on this machine.
    pub(crate) processes: usize,
    pub(crate) nodes: usize,
    pub(crate) node_rank: usize,
    pub(crate) master: (String, u16),
    /// The URL of a file in which rank 0 says where it listens.
    pub(crate) rendezvous: Option<String>,
    /// How often each rank is started again.
    pub(crate) max_restarts: usize,
    backoff: Duration,
    /// Where the store is, if ranks meet at one.
    pub(crate) store: Option<(String, u16)>,
    /// Whether this launcher serves it.
    pub(crate) serves: bool,
    /// What processes of the run know.
    pub(crate) known: Credentials,
    /// By which the ranks know each other: a new one, unless there are several machines or the environment has one.
    pub(crate) secret: Option<String>,
    pub(crate) log_dir: Option<PathBuf>,
    /// Whether the ranks' output goes to the terminal.
    pub(crate) prints: bool,
    pub(crate) grace: Duration,
    /// None if the launcher is the store alone.
    pub(crate) program: Option<OsString>,
    pub(crate) arguments: Vec<OsString>,
}

/// Why there are no options.
#[derive(Debug)]
pub(crate) enum Stop {
    Help,
    Wrong(String),
}

impl From<lexopt::Error> for Stop {
    fn from(error: lexopt::Error) -> Stop {
        Stop::Wrong(error.to_string())
    }
}

fn wrong<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Wrong(why.into()))
}

impl Options {
    /// From the arguments after the program's name, and the variables of the environment.
    pub(crate) fn parse(
        arguments: impl IntoIterator<Item = OsString>,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Options, Stop> {
        let mut parser = lexopt::Parser::from_args(arguments);
        let (mut processes, mut nodes, mut node_rank) = ((1, 1), (1, 1), 0);
        let (mut address, mut port, mut rendezvous) = (None, None, None);
        let (mut log_dir, mut prints, mut grace) = (None, true, 30.0);
        let (mut max_restarts, mut backoff, mut store, mut serve) = (0, 1.0, None, None);
        let program = loop {
            match parser.next()? {
                Some(Short('n') | Long("nproc-per-node" | "nproc_per_node")) => {
                    processes = match parser.value()?.string()?.as_str() {
                        "gpu" => [gpus(Path::new("/proc/driver/nvidia/gpus"))?; 2].into(),
                        text => range("--nproc-per-node", text)?,
                    };
                }
                Some(Long("nnodes")) => nodes = range("--nnodes", &parser.value()?.string()?)?,
                Some(Long("node-rank" | "node_rank")) => {
                    node_rank = number("--node-rank", &parser.value()?.string()?, 0)?;
                }
                Some(Long("master-addr" | "master_addr")) => address = Some(parser.value()?.string()?),
                Some(Long("master-port" | "master_port")) => port = Some(parser.value()?.parse::<u16>()?),
                Some(Long("rendezvous")) => rendezvous = Some(url(parser.value()?.string()?)?),
                Some(Long("max-restarts" | "max_restarts")) => {
                    max_restarts = number("--max-restarts", &parser.value()?.string()?, 0)?;
                }
                Some(Long("backoff")) => backoff = parser.value()?.parse::<f64>()?,
                Some(Long("store")) => store = Some(place("--store", &parser.value()?.string()?)?),
                Some(Long("serve")) => serve = Some(place("--serve", &parser.value()?.string()?)?),
                Some(Long("log-dir" | "log_dir")) => log_dir = Some(PathBuf::from(parser.value()?)),
                Some(Long("quiet")) => prints = false,
                Some(Long("grace")) => grace = parser.value()?.parse::<f64>()?,
                Some(Short('h') | Long("help")) => return Err(Stop::Help),
                Some(Value(program)) if serve.is_none() => break Some(program),
                None if serve.is_some() => break None,
                Some(other) => return Err(other.unexpected().into()),
                None => return wrong("got no program to start"),
            }
        };
        let least = nodes.0.saturating_mul(processes.0);
        let (nodes, processes) = (nodes.1, processes.1);
        if nodes.saturating_mul(processes) > RANKS_MAX {
            return wrong(format!("got {nodes} times {processes} ranks, wanted at most {RANKS_MAX}"));
        }
        let is_elastic = max_restarts > 0 || least < nodes * processes;
        if node_rank >= nodes {
            return wrong(format!("got --node-rank {node_rank}, wanted one below --nnodes {nodes}"));
        }
        if nodes > 1 && address.is_none() && rendezvous.is_none() && serve.is_none() {
            return wrong("got several machines, wanted --master-addr or --rendezvous");
        }
        if !prints && log_dir.is_none() {
            return wrong("got --quiet, wanted --log-dir with it");
        }
        let (grace, backoff) = (seconds("--grace", grace)?, seconds("--backoff", backoff)?);
        if rendezvous.is_some() && (is_elastic || store.is_some()) {
            return wrong(
                "got --rendezvous with --max-restarts or --store, wanted --master-addr: a store has an address",
            );
        }
        if serve.is_some() && (store.is_some() || rendezvous.is_some() || node_rank > 0) {
            return wrong(
                "got --serve with --store, --rendezvous or --node-rank, wanted it alone: it serves the store of all machines",
            );
        }
        let port = match port {
            Some(port) => port,
            None if nodes > 1 => PORT,
            None => free_port()?,
        };
        let has_secret =
            ["PHALANX_SECRET", "PHALANX_SECRET_FILE"].iter().any(|name| variable(name).is_some());
        let is_alone = nodes == 1 && store.is_none() && serve.is_none();
        let secret = if is_alone && !has_secret { Some(secret()?) } else { None };
        let master = (address.unwrap_or_else(|| "127.0.0.1".into()), port);
        let here = || serve.clone().or(is_elastic.then(|| master.clone()));
        let serves = store.is_none() && node_rank == 0 && here().is_some();
        let store = store.clone().or_else(here);
        let find = |name: &str| match (&secret, name) {
            (Some(secret), "PHALANX_SECRET") => Some(secret.clone()),
            _ => variable(name),
        };
        let known = store.as_ref().map(|_| Credentials::find(&find)).transpose();
        let known = known.map_err(|error| Stop::Wrong(error.to_string()))?.unwrap_or_default();
        if store.is_some() && known.secret.is_empty() {
            return wrong(
                "got no secret, by which alone the store knows the processes of the run: set PHALANX_SECRET or PHALANX_SECRET_FILE to \
                 the same on all machines, such as what `openssl rand -hex 16` prints once",
            );
        }
        let arguments = parser.raw_args()?.collect();
        Ok(Options {
            least,
            processes,
            nodes,
            node_rank,
            master,
            rendezvous,
            max_restarts,
            backoff,
            store,
            serves,
            known,
            secret,
            log_dir,
            prints,
            grace,
            program,
            arguments,
        })
    }

    /// The number of ranks on all machines, which have as many each.
    pub(crate) fn world_size(&self) -> usize {
        self.nodes * self.processes
    }

    /// The time before a rank's restart of this number, from 0.
    pub(crate) fn backoff(&self, restart: usize) -> Duration {
        let doubled = 2_u32.saturating_pow(restart.try_into().unwrap_or(u32::MAX));
        self.backoff.saturating_mul(doubled).min(BACKOFF_MAX.max(self.backoff))
    }

    /// The variables that tell a process which rank it is, and how often the rank was started again.
    pub(crate) fn variables(&self, local_rank: usize, restarts: usize) -> Vec<(&'static str, String)> {
        let rank = self.node_rank * self.processes + local_rank;
        let mut variables = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world_size().to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", self.processes.to_string()),
            ("GROUP_RANK", self.node_rank.to_string()),
            ("MASTER_ADDR", self.master.0.clone()),
            ("MASTER_PORT", self.master.1.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
            ("PHALANX_RESTART_COUNT", restarts.to_string()),
        ];
        variables.extend(self.store.as_ref().map(|store| ("PHALANX_STORE", show(store))));
        variables.extend(self.rendezvous.clone().map(|url| ("PHALANX_RENDEZVOUS", url)));
        variables.extend(self.secret.clone().map(|secret| ("PHALANX_SECRET", secret)));
        variables
    }
}

/// A host and a port. An address of IPv6 is in brackets.
pub(crate) fn show((host, port): &(String, u16)) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn place(name: &str, text: &str) -> Result<(String, u16), Stop> {
    let found = text.rsplit_once(':').and_then(|(host, port)| {
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let port = port.parse().ok().filter(|port| *port > 0)?;
        Some((bare.to_string(), port)).filter(|_| !bare.is_empty())
    });
    found.map_or_else(|| wrong(format!("got {name} {text}, wanted HOST:PORT")), Ok)
}

/// `N`, or `MIN:MAX`.
fn range(name: &str, text: &str) -> Result<(usize, usize), Stop> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let least = number(name, least, 1)?;
    Ok((least, number(name, most, least)?))
}

fn seconds(name: &str, number: f64) -> Result<Duration, Stop> {
    Duration::try_from_secs_f64(number).or_else(|_| wrong(format!("got {name} {number}, wanted seconds")))
}

fn number(name: &str, text: &str, least: usize) -> Result<usize, Stop> {
    match text.parse() {
        Ok(number) if number >= least => Ok(number),
        _ => wrong(format!("got {name} {text}, wanted a number of at least {least}")),
    }
}

fn url(text: String) -> Result<String, Stop> {
    match text.strip_prefix("file://").is_some_and(|path| path.starts_with('/')) {
        true => Ok(text),
        false => wrong(format!("got --rendezvous {text}, wanted file:///PATH")),
    }
}

/// The GPUs that the driver lists in this folder.
fn gpus(folder: &Path) -> Result<usize, Stop> {
    match std::fs::read_dir(folder).map_or(0, Iterator::count) {
        0 => wrong(format!("got --nproc-per-node gpu, but there is no NVIDIA GPU in {}", folder.display())),
        count => Ok(count),
    }
}

/// 128 random bits as text.
fn secret() -> Result<String, Stop> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Stop::Wrong(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn free_port() -> Result<u16, Stop> {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| Ok(listener.local_addr()?.port()));
    port.map_err(|error| Stop::Wrong(format!("no port is free: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        // All machines have a secret in common.
        let has = line.contains("--nnodes") || line.contains("--serve");
        parse_with(line, if has { "of all" } else { "" })
    }

    fn parse_with(line: &str, secret: &str) -> Result<Options, String> {
        let variable = |name: &str| (name == "PHALANX_SECRET" && !secret.is_empty()).then(|| secret.into());
        Options::parse(line.split_whitespace().map(OsString::from), &variable).map_err(|stop| match stop {
            Stop::Help => "help".into(),
            Stop::Wrong(why) => why,
        })
    }

    #[test]
    fn what_follows_the_program_is_the_programs() {
        let options = parse("-n 4 --log-dir=logs gpt --steps 3 -n 7 --help").unwrap();
        assert_eq!((options.processes, options.program), (4, Some("gpt".into())));
        assert_eq!(options.arguments, ["--steps", "3", "-n", "7", "--help"]);
        assert!(options.prints && options.log_dir.as_deref() == Some(Path::new("logs")));
    }

    #[test]
    fn the_second_machine_continues_the_ranks_of_the_first() {
        let options = parse("--nproc_per_node 4 --nnodes 2 --node-rank 1 --master-addr a gpt").unwrap();
        let variables = options.variables(2, 0);
        for (name, value) in [
            ("RANK", "6"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "1"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "29500"),
        ] {
            assert!(variables.contains(&(name, value.into())), "{name} in {variables:?}");
        }
    }

    #[test]
    fn the_ranks_of_one_machine_get_a_new_secret() {
        let secret = |line: &str| {
            let variables = parse(line).unwrap().variables(0, 0);
            variables.into_iter().find(|(name, _)| *name == "PHALANX_SECRET").map(|(_, secret)| secret)
        };
        let [first, second] = [secret("-n 2 gpt"), secret("-n 2 gpt")].map(Option::unwrap);
        assert!(first.len() == 32 && first != second);
        // Launchers of several machines could not make the same one.
        assert_eq!(secret("--nnodes 2 --master-addr a gpt"), None);
    }

    #[test]
    fn restarts_name_the_store_and_their_number() {
        let store = |line: &str| {
            let options = parse(line).unwrap();
            let variables = options.variables(0, 2);
            assert!(variables.contains(&("TORCHELASTIC_RESTART_COUNT", "2".into())));
            let store = variables.into_iter().find(|(name, _)| *name == "PHALANX_STORE");
            (store.map(|(_, place)| place), options.serves)
        };
        assert_eq!(store("-n 2 gpt"), (None, false));
        let two = "--nnodes 2 --master-addr ::1 --max-restarts 1";
        assert_eq!(store(&format!("{two} gpt")), (Some("[::1]:29500".into()), true));
        assert_eq!(store(&format!("{two} --node-rank 1 gpt")), (Some("[::1]:29500".into()), false));
        assert_eq!(store(&format!("{two} --store a:5 gpt")), (Some("a:5".into()), false));
        let alone = parse("--serve [::1]:5 --nnodes 2 -n 3").unwrap();
        assert_eq!((alone.world_size(), alone.serves, alone.program), (6, true, None));
        let few = parse("--nnodes 1:4 -n 2 --master-addr a gpt").unwrap();
        assert_eq!((few.least, few.world_size(), few.serves), (2, 8, true));
        let waits = parse("--max-restarts 9 --backoff 0.5 gpt").unwrap();
        let waits = [0, 1, 2, 6, 1000].map(|restart| waits.backoff(restart).as_secs_f64());
        assert_eq!(waits, [0.5, 1.0, 2.0, 30.0, 30.0]);
    }

    #[test]
    fn a_wrong_line_says_what_was_wanted() {
        for (line, wanted) in [
            ("", "no program"),
            ("-n 0 gpt", "at least 1"),
            ("-n x gpt", "got --nproc-per-node x"),
            ("--nodes 2 gpt", "--nodes"),
            ("--nnodes 2 gpt", "wanted --master-addr or --rendezvous"),
            ("--nnodes 2 --node-rank 2 --master-addr a gpt", "below --nnodes 2"),
            ("--rendezvous tcp://a gpt", "wanted file:///PATH"),
            ("--quiet gpt", "wanted --log-dir"),
            ("--grace -1 gpt", "wanted seconds"),
            ("-n 3:2 gpt", "got --nproc-per-node 2, wanted a number of at least 3"),
            ("--max-restarts x gpt", "got --max-restarts x"),
            ("--backoff -1 gpt", "got --backoff -1, wanted seconds"),
            ("--store node0 gpt", "got --store node0, wanted HOST:PORT"),
            ("--max-restarts 1 --rendezvous file:///a gpt", "wanted --master-addr"),
            ("--serve :5", "got --serve :5, wanted HOST:PORT"),
            ("--serve a:5 --store b:5", "got --serve with --store"),
            ("--serve a:5 --nnodes 2 --node-rank 1", "got --serve with --store, --rendezvous or --node-rank"),
            ("--nnodes 1000 -n 1000 --master-addr a gpt", "got 1000 times 1000 ranks, wanted at most 65535"),
            ("--nnodes 9223372036854775807 -n 4 --serve a:5", "wanted at most 65535"),
            ("--store a:5 gpt", "got no secret"),
            ("--help", "help"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(wanted), "{line}: {error}");
        }
        assert!(gpus(Path::new("/nowhere")).is_err());
    }
}
