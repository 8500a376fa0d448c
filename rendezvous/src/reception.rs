//! [`Reception`]: takes the ranks that a process waits for, in any order.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::Range;

use super::handshake::{Credentials, Hello, Kind, Session};
use super::lobby::{Lobby, Proven};
use super::opening::ALL_OR_NONE;

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
    /// Where ranks come from, by rank, as the process knows it that they came to first; none if that does not matter. Without a secret any
    /// process can say that it is a rank, but a process of another machine cannot have its address.
    pub(super) origins: Vec<Option<IpAddr>>,
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
        let lobby = Lobby::new(listener)?;
        Ok(Reception { lobby, known, rank, wanted, origins: Vec::new(), arrived, refused: None })
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
            .try_for_each(|Proven { hello, session, from, .. }| self.enter(hello, session, from))?;
        self.refused = self.lobby.unlike.take().or(self.refused.take());
        Ok(())
    }

    /// Answers a rank of this run.
    fn enter(&mut self, hello: Hello, mut session: Session, from: SocketAddr) -> Result<(), String> {
        let Hello { rank, size, port } = hello;
        let ours = self.arrived.len();
        let wrong = if size != ours {
            Some(format!("rank {rank} says there are {size} ranks, rank {} says {ours}", self.rank))
        } else if self.known.tls && !session.stream.has_tls() {
            Some(format!("rank {rank} came without TLS, which is on at rank {}{ALL_OR_NONE}", self.rank))
        } else if !self.wanted.contains(&rank) {
            Some(format!("rank {rank} came to rank {}, which does not wait for it", self.rank))
        } else if let Some(origin) =
            self.origins.get(rank).copied().flatten().filter(|ip| differs(*ip, from.ip()))
        {
            let (here, from) = (self.rank, from.ip());
            Some(format!(
                "rank {rank} came to rank {here} from {from}, and before from {origin}: set PHALANX_SECRET"
            ))
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

/// Whether two addresses are of two machines. One of IPv4 and one of IPv6 may be the same one's.
fn differs(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4() && a != b
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::greet;
    use crate::rendezvous::dial;

    /// The loopback has more than one address on Linux.
    #[test]
    #[cfg(target_os = "linux")]
    fn without_a_secret_a_rank_comes_from_where_it_came_to_rank_0() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, known) = (listener.local_addr().unwrap(), Credentials::default());
        let mut reception = Reception::new(listener, &known, (1, 3), 2..3).unwrap();
        reception.origins = vec![Some(Ipv4Addr::LOCALHOST.into()); 3];
        for last in [2, 1] {
            let visitor = std::thread::spawn(move || {
                let (end, hello) =
                    (Instant::now() + Duration::from_secs(5), Hello { rank: 2, size: 3, port: 1 });
                let socket = dial(address, Duration::from_secs(5), Some([127, 0, 0, last].into())).unwrap();
                greet(socket, &hello, &Credentials::default(), end).map(|session| session.is_some())
            });
            while !visitor.is_finished() {
                reception.step().unwrap();
            }
            match (last, visitor.join().unwrap()) {
                (1, met) => assert_eq!(met, Ok(true)),
                (_, met) => assert_eq!(
                    met.unwrap_err(),
                    "rank 2 came to rank 1 from 127.0.0.2, and before from 127.0.0.1: set PHALANX_SECRET"
                ),
            }
            assert_eq!(reception.missing().is_empty(), last == 1);
        }
    }
}
