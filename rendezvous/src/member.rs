//! [`Member`]: a process that meets the others of its run at a store, for one epoch after the other.

use std::cell::Cell;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::handshake::{CONTENT_MAX, Credentials, Kind, Session, pause};
use super::introduction::Introduction;
use super::master::Master;
use super::node::Absent;
use super::rendezvous::{ADDRESS_MAX, PAUSE_MAX, Rendezvous, STORE, Streams, streams};
use crate::stream::PAUSE;
use crate::{Result, clean, name_ranks};

/// Meetings in which a process may fail to connect with other ranks, by an error of its own, before it gives up.
const FAILURES_MAX: usize = 10;
/// Between two complaints about ranks that do not come.
const COMPLAIN: Duration = Duration::from_secs(1);

/// When a process that waits for others tells the store that it has waited too long.
struct Complaints {
    begin: Instant,
    next: Option<Instant>,
}

impl Complaints {
    /// Of these ranks; of none where the store knows which are missing.
    fn make(&mut self, store: &mut Session, ranks: &[usize]) {
        if let Some(at) = self.next.filter(|at| *at <= Instant::now()) {
            // A store that has gone is found by the next look.
            let absent = Absent { ranks: ranks.to_vec(), waited: self.begin.elapsed() };
            let _ = store.send(Kind::Absent, &absent.bytes());
            self.next = Some(at + COMPLAIN);
        }
    }
}

/// A process of a run, as the store knows it.
#[derive(Debug)]
pub struct Member {
    store: Master,
    known: Credentials,
    /// The last epoch in which it was a rank.
    last: Option<u64>,
    patience: Option<Duration>,
    pub(super) session: Option<Session>,
    /// Whether the store has said that others wait.
    change: bool,
}

/// The ranks of an epoch, connected with this one.
#[derive(Debug)]
pub struct Met {
    /// Its number, from 0. Numbers grow; one is left out if a process has died while ranks connected with each other.
    pub epoch: u64,
    /// This process's rank. It is the one that its launcher has given it, unless that is not below the number of ranks.
    pub rank: usize,
    /// A connection to each rank, in order, this one's own place empty.
    pub streams: Streams,
}

/// What the store says once all ranks have come: the number of the epoch, this rank, a number that only this meeting has, and where the
/// ranks listen.
struct Table {
    epoch: u64,
    rank: usize,
    key: String,
    addresses: Vec<SocketAddr>,
}

impl Table {
    fn of(text: &[u8]) -> Option<Table> {
        let text = std::str::from_utf8(text).ok()?;
        let mut lines = text.lines();
        let [epoch, rank, key] = lines.next()?.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let addresses: Vec<SocketAddr> = lines.map(|line| line.parse().ok()).collect::<Option<_>>()?;
        let rank = rank.parse().ok().filter(|rank| *rank < addresses.len())?;
        Some(Table { epoch: epoch.parse().ok()?, rank, key: key.into(), addresses })
    }
}

/// Why a meeting has come to nothing.
enum Stop {
    /// The store has refused this process, or its time is over.
    For(String),
    /// The process is to come again.
    Again(String),
    /// The same, after an error of its own while it connected with other ranks.
    Failed(String),
}

impl Member {
    /// One that has not met the others yet.
    pub fn new(host: String, port: u16, known: Credentials) -> Member {
        let (store, last, patience, session) = (Master::Address(host, port), None, None, None);
        Member { store, known, last, patience, session, change: false }
    }

    /// If this process waits for so long for ranks that have met before, the store tells their launchers, which end their processes and
    /// start them again: a process that is stopped does not end by itself. Ranks notice a failure at different moments, so this has to be
    /// longer than the time between those.
    pub fn with_patience(self, patience: Duration) -> Member {
        Member { patience: Some(patience), ..self }
    }

    /// Meets the other ranks for the next epoch. Each rank waits for `timeout` until all have come, and as long again until they
    /// are connected; and as long again after a launcher has started a rank again. While ranks are missing, a line on stderr every ten
    /// seconds says which.
    ///
    /// # Errors
    /// If ranks do not come in time, which are named; or if the store refuses this process, why.
    pub fn meet(&mut self, (rank, size): (usize, usize), timeout: Duration) -> Result<Met> {
        let tell = |line: &str| {
            // In one write, so that lines of several ranks do not mix. A closed stderr is no reason to stop.
            let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
        };
        (self.session, self.change) = (None, false);
        let (store, known) = (self.store.clone(), self.known.clone());
        let mut visit = Rendezvous::new((rank, size), &store, &known, timeout, &tell);
        let mut failures = 0;
        loop {
            visit.introduction = Introduction::Rank { last: self.last }.bytes();
            let stop = match self.attempt(&visit, timeout, &tell) {
                Ok(met) => return Ok(met),
                Err(stop) => stop,
            };
            failures += usize::from(matches!(stop, Stop::Failed(_)));
            match stop {
                Stop::For(why) => return Err(why.into()),
                Stop::Failed(why) if failures == FAILURES_MAX => {
                    return Err(format!("{why}; it has not connected in {failures} meetings").into());
                }
                Stop::Again(why) | Stop::Failed(why) => {
                    visit.say(&format!("{why}; it meets the others again"));
                    std::thread::sleep(PAUSE_MAX);
                }
            }
        }
    }

