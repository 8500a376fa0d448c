//! [`Lobby`]: takes all connections at once, and drops those that do not prove that they are of this run.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};

use super::handshake::{Credentials, Guest, Hello, Session, Step};

/// Connections that may say who they are at one time. If there are more, the oldest is dropped; a rank among them tries again.
const GUESTS_MAX: usize = 256;
/// Connections that one step takes, so that a flood of them keeps no rank from its timeout.
const TAKEN_MAX: usize = 64;

/// A process of this run, which waits for an answer.
pub(super) struct Proven {
    pub(super) hello: Hello,
    pub(super) session: Session,
    /// What it has said of itself.
    pub(super) introduction: Vec<u8>,
    pub(super) from: SocketAddr,
}

/// A listening socket, and connections that have not proven yet that they are of this run.
pub(super) struct Lobby {
    listener: TcpListener,
    guests: VecDeque<Guest>,
    /// Connections that were dropped.
    pub(super) strangers: usize,
    /// Why the last was dropped that seemed to be a rank.
    pub(super) unlike: Option<String>,
}

impl Lobby {
    pub(super) fn new(listener: TcpListener) -> io::Result<Lobby> {
        listener.set_nonblocking(true)?;
        Ok(Lobby { listener, guests: VecDeque::new(), strangers: 0, unlike: None })
    }

    /// Whether no connection is on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.guests.is_empty()
    }

    /// Takes what has come, without waiting. Returns the connections that have proven that they are of this run.
    pub(super) fn step(&mut self, known: &Credentials) -> Vec<Proven> {
        let mut proven = Vec::new();
        for _ in 0..TAKEN_MAX {
            let (socket, from) = match self.listener.accept() {
                Ok(taken) => taken,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Such as one for which this process may open no more files.
                Err(error) => {
                    self.unlike = Some(format!("a connection cannot be taken: {error}"));
                    break;
                }
            };
            // Most ranks say who they are at once, and are not the oldest when the room is full.
            if let Ok(guest) = Guest::new(socket, from) {
                proven.extend(self.advance(guest, known));
            }
            if self.guests.len() > GUESTS_MAX {
                self.guests.pop_front();
                self.strangers += 1;
            }
        }
        for guest in std::mem::take(&mut self.guests) {
            proven.extend(self.advance(guest, known));
        }
        proven
    }

    fn advance(&mut self, mut guest: Guest, known: &Credentials) -> Option<Proven> {
        match guest.step(known) {
            Step::Wait => self.guests.push_back(guest),
            Step::Stranger(why) => {
                self.strangers += 1;
                self.unlike = why.or(self.unlike.take());
            }
            Step::Rank(hello, session, introduction) => {
                return Some(Proven { hello, session, introduction, from: guest.from });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_step_ends_while_more_connections_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (known, mut lobby) = (Credentials::default(), Lobby::new(listener).unwrap());
        let silent: Vec<TcpStream> =
            (0..TAKEN_MAX + 10).map(|_| TcpStream::connect(address).unwrap()).collect();
        lobby.step(&known);
        assert_eq!(lobby.guests.len(), TAKEN_MAX);
        lobby.step(&known);
        assert_eq!(lobby.guests.len(), silent.len());
    }
}
