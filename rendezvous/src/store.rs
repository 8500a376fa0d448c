//! [`Store`]: where the processes of a run meet, again and again. It lives longer than any of them.
//!
//! ```text
//! waiting     ranks that have come for the next epoch; they hear who is missing
//!    │ all are there: each hears the epoch's number, a number that only this meeting has, and the addresses of all
//!    v
//! connecting  ranks that connect with each other      one of them goes: the others hear `again`, and come anew
//!    │ all are ready
//!    v
//! running     ranks of the epoch. If one goes, the others notice it, and come for the next epoch, or hear `again` if they are done
//!    │ all are done: each hears that
//!    v
//! ended       no process is needed any more
//! ```
//!
//! A process that was a rank says in which epoch it was one last. If an epoch has begun since, another process has its place, and it is
//! refused. A process that was a rank takes the place of a new one that waits, since it has the run's state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::handshake::{CONTENT_MAX, Credentials, Kind, Session, nonce, pause};
use super::introduction::Introduction;
use super::lobby::{Lobby, Proven};
use super::master::Master;
use super::node::Absent;
use super::opening::ALL_OR_NONE;
use crate::clean;
use crate::stream::PAUSE;

/// Between two looks while no rank is on its way.
const PAUSE_IDLE: Duration = Duration::from_millis(20);
/// Between two messages to waiting ranks that say who is missing.
const TELL: Duration = Duration::from_secs(1);
/// How long after the last arrival an epoch begins with fewer ranks than are expected, where that is allowed. As torchrun's.
const LAST_CALL: Duration = Duration::from_secs(30);
/// Launchers that are connected at one time.
const LAUNCHERS_MAX: usize = 4096;

/// Why a process is refused after the end.
const ENDED: &str = "the run has ended: all of its ranks have ended well";

/// A rank that has come.
struct Visitor {
    session: Session,
    /// Where it listens.
    address: SocketAddr,
    last: Option<u64>,
    is_ready: bool,
    is_done: bool,
    /// The rank that its launcher has given it.
    named: usize,
}

impl Visitor {
    /// Takes what a rank says. Returns whether it is still there, and notes for how long it has waited if it is too long for it.
    fn hear(&mut self, waited: &mut Option<Duration>) -> bool {
        let heard = self.session.receive(CONTENT_MAX);
        match &heard {
            Ok(Some((Kind::Done, _))) => self.is_done = true,
            Ok(Some((Kind::Absent, content))) => {
                *waited = Absent::of(content).map(|absent| absent.waited).max(*waited);
            }
            _ => {}
        }
        heard.is_ok()
    }
}

/// The store of a run.
pub struct Store {
    lobby: Lobby,
    known: Credentials,
    /// The numbers of ranks with which an epoch may begin, from the fewest to the most.
    sizes: RangeInclusive<usize>,
    /// The ranks, by the number that their launchers have given them, which the next epoch waits for.
    expected: BTreeSet<usize>,
    /// Those that are started no more, as their launchers say.
    lost: BTreeSet<usize>,
    pub(super) last_call: Duration,
    /// When the last rank has come, or is started again.
    came_at: Instant,
    waiting: BTreeMap<usize, Visitor>,
    connecting: BTreeMap<usize, Visitor>,
    running: BTreeMap<usize, Visitor>,
    /// The ranks of the running epoch, as their launchers have named them, and whether they know that others wait.
    members: BTreeSet<usize>,
    has_called: bool,
    launchers: Vec<Session>,
    /// Ranks and launchers that are connected.
    visitors: Arc<AtomicUsize>,
    /// The number of the meeting under way, or of the last one.
    epoch: Option<u64>,
    /// The last epoch that has begun.
    begun: Option<u64>,
    /// Whether one of its ranks has gone, or all have ended well.
    has_lost: bool,
    has_ended: bool,
    /// Since when the run is over, and why.
    over: Option<(Instant, String)>,
    /// When waiting ranks are told who is missing, and the ranks that they have been told.
    tell_at: Instant,
    told: Vec<usize>,
}