    /// Whether processes wait at the store that have no place in this epoch. They get one when all ranks meet again.
    pub fn wants_to_change(&mut self) -> bool {
        if let Some(session) = &mut self.session
            && let Ok(Some((Kind::Change, _))) = session.receive(CONTENT_MAX)
        {
            self.change = true;
        }
        self.change
    }

    /// Tells the store that this rank has ended well, and waits for `timeout` until all have. Returns false if another has gone before:
    /// it needs this one for the next epoch. A store that has gone asks for none.
    pub fn end(&mut self, timeout: Duration) -> bool {
        let Some(mut session) = self.session.take() else { return true };
        let _ = session.send(Kind::Done, &[]);
        let (begin, mut complaints) = (Instant::now(), self.complaints());
        while begin.elapsed() < timeout {
            match session.receive(CONTENT_MAX) {
                Ok(Some((Kind::Again, _))) => return false,
                Ok(Some((Kind::Change, _)) | None) => complaints.make(&mut session, &[]),
                _ => return true,
            }
            std::thread::sleep(PAUSE);
        }
        true
    }

    fn complaints(&self) -> Complaints {
        let begin = Instant::now();
        Complaints { begin, next: self.patience.map(|patience| begin + patience) }
    }

    fn attempt(
        &mut self,
        visit: &Rendezvous<'_>,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Met, Stop> {
        let mut own = None;
        let mut session = visit.come(STORE, &mut own).map_err(Stop::For)?;
        let Table { epoch, rank, key, addresses } = self.await_table(visit, &mut session)?;
        visit.restart();
        let known = self.known.of_meeting(&key);
        let pairing = Rendezvous::new((rank, addresses.len()), &self.store, &known, timeout, tell);
        let (refused, is_told) = (Cell::new(None), Cell::new(false));
        let mut complaints = self.complaints();
        let watch = &mut || match begins(&mut session) {
            Ok(_) => {
                complaints.make(&mut session, &pairing.next.borrow());
                Ok(())
            }
            Err(Stop::Again(why)) => {
                // A process has gone. The one in its place needs time.
                visit.restart();
                is_told.set(true);
                Err(why)
            }
            Err(Stop::For(why) | Stop::Failed(why)) => {
                refused.set(Some(why.clone()));
                Err(why)
            }
        };
        let addresses: Vec<_> = addresses.into_iter().map(Some).collect();
        let paired = pairing.pair_up(own, &addresses, watch);
        let reception = paired.map_err(|why| match refused.take() {
            Some(why) => Stop::For(why),
            None if pairing.left().is_none() => Stop::For(why),
            None if is_told.get() => Stop::Again(why),
            None => Stop::Failed(why),
        })?;
        // From now on the store may let the epoch begin.
        self.last = Some(epoch);
        session.send(Kind::Ready, &[]).map_err(|_| gone())?;
        while !begins(&mut session)? {
            if pairing.left().is_none() {
                return Err(Stop::For(format!(
                    "rank {rank}: the store at {} does not let the epoch begin",
                    self.store
                )));
            }
            std::thread::sleep(PAUSE);
        }
        self.session = Some(session);
        let streams = pairing.waiting(streams(reception)).map_err(Stop::For)?;
        Ok(Met { epoch, rank, streams })
    }

    /// What the store says once all ranks have come.
    fn await_table(&self, visit: &Rendezvous<'_>, session: &mut Session) -> Result<Table, Stop> {
        let place = format!("the store at {}", self.store);
        let mut missing = "other ranks".to_string();
        let mut complaints = self.complaints();
        loop {
            match session.receive(CONTENT_MAX.max((visit.size + 2) * ADDRESS_MAX)) {
                Ok(Some((Kind::Waiting, words))) => {
                    let ranks =
                        words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word) as usize);
                    missing = name_ranks(&ranks.collect::<Vec<_>>());
                }
                Ok(Some((Kind::Pause, content))) => visit.restart_after(pause(&content)),
                Ok(Some((Kind::Table, table))) => {
                    let wrong = || Stop::For(format!("{place} sent no addresses of the ranks"));
                    return Table::of(&table).ok_or_else(wrong);
                }
                Ok(Some((Kind::Refused, why))) => return Err(Stop::For(clean(&why))),
                Ok(Some(_)) => return Err(Stop::For(format!("{place} answers out of order"))),
                Ok(None) => {
                    visit.report(&missing, &place);
                    complaints.make(session, &[]);
                    if visit.left().is_none() {
                        return Err(Stop::For(visit.missed(&missing, &place)));
                    }
                    std::thread::sleep(PAUSE);
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(Stop::For(error.to_string()));
                }
                Err(_) => return Err(gone()),
            }
        }
    }
}

fn gone() -> Stop {
    Stop::Again("the store has gone before all ranks were connected".into())
}

/// Whether the store has let the epoch begin.
fn begins(store: &mut Session) -> Result<bool, Stop> {
    match store.receive(CONTENT_MAX) {
        Ok(None) => Ok(false),
        Ok(Some((Kind::Go, _))) => Ok(true),
        Ok(Some((Kind::Again, why))) => Err(Stop::Again(clean(&why))),
        Ok(Some((Kind::Refused, why))) => Err(Stop::For(clean(&why))),
        Ok(Some(_)) => Err(Stop::For("the store answers out of order".into())),
        Err(_) => Err(gone()),
    }
}
