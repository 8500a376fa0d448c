//! [`Stream`]: a connection between two processes, a socket or TLS over one, and its halves, [`Reader`] and [`Writer`], for a thread
//! each. [`detect_vanished`]: the system watches whether the machine at the other end is still there.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

#[cfg(feature = "tls")]
use crate::tls::{TlsReader, TlsStream, TlsWriter};

/// Between two looks at sockets.
pub(crate) const PAUSE: Duration = Duration::from_millis(2);
/// After so long without a sign of life from the other machine's system a connection is broken.
pub(crate) const VANISHED: Duration = Duration::from_secs(30);

/// Breaks the connection if the other end's system has not answered for `after`, whether data are under way (a timeout of their
/// acknowledgement, on Linux) or not (probes). A process that is stopped has a system that answers probes; on Linux it is taken for gone
/// too if for so long it reads nothing of data that wait for room in its buffer.
pub fn detect_vanished(socket: &TcpStream, after: Duration) -> io::Result<()> {
    let socket = SockRef::from(socket);
    // The system counts in seconds. The first probe after a third of the time, then one every twelfth.
    let seconds = |part: u32| (after / part).max(Duration::from_secs(1));
    let probes = TcpKeepalive::new().with_time(seconds(3));
    #[cfg(any(target_os = "linux", target_os = "android", target_os = "macos", target_os = "windows"))]
    let probes = probes.with_interval(seconds(12)).with_retries(8);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(after))?;
    Ok(())
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    /// In the clear.
    Plain(TcpStream),
    /// Encrypted.
    #[cfg(feature = "tls")]
    Tls(Box<TlsStream>),
}

impl Stream {
    /// The visitor's end of a connection with TLS, which is not open yet.
    pub(crate) fn tls_visitor(socket: TcpStream) -> io::Result<Stream> {
        #[cfg(feature = "tls")]
        return Ok(Stream::Tls(Box::new(TlsStream::visitor(socket)?)));
        #[cfg(not(feature = "tls"))]
        Err(without_tls(socket))
    }

    /// The host's end.
    pub(crate) fn tls_host(socket: TcpStream) -> io::Result<Stream> {
        #[cfg(feature = "tls")]
        return Ok(Stream::Tls(Box::new(TlsStream::host(socket)?)));
        #[cfg(not(feature = "tls"))]
        Err(without_tls(socket))
    }

    /// The socket beneath.
    pub fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => &tls.socket,
        }
    }

    /// Whether it is encrypted.
    pub fn has_tls(&self) -> bool {
        !matches!(self, Stream::Plain(_))
    }

    /// Opens a connection with TLS as far as that goes without waiting. Returns whether it is open.
    pub(crate) fn is_open(&mut self) -> io::Result<bool> {
        match self {
            Stream::Plain(_) => Ok(true),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => tls.is_open(),
        }
    }

    /// A value that the ends of this very connection have, and no other; none without TLS.
    pub(crate) fn binding(&self) -> io::Result<Vec<u8>> {
        match self {
            Stream::Plain(_) => Ok(Vec::new()),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => Ok(tls.binding()?.to_vec()),
        }
    }

    /// The halves of a connection that is open. The socket must block.
    pub fn split(self) -> io::Result<(Reader, Writer)> {
        match self {
            Stream::Plain(socket) => Ok((Reader::Plain(socket.try_clone()?), Writer::Plain(socket))),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => {
                tls.split().map(|(reader, writer)| (Reader::Tls(reader), Writer::Tls(writer)))
            }
        }
    }
}

#[cfg(not(feature = "tls"))]
fn without_tls(_: TcpStream) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this program has no TLS")
}