impl Store {
    /// Listens at an address for the processes of a run of so many ranks.
    ///
    /// If fewer are allowed, an epoch begins without those that their launcher has given up ([`Node::lose`](super::Node::lose)), or
    /// that have not come half a minute after the last one that has, or that a launcher starts again ([`Node::wait`](super::Node::wait)). Ranks keep their numbers where these are below the number of
    /// ranks; others take those that are free. A process that comes later waits for the next epoch, and running ranks hear of it
    /// ([`Member::wants_to_change`](super::Member::wants_to_change)).
    ///
    /// # Errors
    /// If the port is taken, the address is none of this machine, TLS is on and cannot be, or there is no secret: a stranger could end
    /// the run.
    pub fn bind(
        host: &str,
        port: u16,
        known: Credentials,
        sizes: RangeInclusive<usize>,
    ) -> io::Result<Store> {
        known.check().map_err(io::Error::other)?;
        if known.secret.is_empty() {
            return Err(io::Error::other(
                "a store needs a secret (PHALANX_SECRET), by which alone it knows launchers",
            ));
        }
        let (listener, _) = Master::Address(host.into(), port).listen()?;
        let (waiting, connecting, running, launchers) = Default::default();
        let (lobby, tell_at, came_at) = (Lobby::new(listener)?, Instant::now(), Instant::now());
        let (expected, last_call) = ((0..*sizes.end()).collect(), LAST_CALL);
        let (epoch, begun, has_lost, has_ended, over, told) = Default::default();
        Ok(Store {
            lobby,
            known,
            sizes,
            expected,
            lost: BTreeSet::new(),
            last_call,
            came_at,
            waiting,
            connecting,
            running,
            members: BTreeSet::new(),
            has_called: false,
            launchers,
            visitors: Arc::default(),
            epoch,
            begun,
            has_lost,
            has_ended,
            over,
            tell_at,
            told,
        })
    }

