//! [`rendezvous`]: processes that know one address, or one file, find each other.
//!
//! ```text
//! rank 1..   ──hello: rank, size, my port──►  rank 0, at MASTER_ADDR:MASTER_PORT, or where the file says, waits for all
//!            ◄──addresses of all ranks──────
//! rank r     ──hello──►  ranks 1 .. r         so that each pair has one socket
//! ```

#[cfg(test)]
#[path = "../../tests/comm/port.rs"]
mod port;

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_tensor::io::atomic;

use crate::comm::{Error, Result};

/// The first word of a hello.
const MAGIC: u64 = u64::from_le_bytes(*b"phalanx1");
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(2);
/// How long rank 0 waits for the hello of a connection, which may be no rank's.
const GREETING: Duration = Duration::from_secs(2);

/// Where the other ranks find rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Master {
    /// A host and a port.
    Address(String, u16),
    /// A file that all ranks see. Rank 0 listens on a free port, writes its address there, and removes the file once all ranks have
    /// come. A file that a killed run has left is replaced.
    File(PathBuf),
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Master::Address(host, port) => write!(f, "{host}:{port}"),
            Master::File(path) => write!(f, "the address in {}", path.display()),
        }
    }
}

impl Master {
    /// Rank 0's socket.
    fn listen(&self) -> io::Result<TcpListener> {
        let path = match self {
            Master::Address(host, port) => return TcpListener::bind((host.as_str(), *port)),
            Master::File(path) => path,
        };
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        let address = SocketAddr::new(own_address(), listener.local_addr()?.port());
        atomic::write(path, |file| writeln!(file, "{address}")).map_err(io::Error::other)?;
        Ok(listener)
    }

    /// Where rank 0 listens, as far as it has said.
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Master::Address(host, port) => Ok((host.as_str(), *port).to_socket_addrs()?.collect()),
            Master::File(path) => Ok(read_address(path).into_iter().collect()),
        }
    }

    /// Leaves nothing for the next run.
    fn met(&self) {
        if let Master::File(path) = self {
            // It may be gone.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn read_address(path: &Path) -> Option<SocketAddr> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The address by which other machines reach this one: that of the interface which leads out of it. The loopback's if there is none.
fn own_address() -> IpAddr {
    // To connect a datagram socket sends nothing. The address is one that is reserved for documents (RFC 5737).
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).and_then(|()| socket.local_addr())
    });
    found.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}

