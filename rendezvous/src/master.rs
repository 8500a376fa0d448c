//! [`Master`]: where rank 0 listens, and how the other ranks learn it.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::stream::PAUSE;

/// How long rank 0 tries to get its port. A rank that came before it may have the port for a moment, as its own end.
const PORT_PATIENCE: Duration = Duration::from_secs(2);

/// Where the other ranks find rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Master {
    /// A host and a port.
    Address(String, u16),
    /// A file that all ranks see. Rank 0 listens on a free port, writes its address there, and removes the file once all ranks have
    /// come. A file that a killed run has left is replaced.
    File(PathBuf),
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Master::Address(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Master::Address(host, port) => write!(f, "{host}:{port}"),
            Master::File(path) => write!(f, "the address in {}", path.display()),
        }
    }
}

impl Master {
    /// Rank 0's socket, and what it has written into the file, if there is one.
    pub(super) fn listen(&self) -> io::Result<(TcpListener, Option<SocketAddr>)> {
        let path = match self {
            Master::Address(host, port) => return Ok((bind(host, *port)?, None)),
            Master::File(path) => path,
        };
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        let address = SocketAddr::new(own_address(), listener.local_addr()?.port());
        replace(path, &address)?;
        Ok((listener, Some(address)))
    }

    /// Where rank 0 listens, as far as it has said.
    pub(super) fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Master::Address(host, port) => Ok((host.as_str(), *port).to_socket_addrs()?.collect()),
            Master::File(path) => Ok(read_address(path).into_iter().collect()),
        }
    }

    /// Leaves nothing for the next run: removes the file, unless the next run's rank 0 has replaced it.
    pub(super) fn met(&self, written: Option<SocketAddr>) {
        if let Master::File(path) = self
            && read_address(path) == written
        {
            // It may be gone.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let end = Instant::now() + PORT_PATIENCE;
    loop {
        match TcpListener::bind((host, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if Instant::now() > end {
                    let why =
                        "another process has the port; is it another run? Set MASTER_PORT to a free one";
                    return Err(io::Error::new(error.kind(), why));
                }
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Writes the file beside its place first, so that a reader finds the old address, or the new one.
fn replace(path: &Path, address: &SocketAddr) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // No other process has this port.
    let written = path.with_file_name(format!(".{name}.{}.{}.tmp", std::process::id(), address.port()));
    let done = File::create(&written).and_then(|mut file| {
        writeln!(file, "{address}")?;
        file.sync_all()?;
        std::fs::rename(&written, path)
    });
    done.inspect_err(|_| drop(std::fs::remove_file(&written)))
}

fn read_address(path: &Path) -> Option<SocketAddr> {
    // No pipe, which would be waited for, and no file that would fill the memory.
    let is_small = std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() < 1024);
    if is_small { std::fs::read_to_string(path).ok()?.trim().parse().ok() } else { None }
}

/// The address by which other machines reach this one: that of the interface which leads out of it. The loopback's if there is none.
fn own_address() -> IpAddr {
    // To connect a datagram socket sends nothing. The address is one that is reserved for documents (RFC 5737).
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).and_then(|()| socket.local_addr())
    });
    found.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}