    /// Serves until `stop` is set.
    pub fn serve(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.step();
            let busy = !(self.lobby.is_empty() && self.waiting.is_empty() && self.connecting.is_empty());
            std::thread::sleep(if busy { PAUSE } else { PAUSE_IDLE });
        }
    }

    /// The number of ranks and launchers that are connected, which follows while the store serves.
    pub fn visitors(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.visitors)
    }

    /// Does what can be done without waiting.
    fn step(&mut self) {
        for visitor in self.lobby.step(&self.known) {
            self.enter(visitor);
        }
        self.hear_launchers();
        let (mut at_end, mut at_meeting) = (None, None);
        let ranks = self.running.len();
        self.running.retain(|_, visitor| visitor.hear(&mut at_end));
        self.has_lost |= self.running.len() < ranks;
        let is_missed = self.has_lost;
        self.waiting.retain(|_, visitor| {
            let mut waited = None;
            let is_there = visitor.hear(&mut waited);
            // A new process waits for the ranks of an epoch that goes on well until these want it.
            if visitor.last.is_some() || is_missed {
                at_meeting = at_meeting.max(waited);
            }
            is_there
        });
        self.end_epoch();
        self.connect();
        if self.connecting.is_empty() && self.is_complete() {
            self.introduce();
        }
        self.call_for_change();
        self.tell();
        if let Some(waited) = at_meeting.filter(|_| !self.waiting.is_empty()) {
            self.complain(self.missing(), waited);
        }
        if let Some(waited) = at_end {
            let working = self.running.values().filter(|visitor| !visitor.is_done);
            self.complain(working.map(|visitor| visitor.named).collect(), waited);
        }
        let ranks = self.waiting.len() + self.connecting.len() + self.running.len();
        self.visitors.store(ranks + self.launchers.len(), Ordering::Relaxed);
    }

    /// Answers ranks of the running epoch that are done, once it is known whether all have ended well.
    fn end_epoch(&mut self) {
        let all = !self.has_lost && self.running.values().all(|visitor| visitor.is_done);
        if self.running.is_empty() || !all && !self.has_lost {
            return;
        }
        for (_, mut visitor) in self.running.extract_if(.., |_, visitor| visitor.is_done) {
            let answer = if all { Kind::Done } else { Kind::Again };
            // One that has gone comes as a new process.
            let _ = visitor.session.send(answer, &[]);
        }
        if all {
            self.has_ended = true;
            for (_, mut visitor) in std::mem::take(&mut self.waiting) {
                refuse(&mut visitor.session, ENDED);
            }
        }
    }

    /// The ranks that have not come.
    fn missing(&self) -> Vec<usize> {
        self.expected.iter().copied().filter(|rank| !self.waiting.contains_key(rank)).collect()
    }

    /// Tells launchers of ranks for which another has waited for so long.
    fn complain(&mut self, ranks: Vec<usize>, waited: Duration) {
        let content = Absent { ranks, waited }.bytes();
        for launcher in &mut self.launchers {
            // One that has gone is found by the next look.
            let _ = launcher.send(Kind::Absent, &content);
        }
    }

    /// Whether the next epoch can begin with those that wait.
    fn is_complete(&self) -> bool {
        let all = self.expected.iter().all(|rank| self.waiting.contains_key(rank));
        // New processes begin no epoch of their own while another one runs: its ranks, which have the run's state, would be stale.
        let may_call = self.running.is_empty() || self.waiting.values().any(|rank| rank.last >= self.begun);
        let is_time = may_call && self.came_at.elapsed() > self.last_call;
        self.waiting.len() >= *self.sizes.start() && (all || is_time)
    }

    /// Tells running ranks that a process waits that has no place among them.
    fn call_for_change(&mut self) {
        let is_new = |rank: &usize| !self.members.contains(rank);
        if self.running.is_empty() || self.has_called || !self.waiting.keys().any(is_new) {
            return;
        }
        self.has_called = true;
        for visitor in self.running.values_mut() {
            // One that has gone is missed by the others.
            let _ = visitor.session.send(Kind::Change, &[]);
        }
    }

    /// Answers a process of this run.
    fn enter(&mut self, visitor: Proven) {
        let Proven { hello, mut session, introduction, from } = visitor;
        let (rank, size) = (hello.rank, hello.size);
        let refused = match Introduction::of(&introduction) {
            _ if self.known.tls && !session.stream.has_tls() => {
                Some(format!("rank {rank} came without TLS, which is on at the store{ALL_OR_NONE}"))
            }
            Some(Introduction::Launcher) if self.launchers.len() < LAUNCHERS_MAX => {
                let mut told = session.send(Kind::Accepted, &[]);
                if let Some((at, why)) = &self.over {
                    let ago = (at.elapsed().as_millis() as u64).to_le_bytes();
                    let why = &why.as_bytes()[..why.len().min(CONTENT_MAX / 2)];
                    told = told.and_then(|()| session.send(Kind::End, &[&ago, why].concat()));
                }
                if told.is_ok() {
                    self.launchers.push(session);
                }
                return;
            }
            Some(Introduction::Launcher) => Some(format!("the store has {LAUNCHERS_MAX} launchers")),
            _ if self.over.is_some() => self.over.as_ref().map(|(_, why)| why.clone()),
            None => Some(format!(
                "rank {rank} looks for rank 0, and this is the run's store: set PHALANX_STORE to its address"
            )),
            Some(Introduction::Rank { .. }) if size != *self.sizes.end() || rank >= size => {
                Some(format!("got rank {rank} of {size}, the store is for {} ranks", self.sizes.end()))
            }
            Some(Introduction::Rank { last }) => self.stale(rank, last, from),
        };
        match (refused, Introduction::of(&introduction)) {
            (None, Some(Introduction::Rank { last })) => {
                let left = self.came_at.saturating_duration_since(Instant::now());
                let mut told = session.send(Kind::Accepted, &[]);
                if !left.is_zero() {
                    told = told.and_then(|()| session.send_pause(left));
                }
                if told.is_ok() {
                    let address = SocketAddr::new(from.ip(), hello.port);
                    let before = self.waiting.insert(
                        rank,
                        Visitor { session, address, last, is_ready: false, is_done: false, named: rank },
                    );
                    // It waited while the process that was the rank before had not come.
                    if let Some(mut before) = before {
                        refuse(&mut before.session, &two(rank, before.address, from));
                    }
                    self.told.clear();
                    self.expected.insert(rank);
                    self.lost.remove(&rank);
                    self.came_at = self.came_at.max(Instant::now());
                }
            }
            (why, _) => refuse(&mut session, &why.unwrap_or_default()),
        }
    }

    /// Why a process cannot be the rank of the next epoch.
    fn stale(&self, rank: usize, last: Option<u64>, from: SocketAddr) -> Option<String> {
        if self.has_ended {
            return Some(ENDED.into());
        }
        if let (Some(last), Some(begun)) = (last, self.begun)
            && last < begun
        {
            return Some(format!(
                "another process has been rank {rank} since epoch {begun}, or none, and this one last was in epoch {last}"
            ));
        }
        let first = self.waiting.get(&rank).filter(|first| first.session.is_alive() && first.last >= last)?;
        Some(two(rank, first.address, from))
    }

    /// Sends all ranks that have come what they need to connect with each other.
    fn introduce(&mut self) {
        if self.begun.is_some() && !self.missing().is_empty() {
            // They are left out, and can come again as new processes only.
            self.complain(self.missing(), self.came_at.elapsed());
        }
        self.expected = self.waiting.keys().copied().collect();
        let ranks = with_places(std::mem::take(&mut self.waiting));
        let number = ranks.values().filter_map(|visitor| visitor.last).chain(self.epoch).max();
        let number = number.map_or(0, |last| last + 1);
        self.epoch = Some(number);
        // A rank that hears nothing comes again, after the time that it has.
        let Ok(key) = nonce() else { return };
        let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let addresses: String = ranks.values().map(|visitor| format!("{}\n", visitor.address)).collect();
        for (rank, mut visitor) in ranks {
            let table = format!("{number} {rank} {key}\n{addresses}");
            let sent = visitor.session.send_long(Kind::Table, table.as_bytes());
            self.connecting.insert(rank, visitor);
            if sent.is_err() {
                return self.again(rank);
            }
        }
    }

    /// Lets the epoch begin once all ranks are connected with each other.
    fn connect(&mut self) {
        let (mut gone, mut absent) = (None, None);
        for (rank, visitor) in &mut self.connecting {
            match visitor.session.receive(CONTENT_MAX) {
                Ok(Some((Kind::Ready, _))) => visitor.is_ready = true,
                Ok(Some((Kind::Absent, content))) => absent = Absent::of(&content).or(absent),
                Ok(None) => {}
                _ => gone = gone.or(Some(*rank)),
            }
        }
        if let Some(rank) = gone {
            return self.again(rank);
        }
        // Before the first epoch ranks may have much to do.
        if let Some(Absent { ranks, waited }) = absent.filter(|_| self.begun.is_some()) {
            let named =
                ranks.iter().filter_map(|rank| self.connecting.get(rank)).map(|visitor| visitor.named);
            self.complain(named.collect(), waited);
        }
        if self.connecting.is_empty() || !self.connecting.values().all(|visitor| visitor.is_ready) {
            return;
        }
        (self.begun, self.has_lost) = (self.epoch, false);
        self.running = std::mem::take(&mut self.connecting);
        (self.members, self.has_called) =
            (self.running.values().map(|visitor| visitor.named).collect(), false);
        for visitor in self.running.values_mut() {
            // A rank that has gone now is one that the others lose in this epoch.
            let _ = visitor.session.send(Kind::Go, &[]);
        }
    }

    /// Ends a meeting, because a rank has gone.
    fn again(&mut self, gone: usize) {
        let why = format!("rank {gone} has gone while the ranks connected with each other");
        for (_, mut visitor) in std::mem::take(&mut self.connecting) {
            let _ = visitor.session.send(Kind::Again, why.as_bytes());
        }
    }

    /// Tells waiting ranks who is missing.
    fn tell(&mut self) {
        let now = Instant::now();
        if self.waiting.is_empty() || now < self.tell_at {
            return;
        }
        let missing = self.missing();
        if missing == self.told {
            return;
        }
        self.tell_at = now + TELL;
        let words: Vec<u8> = missing.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
        for visitor in self.waiting.values_mut() {
            // One that has gone is found by the next look.
            let _ = visitor.session.send(Kind::Waiting, &words[..words.len().min(CONTENT_MAX)]);
        }
        self.told = missing;
    }

    /// Ends the run if a launcher says so.
    fn hear_launchers(&mut self) {
        let mut over = None;
        let (expected, lost, sizes) = (&mut self.expected, &mut self.lost, &self.sizes);
        let (came_at, waiting) = (&mut self.came_at, &mut self.waiting);
        self.launchers.retain_mut(|session| match session.receive(CONTENT_MAX) {
            Ok(Some((Kind::Lose, content))) => {
                let (number, why) = content.split_at(content.len().min(8));
                let number = number.try_into().map_or(u64::MAX, u64::from_le_bytes) as usize;
                expected.remove(&number);
                lost.extend(Some(number).filter(|number| number < sizes.end()));
                // Those that have not come may still come.
                let (left, least) = (sizes.end() - lost.len(), *sizes.start());
                if left < least {
                    over = Some(format!("{}; of the ranks {left} are left, wanted {least}", clean(why)));
                }
                true
            }
            Ok(Some((Kind::Pause, content))) => {
                let at = Instant::now().checked_add(pause(&content)).unwrap_or(*came_at);
                *came_at = at.max(*came_at);
                for visitor in waiting.values_mut() {
                    // One that has gone is found by the next look.
                    let _ = visitor.session.send(Kind::Pause, &content);
                }
                true
            }
            Ok(Some((Kind::End, why))) => {
                over = Some(clean(&why));
                true
            }
            heard => heard.is_ok(),
        });
        let Some(why) = over.filter(|_| self.over.is_none()) else { return };
        let ranks = self.waiting.values_mut().chain(self.connecting.values_mut());
        let sessions = ranks.chain(self.running.values_mut()).map(|visitor| &mut visitor.session);
        sessions.chain(&mut self.launchers).for_each(|session| refuse(session, &why));
        self.waiting.clear();
        self.connecting.clear();
        self.over = Some((Instant::now(), why));
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("sizes", &self.sizes)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

/// Gives all ranks numbers below their number: their own, or for those beyond it the free ones, in order.
fn with_places(mut waiting: BTreeMap<usize, Visitor>) -> BTreeMap<usize, Visitor> {
    let size = waiting.len();
    let beyond = waiting.split_off(&size);
    let free: Vec<usize> = (0..size).filter(|rank| !waiting.contains_key(rank)).collect();
    waiting.extend(free.into_iter().zip(beyond.into_values()));
    waiting
}

fn two(rank: usize, first: SocketAddr, second: SocketAddr) -> String {
    format!("two processes say they are rank {rank}, at {first} and {second}")
}

fn refuse(session: &mut Session, why: &str) {
    // It learns why, if it still listens.
    let _ = session.send(Kind::Refused, &why.as_bytes()[..why.len().min(CONTENT_MAX)]);
}
