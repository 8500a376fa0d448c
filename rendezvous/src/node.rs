//! [`Node`]: a launcher's connection with the store of its run. It can end the run, and learns that another launcher has.

use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

use super::handshake::{CONTENT_MAX, Credentials, GREETING, Hello, Kind, Session, greet_with};
use super::introduction::Introduction;
use super::rendezvous::dial;
use crate::clean;

/// The longest attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Ranks of the last epoch that have not come for the next one, and for how long another has waited for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// As their launchers have named them.
    pub ranks: Vec<usize>,
    /// A process that is younger may be on its way.
    pub waited: Duration,
}

impl Absent {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let ranks = self.ranks.iter().flat_map(|&rank| (rank as u32).to_le_bytes());
        let waited = (self.waited.as_millis() as u64).to_le_bytes();
        waited.into_iter().chain(ranks).take(CONTENT_MAX).collect()
    }

    pub(super) fn of(bytes: &[u8]) -> Option<Absent> {
        let (waited, ranks) = bytes.split_first_chunk()?;
        let ranks = ranks.as_chunks().0.iter().map(|rank| u32::from_le_bytes(*rank) as usize).collect();
        Some(Absent { ranks, waited: Duration::from_millis(u64::from_le_bytes(*waited)) })
    }
}

/// How long a launcher visits a store whose run was over before the launcher began. The store of a run that has failed goes before, and
/// the next run may have its port.
const OUTWAITS: Duration = Duration::from_secs(5);

/// A launcher, as the store knows it.
#[derive(Debug)]
pub struct Node {
    store: (String, u16),
    known: Credentials,
    /// The machine's number, and the number of ranks on all.
    place: (usize, usize),
    session: Option<Session>,
    begin: Instant,
    /// Why the run is over.
    over: Option<String>,
    absent: Option<Absent>,
}

impl Node {
    /// One that is not connected yet.
    pub fn new(store: (String, u16), known: Credentials, place: (usize, usize)) -> Node {
        Node { store, known, place, session: None, begin: Instant::now(), over: None, absent: None }
    }

    /// Why the run is over, if the store says that it is. Connects with the store where there is no connection; to be called again.
    pub fn over(&mut self) -> Option<&str> {
        if self.over.is_none() && self.session.is_none() {
            self.connect();
        }
        match self.session.as_mut().map(|session| session.receive(CONTENT_MAX)) {
            Some(Ok(Some((Kind::Refused, why)))) => self.over = Some(clean(&why)),
            Some(Ok(Some((Kind::End, content)))) => {
                let (ago, why) = content.split_at(content.len().min(8));
                let ago = Duration::from_millis(ago.try_into().map_or(0, u64::from_le_bytes));
                let age = self.begin.elapsed();
                self.session = None;
                self.over = (ago <= age || age > OUTWAITS).then(|| clean(why));
            }
            Some(Ok(Some((Kind::Absent, content)))) => self.absent = Absent::of(&content),
            Some(Err(_)) => self.session = None,
            _ => {}
        }
        self.over.as_deref()
    }

    /// What [`Node::over`] has heard last of ranks that do not come, once.
    pub fn absent(&mut self) -> Option<Absent> {
        self.absent.take()
    }

    /// Ends the run: processes that wait at the store, or come there, are refused for this reason. Whether the store has been told.
    pub fn end(&mut self, why: &str) -> bool {
        if self.over().is_some() {
            return true;
        }
        let why = &why.as_bytes()[..why.len().min(CONTENT_MAX)];
        self.session.as_mut().is_some_and(|session| session.send(Kind::End, why).is_ok())
    }

    /// Gives up a rank, which is started no more. The run goes on without it, or ends, if fewer ranks would be left than it allows.
    /// Whether the store has been told.
    pub fn lose(&mut self, rank: usize, why: &str) -> bool {
        if self.over().is_some() {
            return true;
        }
        let why = &why.as_bytes()[..why.len().min(CONTENT_MAX / 2)];
        let content = [&(rank as u64).to_le_bytes()[..], why].concat();
        self.session.as_mut().is_some_and(|session| session.send(Kind::Lose, &content).is_ok())
    }

    /// Says that a rank is started again after this time, so that no epoch begins without it before, and ranks that wait for it
    /// have all of their time from then. Whether the store has been told.
    pub fn wait(&mut self, pause: Duration) -> bool {
        self.over().is_some()
            || self.session.as_mut().is_some_and(|session| session.send_pause(pause).is_ok())
    }

    fn connect(&mut self) {
        let ((rank, size), introduction) = (self.place, Introduction::Launcher.bytes());
        let hello = Hello { rank, size, port: 0 };
        let (host, port) = &self.store;
        for address in (host.as_str(), *port).to_socket_addrs().into_iter().flatten() {
            let Ok(socket) = dial(address, ATTEMPT, None) else { continue };
            match greet_with(socket, &hello, &introduction, &self.known, Instant::now() + GREETING) {
                Ok(session) => self.session = session,
                // It is no store of this run, as ranks of this launcher say that come there. One of this run may follow.
                Err(_) => continue,
            }
            return;
        }
    }
}
