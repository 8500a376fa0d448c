//! [`Reception`]: takes the ranks that a process waits for, in any order.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;

use super::handshake::{Credentials, Hello, Kind, Session};
use super::lobby::{Lobby, Proven};

/// A rank that has come.
pub(super) struct Arrival {
    pub(super) session: Session,
    pub(super) from: SocketAddr,
    /// Where it listens itself.
    pub(super) port: u16,
}

/// The process that waits, and the ranks for which it does.
pub(super) struct Reception<'a> {
    lobby: Lobby,
    known: &'a Credentials,
    /// This process's rank.
    rank: usize,
    wanted: Range<usize>,
    /// By rank.
    pub(super) arrived: Vec<Option<Arrival>>,
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
        let arrived = (0..size).map(|_| None).collect();
        Ok(Reception { lobby: Lobby::new(listener)?, known, rank, wanted, arrived, refused: None })
    }

    /// The ranks that have not come.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.wanted.clone().filter(|&rank| self.arrived[rank].is_none()).collect()
    }

    /// Connections that were dropped.
    pub(super) fn strangers(&self) -> usize {
        self.lobby.strangers
    }

    /// Takes what has come, without waiting.
    ///
    /// # Errors
    /// If a rank that knows the run's secret contradicts this one; how.
    pub(super) fn step(&mut self) -> Result<(), String> {
        let proven = self.lobby.step(self.known);
        proven
            .into_iter()
            .try_for_each(|Proven { hello, session, from, .. }| self.enter(hello, session, from))
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
