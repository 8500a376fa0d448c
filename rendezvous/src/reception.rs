//! [`Reception`]: takes the connections of the ranks that a process waits for, all at once, and drops those that are no ranks.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;

use super::handshake::{Credentials, Guest, Hello, Kind, Session, Step};

/// Connections that may say who they are at one time. If there are more, the oldest is dropped; a rank among them tries again.
const GUESTS_MAX: usize = 256;
/// Connections that one step takes, so that a flood of them keeps no rank from its timeout.
const TAKEN_MAX: usize = 64;

/// A rank that has come.
pub(super) struct Arrival {
    pub(super) session: Session,
    pub(super) from: SocketAddr,
    /// Where it listens itself.
    pub(super) port: u16,
}

/// The process that waits, and the ranks for which it does.
pub(super) struct Reception<'a> {
    listener: TcpListener,
    known: &'a Credentials,
    /// This process's rank.
    rank: usize,
    wanted: Range<usize>,
    guests: VecDeque<Guest>,
    /// By rank.
    pub(super) arrived: Vec<Option<Arrival>>,
    /// Connections that were dropped.
    pub(super) strangers: usize,
    /// Why the last rank was refused that was.
    pub(super) refused: Option<String>,
}

impl<'a> Reception<'a> {
    pub(super) fn new(
        listener: TcpListener,
        known: &'a Credentials,
        (rank, size): (usize, usize),
        wanted: Range<usize>,
    ) -> io::Result<Reception<'a>> {
        listener.set_nonblocking(true)?;
        let arrived = (0..size).map(|_| None).collect();
        let guests = VecDeque::new();
        Ok(Reception { listener, known, rank, wanted, guests, arrived, strangers: 0, refused: None })
    }

    /// The ranks that have not come.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.wanted.clone().filter(|&rank| self.arrived[rank].is_none()).collect()
    }

    /// Takes what has come, without waiting.
    ///
    /// # Errors
    /// If a rank that knows the run's secret contradicts this one; how.
    pub(super) fn step(&mut self) -> Result<(), String> {
        for _ in 0..TAKEN_MAX {
            let Ok((socket, from)) = self.listener.accept() else { break };
            // Most ranks say who they are at once, and are not the oldest when the room is full.
            if let Ok(guest) = Guest::new(socket, from) {
                self.advance(guest)?;
            }
            if self.guests.len() > GUESTS_MAX {
                self.guests.pop_front();
                self.strangers += 1;
            }
        }
        std::mem::take(&mut self.guests).into_iter().try_for_each(|guest| self.advance(guest))
    }

    fn advance(&mut self, mut guest: Guest) -> Result<(), String> {
        match guest.step(self.known) {
            Step::Wait => self.guests.push_back(guest),
            Step::Stranger => self.strangers += 1,
            Step::Rank(hello, session) => self.enter(hello, session, guest.from)?,
        }
        Ok(())
    }

    /// Answers a rank of this run.
    fn enter(&mut self, hello: Hello, mut session: Session, from: SocketAddr) -> Result<(), String> {
        let Hello { rank, size, port } = hello;
        let ours = self.arrived.len();
        let wrong = if size != ours {
            Some(format!("rank {rank} says there are {size} ranks, rank {} says {ours}", self.rank))
        } else if !self.wanted.contains(&rank) {
            Some(format!("rank {rank} came to rank {}, which does not wait for it", self.rank))
        } else {
            let first = self.arrived[rank].as_ref().filter(|first| first.session.is_alive());
            first.map(|first| format!("two processes say they are rank {rank}, at {} and {from}", first.from))
        };
        let Some(why) = wrong else {
            // A rank that cannot be answered has gone, and may come again.
            if session.send(Kind::Accepted, &[]).is_ok() {
                self.arrived[rank] = Some(Arrival { session, from, port });
            }
            return Ok(());
        };
        let _ = session.send(Kind::Refused, why.as_bytes());
        // Any process can say so if there is no secret, and must not end the run by it.
        if !self.known.secret.is_empty() {
            return Err(why);
        }
        self.refused = Some(why);
        Ok(())
    }

    /// The ranks that had come and are gone. They may come again.
    pub(super) fn forget_gone(&mut self) -> Vec<(usize, SocketAddr)> {
        let gone = |arrival: &Arrival| !arrival.session.is_alive();
        let places = self.arrived.iter_mut().enumerate();
        places.filter_map(|(rank, place)| Some((rank, place.take_if(|a| gone(a))?.from))).collect()
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
        let known = Credentials { secret: String::new(), job: String::new() };
        let mut reception = Reception::new(listener, &known, (0, 2), 1..2).unwrap();
        let silent: Vec<TcpStream> =
            (0..TAKEN_MAX + 10).map(|_| TcpStream::connect(address).unwrap()).collect();
        reception.step().unwrap();
        assert_eq!(reception.guests.len(), TAKEN_MAX);
        reception.step().unwrap();
        assert_eq!(reception.guests.len(), silent.len());
    }
}