/// A socket to every other rank, in order, this one's own place empty. Rank 0 listens at `master`.
///
/// # Errors
/// If ranks do not come within `timeout`, named on those that did; if two say they are the same, or do not agree on
/// their number.
pub(super) fn rendezvous(
    rank: usize,
    size: usize,
    master: &Master,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>> {
    if size == 1 {
        return Ok(vec![None]);
    }
    let meeting = Rendezvous { rank, size, place: master.to_string(), start: Instant::now(), timeout };
    let met = if rank == 0 { meeting.host(master) } else { meeting.visit(master) };
    met.map_err(|error| match error {
        Failure::Known(error) => error,
        Failure::Io(error) => Error::Launch(format!("rank {rank} at {}: {error}", meeting.place)),
    })
}

/// One rank's meeting with the others.
struct Rendezvous {
    rank: usize,
    size: usize,
    place: String,
    start: Instant,
    timeout: Duration,
}

/// The ranks that have arrived, and the port on which each listens.
type Arrivals = Vec<Option<(TcpStream, u16)>>;

/// Why ranks did not meet: an error that names them, or one of a socket.
enum Failure {
    Known(Error),
    Io(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Io(error)
    }
}

fn launch<T>(why: String) -> Result<T, Failure> {
    Err(Failure::Known(Error::Launch(why)))
}

/// A rank's first message.
struct Hello {
    rank: usize,
    size: usize,
    port: u16,
}

impl Hello {
    fn write(&self, to: &mut TcpStream) -> io::Result<()> {
        let words = [MAGIC, self.rank as u64, self.size as u64, self.port.into()];
        to.write_all(&words.map(u64::to_le_bytes).concat())
    }

    /// None if the connection is no rank's.
    fn read(from: &mut TcpStream) -> Option<Hello> {
        let mut bytes = [0; 32];
        from.set_nonblocking(false).ok()?;
        from.set_read_timeout(Some(GREETING)).ok()?;
        from.read_exact(&mut bytes).ok()?;
        from.set_read_timeout(None).ok()?;
        let [magic, rank, size, port] = bytes.as_chunks::<8>().0 else { return None };
        let [magic, rank, size, port] = [magic, rank, size, port].map(|word| u64::from_le_bytes(*word));
        let port = u16::try_from(port).ok().filter(|_| magic == MAGIC)?;
        Some(Hello { rank: rank as usize, size: size as usize, port })
    }
}

/// Text with its length before it.
fn write_text(to: &mut TcpStream, kind: u64, text: &str) -> io::Result<()> {
    to.write_all(&[kind.to_le_bytes(), (text.len() as u64).to_le_bytes()].concat())?;
    to.write_all(text.as_bytes())
}

fn read_text(from: &mut TcpStream) -> io::Result<(u64, String)> {
    let mut head = [0; 16];
    from.read_exact(&mut head)?;
    let [kind, length] = head.as_chunks::<8>().0 else { return Err(io::ErrorKind::InvalidData.into()) };
    let mut text = String::new();
    from.take(u64::from_le_bytes(*length)).read_to_string(&mut text)?;
    Ok((u64::from_le_bytes(*kind), text))
}

impl Rendezvous {
    fn left(&self) -> Option<Duration> {
        self.timeout.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }

    /// Collects a socket and a port from each of the `wanted` ranks.
    fn collect(
        &self,
        listener: &TcpListener,
        wanted: std::ops::Range<usize>,
    ) -> Result<Arrivals, (Failure, Arrivals)> {
        let mut arrived: Arrivals = (0..self.size).map(|_| None).collect();
        if let Err(error) = listener.set_nonblocking(true) {
            return Err((error.into(), arrived));
        }
        loop {
            let missing: Vec<usize> = wanted.clone().filter(|&rank| arrived[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(arrived);
            }
            if self.left().is_none() {
                let why = format!(
                    "ranks {missing:?} of {} did not come to {} within {} ms",
                    self.size,
                    self.place,
                    self.timeout.as_millis()
                );
                return Err((Failure::Known(Error::Launch(why)), arrived));
            }
            let Ok((mut socket, _)) = listener.accept() else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let Some(hello) = Hello::read(&mut socket) else { continue };
            let wrong = if hello.size != self.size {
                Some(format!(
                    "rank {} says there are {} ranks, rank {} says {}",
                    hello.rank, hello.size, self.rank, self.size
                ))
            } else if !wanted.contains(&hello.rank) || arrived[hello.rank].is_some() {
                Some(format!("two processes say they are rank {} at {}", hello.rank, self.place))
            } else {
                None
            };
            if let Some(why) = wrong {
                // It learns why, if it still listens.
                let _ = write_text(&mut socket, 1, &why);
                return Err((Failure::Known(Error::Launch(why)), arrived));
            }
            arrived[hello.rank] = Some((socket, hello.port));
        }
    }

    /// Rank 0's part.
    fn host(&self, master: &Master) -> Result<Vec<Option<TcpStream>>, Failure> {
        let listener = master.listen()?;
        let met = self.collect(&listener, 1..self.size);
        master.met();
        let mut arrived = match met {
            Ok(arrived) => arrived,
            Err((failure, arrived)) => {
                if let Failure::Known(Error::Launch(why)) = &failure {
                    arrived
                        .into_iter()
                        .flatten()
                        .for_each(|(mut socket, _)| drop(write_text(&mut socket, 1, why)));
                }
                return Err(failure);
            }
        };
        let mut table = String::new();
        for (socket, port) in arrived.iter().flatten() {
            table += &format!("{}\n", SocketAddr::new(socket.peer_addr()?.ip(), *port));
        }
        for (socket, _) in arrived.iter_mut().flatten() {
            write_text(socket, 0, &table)?;
        }
        Ok(arrived.into_iter().map(|link| link.map(|(socket, _)| socket)).collect())
    }

    /// Every other rank's part.
    fn visit(&self, master: &Master) -> Result<Vec<Option<TcpStream>>, Failure> {
        let mut host = self.connect(|| master.addresses(), "rank 0")?;
        let here: IpAddr = host.local_addr()?.ip();
        let listener = TcpListener::bind((here, 0))?;
        let hello = Hello { rank: self.rank, size: self.size, port: listener.local_addr()?.port() };
        hello.write(&mut host)?;
        // The host answers when all have arrived, or the time is over there as well.
        host.set_read_timeout(Some(self.timeout + GREETING))?;
        let (kind, text) = match read_text(&mut host) {
            Ok(answer) => answer,
            Err(error) => return launch(format!("rank 0 at {} did not answer: {error}", self.place)),
        };
        host.set_read_timeout(None)?;
        if kind != 0 {
            return launch(text);
        }
        let mut sockets: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
        for (rank, address) in (1..self.rank).zip(text.lines()) {
            let addresses = || Ok(address.to_socket_addrs()?.collect());
            let mut socket = self.connect(addresses, &format!("rank {rank}"))?;
            hello.write(&mut socket)?;
            sockets[rank] = Some(socket);
        }
        let arrived = self.collect(&listener, self.rank + 1..self.size).map_err(|(failure, _)| failure)?;
        for (rank, link) in arrived.into_iter().enumerate().filter(|(_, link)| link.is_some()) {
            sockets[rank] = link.map(|(socket, _)| socket);
        }
        sockets[0] = Some(host);
        Ok(sockets)
    }

    /// Tries until a process listens there.
    fn connect(
        &self,
        addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
        who: &str,
    ) -> Result<TcpStream, Failure> {
        loop {
            let Some(left) = self.left() else {
                let waited = self.timeout.as_millis();
                return launch(format!(
                    "rank {}: {who} did not come to {} within {waited} ms",
                    self.rank, self.place
                ));
            };
            for address in addresses()? {
                if let Ok(socket) = TcpStream::connect_timeout(&address, left) {
                    return Ok(socket);
                }
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::port::free_port;
    use super::*;

    /// The results of the ranks that come.
    fn meet(arrived: &[(usize, usize)], timeout_ms: u64) -> Vec<Result<usize>> {
        meet_at(&Master::Address("127.0.0.1".into(), free_port()), arrived, timeout_ms)
    }

    fn meet_at(master: &Master, arrived: &[(usize, usize)], timeout_ms: u64) -> Vec<Result<usize>> {
        let timeout = Duration::from_millis(timeout_ms);
        std::thread::scope(|scope| {
            let join = |&(rank, size)| {
                let meet = move || rendezvous(rank, size, master, timeout);
                scope.spawn(move || meet().map(|sockets| sockets.iter().flatten().count()))
            };
            let threads: Vec<_> = arrived.iter().map(join).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn each_rank_gets_a_socket_to_each_other() {
        for met in meet(&[(3, 4), (1, 4), (0, 4), (2, 4)], 20_000) {
            assert_eq!(met.unwrap(), 3);
        }
    }

    #[test]
    fn ranks_that_do_not_come_are_named_to_those_that_did() {
        for met in meet(&[(0, 4), (2, 4)], 2000) {
            let error = met.unwrap_err().to_string();
            assert!(error.contains("ranks [1, 3] of 4 did not come to 127.0.0.1:"), "{error}");
        }
        let error = meet(&[(1, 2)], 100).remove(0).unwrap_err().to_string();
        assert!(error.contains("rank 0 did not come to 127.0.0.1:"), "{error}");
    }

    #[test]
    fn ranks_that_contradict_each_other_are_told() {
        for met in meet(&[(0, 3), (1, 2)], 5000) {
            let error = met.unwrap_err().to_string();
            assert!(error.contains("rank 1 says there are 2 ranks, rank 0 says 3"), "{error}");
        }
        let errors = meet(&[(0, 3), (1, 3), (1, 3)], 5000);
        assert!(errors.iter().all(|e| e.as_ref().unwrap_err().to_string().contains("say they are rank 1")));
    }

    #[test]
    fn ranks_meet_by_a_file_even_if_a_killed_run_has_left_one() {
        let path = std::env::temp_dir().join(format!("phalanx-rendezvous-{}", std::process::id()));
        // A free port has no listener: a rank that reads this before rank 0 has replaced it tries again.
        std::fs::write(&path, format!("127.0.0.1:{}\n", free_port())).unwrap();
        for met in meet_at(&Master::File(path.clone()), &[(2, 3), (1, 3), (0, 3)], 20_000) {
            assert_eq!(met.unwrap(), 2);
        }
        assert!(!path.exists(), "the file is left");
        let error = meet_at(&Master::File(path.clone()), &[(1, 2)], 100).remove(0).unwrap_err().to_string();
        assert!(error.contains("rank 0 did not come to the address in"), "{error}");
        let nowhere = Master::File(path.join("nowhere"));
        let error = meet_at(&nowhere, &[(0, 2)], 100).remove(0).unwrap_err().to_string();
        assert!(error.contains("rank 0 at the address in") && error.contains("nowhere"), "{error}");
    }
}
