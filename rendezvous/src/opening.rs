//! How a connection begins: with TLS or in the clear, which the first byte tells. The ends find out if they were told different things.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use crate::stream::{PAUSE, Stream, fill, is_pending};

/// What to do if a rank has TLS and another has not.
pub(crate) const ALL_OR_NONE: &str = ": set PHALANX_TLS=1 for all ranks, or for none";
/// The first byte of a TLS connection: its record holds a message of TLS's handshake, or an alert.
pub(crate) const TLS_RECORD: u8 = 0x16;
const TLS_ALERT: u8 = 0x15;
/// What a host without TLS answers to one who begins TLS.
const NO_TLS: &[u8] = b"phalanx: TLS is off here";

/// The first byte that the other end has sent, left in the socket; none if there is none yet.
///
/// # Errors
/// If the connection has ended.
pub(crate) fn first_byte(socket: &TcpStream) -> io::Result<Option<u8>> {
    let mut first = [0];
    match socket.peek(&mut first) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(Some(first[0])),
        Err(error) if is_pending(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The visitor's end of a TLS connection. `None` as in [`greet`].
///
/// # Errors
/// If what listens there has no TLS.
pub(crate) fn open_tls(socket: TcpStream, until: Instant) -> Result<Option<Stream>, String> {
    let Ok(mut plain) = socket.try_clone().map(Stream::Plain) else { return Ok(None) };
    let mut stream = Stream::tls_visitor(socket).map_err(|error| error.to_string())?;
    if stream.flush().is_err() {
        return Ok(None);
    }
    let mut has_tls = false;
    loop {
        let opened = match first_byte(plain.socket()) {
            Ok(Some(first)) if !has_tls && ![TLS_RECORD, TLS_ALERT].contains(&first) => {
                let mut answer = Vec::new();
                // As much as has come.
                let _ = fill(&mut plain, &mut answer, NO_TLS.len());
                return Err(match answer == NO_TLS {
                    true => format!("TLS is on here, and off there{ALL_OR_NONE}"),
                    false => format!("it has no TLS (it sent \"{}\")", answer.escape_ascii()),
                });
            }
            Ok(None) if !has_tls => Ok(false),
            Ok(_) => {
                has_tls = true;
                stream.is_open()
            }
            Err(error) => Err(error),
        };
        match opened {
            Ok(true) => return Ok(Some(stream)),
            Ok(false) if Instant::now() < until => std::thread::sleep(PAUSE),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error.to_string()),
            _ => return Ok(None),
        }
    }
}

/// Tells a visitor that TLS is off here. It may be a rank, or a stranger.
pub(crate) fn refuse_tls(mut socket: TcpStream, from: SocketAddr) -> io::Error {
    // What it has sent is read, so that the system sends it the answer before the end.
    let _ = socket.read(&mut [0; 4096]).and_then(|_| socket.write_all(NO_TLS));
    let why = format!("a connection from {from} has TLS, which is off here{ALL_OR_NONE}");
    io::Error::new(io::ErrorKind::Unsupported, why)
}