/// Whether an operation on a socket that does not block would have blocked.
pub(crate) fn is_pending(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Reads until the buffer has `wanted` bytes. Returns whether it has.
///
/// # Errors
/// If the connection has ended.
pub(crate) fn fill(stream: &mut Stream, buffer: &mut Vec<u8>, wanted: usize) -> io::Result<bool> {
    while buffer.len() < wanted {
        let mut bytes = [0; 1024];
        let most = bytes.len().min(wanted - buffer.len());
        match stream.read(&mut bytes[..most]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => buffer.extend(&bytes[..read]),
            Err(error) if is_pending(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(bytes),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => tls.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            #[cfg(feature = "tls")]
            Stream::Tls(tls) => tls.flush(),
        }
    }
}

/// The half of a connection that reads.
#[derive(Debug)]
pub enum Reader {
    /// In the clear.
    Plain(TcpStream),
    /// Decrypts.
    #[cfg(feature = "tls")]
    Tls(TlsReader),
}

impl Read for Reader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Reader::Plain(socket) => socket.read(bytes),
            #[cfg(feature = "tls")]
            Reader::Tls(tls) => tls.read(bytes),
        }
    }
}

/// The half of a connection that writes.
#[derive(Debug)]
pub enum Writer {
    /// In the clear.
    Plain(TcpStream),
    /// Encrypts.
    #[cfg(feature = "tls")]
    Tls(TlsWriter),
}

impl Writer {
    /// Says that nothing follows. With TLS the other end can tell this from a link that was cut.
    pub fn finish(self) -> io::Result<()> {
        match self {
            Writer::Plain(socket) => socket.shutdown(Shutdown::Write),
            #[cfg(feature = "tls")]
            Writer::Tls(tls) => tls.finish(),
        }
    }
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Writer::Plain(socket) => socket.write(bytes),
            #[cfg(feature = "tls")]
            Writer::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::Instant;

    use socket2::SockFilter;

    use super::*;
    use crate::handshake::{Credentials, Hello, greet};
    use crate::reception::Reception;

    const WITHIN: Duration = Duration::from_secs(3);

    /// From now on the socket's system drops all packets for it, as if the machine had gone: a filter of one instruction, which
    /// returns that no byte of a packet is kept.
    fn vanish(socket: &TcpStream) {
        SockRef::from(socket).attach_filter(&[SockFilter::new(0x06, 0, 0, 0)]).unwrap();
    }

    #[test]
    fn a_machine_that_has_vanished_is_noticed_whether_data_are_under_way_or_not() {
        for is_writing in [false, true] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut socket = listener.accept().unwrap().0;
            detect_vanished(&socket, WITHIN).unwrap();
            vanish(&other);
            if is_writing {
                socket.write_all(b"abc").unwrap();
            }
            let begin = Instant::now();
            let error = socket.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            assert!(begin.elapsed() < 3 * WITHIN, "{:?}", begin.elapsed());
        }
    }

    #[test]
    fn a_rank_whose_machine_vanishes_before_all_have_come_may_be_replaced() {
        let (listener, known) =
            (TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), Credentials::default());
        let address = listener.local_addr().unwrap();
        let mut reception = Reception::new(listener, &known, (0, 3), 1..3).unwrap();
        let hello = Hello { rank: 1, size: 3, port: 1 };
        let end = Instant::now() + 10 * WITHIN;
        for is_first in [true, false] {
            let known = known.clone();
            let visitor = std::thread::spawn(move || {
                greet(TcpStream::connect(address).unwrap(), &hello, &known, end).unwrap().unwrap()
            });
            while reception.missing().contains(&1) {
                reception.step().unwrap();
            }
            let visitor = visitor.join().unwrap();
            if is_first {
                detect_vanished(reception.arrived[1].as_ref().unwrap().session.stream.socket(), WITHIN)
                    .unwrap();
                vanish(visitor.stream.socket());
                while reception.forget_gone().is_empty() {
                    assert!(Instant::now() < end);
                    std::thread::sleep(WITHIN / 100);
                }
                // Its end is still open.
                drop(visitor);
            }
        }
        assert_eq!(reception.missing(), [2]);
    }
}
