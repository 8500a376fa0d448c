//! [`rendezvous`]: processes that know one address, or one file, find each other.
//!
//! ```text
//! rank 1..   ──handshake: my rank, my port──►  rank 0, at MASTER_ADDR:MASTER_PORT, or where the file says, waits for all
//!            ◄──for whom it waits────────────
//!            ◄──addresses of all ranks───────
//! rank r     ──handshake──►  ranks 1 .. r      so that each pair has one socket
//! rank 1..   ──ready──►      rank 0            ──go──► all
//! ```
//!
//! A rank that dies before rank 0 has sent the addresses may come again. From then on until `go` its death is an error that names it.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::handshake::{CONTENT_MAX, Credentials, GREETING, Hello, Kind, Session, greet_with};
use super::master::Master;
use super::reception::{Arrival, Reception};
use crate::stream::{PAUSE, Stream, VANISHED, detect_vanished};
use crate::{Error, Result, clean, name_ranks};

/// A longer timeout is this one: not every moment so far away can be told.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The longest pause between two attempts to connect, and the longest attempt.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(100);
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between two lines that say for whom a rank waits.
const REPORT: Duration = Duration::from_secs(10);
/// Bytes of an address in the table.
pub(super) const ADDRESS_MAX: usize = 64;

/// A connection to each other rank, in order of the ranks.
pub type Streams = Vec<Option<Stream>>;

/// A connection to every other rank, in order, this one's own place empty. Rank 0 listens at `master`. While ranks are missing, a line on
/// stderr every ten seconds says which.
///
/// # Errors
/// If ranks do not come within `timeout`, named on those that did; if two say they are the same, or do not agree on their number.
pub fn rendezvous(
    (rank, size): (usize, usize),
    master: &Master,
    known: &Credentials,
    timeout: Duration,
) -> Result<Streams> {
    let tell = |line: &str| {
        // In one write, so that lines of several ranks do not mix. A closed stderr is no reason to stop.
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    };
    Rendezvous::new((rank, size), master, known, timeout, &tell).meet()
}

/// One rank's part of the meeting.
pub(super) struct Rendezvous<'a> {
    pub(super) rank: usize,
    pub(super) size: usize,
    master: &'a Master,
    known: &'a Credentials,
    /// What it says of itself to the process that it visits.
    pub(super) introduction: Vec<u8>,
    /// Since when this rank waits.
    start: Cell<Instant>,
    timeout: Duration,
    /// The next line about missing ranks.
    pub(super) report_at: Cell<Instant>,
    pub(super) report_every: Duration,
    tell: &'a dyn Fn(&str),
    /// The ranks with which it is to connect next.
    pub(super) next: RefCell<Vec<usize>>,
}

impl<'a> Rendezvous<'a> {
    pub(super) fn new(
        (rank, size): (usize, usize),
        master: &'a Master,
        known: &'a Credentials,
        timeout: Duration,
        tell: &'a dyn Fn(&str),
    ) -> Rendezvous<'a> {
        let (now, report_every) = (Instant::now(), REPORT);
        let (start, report_at) = (Cell::new(now), Cell::new(now + report_every));
        Rendezvous {
            rank,
            size,
            master,
            known,
            introduction: Vec::new(),
            start,
            timeout: timeout.min(TIMEOUT_MAX),
            report_at,
            report_every,
            tell,
            next: RefCell::default(),
        }
    }

    pub(super) fn meet(&self) -> Result<Streams> {
        if self.size == 1 {
            return Ok(vec![None]);
        }
        self.known.check()?;
        let met = if self.rank == 0 { self.host() } else { self.visit() };
        let streams = met.map_err(Error::from)?;
        self.waiting(streams).map_err(Error::from)
    }

    /// The connections as the run has them: reading and writing waits.
    pub(super) fn waiting(&self, streams: Streams) -> Result<Streams, String> {
        for socket in streams.iter().flatten().map(Stream::socket) {
            let ready = socket.set_nonblocking(false).and_then(|()| socket.set_write_timeout(None));
            ready.map_err(|e| format!("rank {}: {e}", self.rank))?;
        }
        Ok(streams)
    }

    /// Gives this rank all of its time anew.
    pub(super) fn restart(&self) {
        self.restart_after(Duration::ZERO);
    }

    /// The same, from a later moment on.
    pub(super) fn restart_after(&self, pause: Duration) {
        let now = Instant::now();
        self.start.set(now.checked_add(pause).unwrap_or(now));
    }

    pub(super) fn left(&self) -> Option<Duration> {
        self.timeout.checked_sub(self.start.get().elapsed()).filter(|left| !left.is_zero())
    }

    pub(super) fn say(&self, what: &str) {
        (self.tell)(&format!("rank {}: {what}", self.rank));
    }

    /// Says for whom this rank waits, if it is time to. Returns whether it was.
    pub(super) fn report(&self, missing: &str, place: &str) -> bool {
        let due = Instant::now() >= self.report_at.get();
        if due {
            self.report_at.set(Instant::now() + self.report_every);
            let (waited, all) = (self.start.get().elapsed().as_secs(), seconds(self.timeout));
            self.say(&format!("waiting for {missing} of {} at {place} ({waited} s of {all})", self.size));
        }
        due
    }

    /// The error of a rank whose time is over.
    pub(super) fn missed(&self, missing: &str, place: &str) -> String {
        format!("{missing} of {} did not come to {place} within {} s", self.size, seconds(self.timeout))
    }

    /// Waits until all ranks have come that are wanted. `watch` learns every few milliseconds whether a line was due.
    fn collect(
        &self,
        reception: &mut Reception<'_>,
        place: &str,
        mut watch: impl FnMut(&mut Reception<'_>, bool) -> Result<(), String>,
    ) -> Result<(), String> {
        loop {
            reception.step()?;
            // Only rank 0 can take a rank again; the others hear from it.
            for (rank, from) in if self.rank == 0 { reception.forget_gone() } else { Vec::new() } {
                self.say(&format!(
                    "rank {rank} at {from} has gone before all ranks had come; it may come again"
                ));
            }
            let missing = reception.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if self.left().is_none() {
                let mut why = self.missed(&name_ranks(&missing), place);
                if let Some(refused) = &reception.refused {
                    why += &format!("; {refused}");
                }
                if reception.strangers() > 0 {
                    why +=
                        &format!("; connections that were no ranks of this run: {}", reception.strangers());
                }
                return Err(why);
            }
            let due = self.report(&name_ranks(&missing), place);
            self.next.replace(missing);
            watch(reception, due)?;
            std::thread::sleep(PAUSE);
        }
    }

    /// Rank 0's part.
    fn host(&self) -> Result<Streams, String> {
        let failed = |e: io::Error| format!("rank 0 cannot listen at {}: {e}", self.master);
        let (listener, written) = self.master.listen().map_err(failed)?;
        let mut reception =
            Reception::new(listener, self.known, (0, self.size), 1..self.size).map_err(failed)?;
        let met = self.collect(&mut reception, &self.master.to_string(), |reception, due| {
            if due {
                let missing: Vec<u8> =
                    reception.missing().iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
                let missing = &missing[..missing.len().min(CONTENT_MAX)];
                for arrival in reception.arrived.iter_mut().flatten() {
                    // A rank that has gone is found by the next look.
                    let _ = arrival.session.send(Kind::Waiting, missing);
                }
            }
            Ok(())
        });
        self.master.met(written);
        if let Err(why) = met.and_then(|()| self.introduce(&mut reception.arrived)) {
            for arrival in reception.arrived.iter_mut().flatten() {
                // It learns why, if it still listens.
                let _ = arrival.session.send(Kind::Refused, &why.as_bytes()[..why.len().min(CONTENT_MAX)]);
            }
            return Err(why);
        }
        Ok(streams(reception))
    }

    /// Sends every rank the addresses of all, and waits until each is connected with all others.
    fn introduce(&self, arrived: &mut [Option<Arrival>]) -> Result<(), String> {
        let mut table = String::new();
        for arrival in arrived.iter().flatten() {
            table += &format!("{}\n", SocketAddr::new(arrival.from.ip(), arrival.port));
        }
        let gone = |rank: usize| format!("rank {rank} has gone while the ranks connected with each other");
        let ranks = arrived.iter_mut().enumerate();
        let mut ranks: Vec<(usize, &mut Arrival)> =
            ranks.filter_map(|(rank, place)| Some((rank, place.as_mut()?))).collect();
        for (rank, Arrival { session, .. }) in &mut ranks {
            session.send_long(Kind::Table, table.as_bytes()).map_err(|_| gone(*rank))?;
        }
        // The other ranks have all of their time anew.
        let end = Instant::now() + self.timeout.max(GREETING);
        let mut waiting: Vec<usize> = ranks.iter().map(|(rank, _)| *rank).collect();
        while !waiting.is_empty() {
            for (rank, Arrival { session, .. }) in &mut ranks {
                let Some(place) = waiting.iter().position(|other| other == rank) else { continue };
                match session.receive(CONTENT_MAX).map_err(|_| gone(*rank))? {
                    Some((Kind::Ready, _)) => drop(waiting.swap_remove(place)),
                    Some((Kind::Refused, why)) => return Err(clean(&why)),
                    _ => {}
                }
            }
            // A process that was stopped meanwhile finds that its time is over and all are connected.
            if Instant::now() > end && !waiting.is_empty() {
                return Err(format!("{} did not connect with all other ranks in time", name_ranks(&waiting)));
            }
            std::thread::sleep(PAUSE);
        }
        ranks
            .into_iter()
            .try_for_each(|(rank, arrival)| arrival.session.send(Kind::Go, &[]).map_err(|_| gone(rank)))
    }

    /// Every other rank's part.
    fn visit(&self) -> Result<Streams, String> {
        let mut own = None;
        let (mut host, table) = loop {
            let mut host = self.come("rank 0", &mut own)?;
            if let Some(table) = self.await_table(&mut host)? {
                break (host, table);
            }
            self.say("rank 0 has gone before all ranks had come; it may come again");
        };
        // This rank may have waited for rank 0 for most of its time.
        self.restart();
        let addresses: Vec<_> = std::iter::once(None).chain(table.into_iter().map(Some)).collect();
        let reception = match self.pair_up(own, &addresses, &mut || still_waits(&mut host).map(drop)) {
            Ok(reception) => reception,
            Err(why) => {
                // Rank 0 would know only that this rank has gone.
                let _ = host.send(Kind::Refused, &why.as_bytes()[..why.len().min(CONTENT_MAX)]);
                return Err(why);
            }
        };
        host.send(Kind::Ready, &[]).map_err(|_| GONE.to_string())?;
        let end = Instant::now() + self.timeout + GREETING;
        while !still_waits(&mut host)? {
            if Instant::now() > end {
                return Err(format!("rank {}: rank 0 does not begin", self.rank));
            }
            std::thread::sleep(PAUSE);
        }
        let mut streams = streams(reception);
        streams[0] = Some(host.stream);
        Ok(streams)
    }

    /// Comes to the process that this rank visits first, and listens where that one sees it, unless it does so already.
    pub(super) fn come(&self, who: &str, own: &mut Option<Own>) -> Result<Session, String> {
        let hello = |here: IpAddr| {
            let listener = match own.take().filter(|(address, _)| *address == here) {
                Some((_, listener)) => listener,
                None => TcpListener::bind((here, 0))?,
            };
            let port = listener.local_addr()?.port();
            *own = Some((here, listener));
            Ok(Hello { rank: self.rank, size: self.size, port })
        };
        self.connect(who, &self.master.to_string(), || self.master.addresses(), None, hello, &mut || Ok(()))
    }

    /// Connects with ranks below this one at their addresses, by rank, and takes those above it. `watch` may end that.
    pub(super) fn pair_up(
        &self,
        own: Option<Own>,
        addresses: &[Option<SocketAddr>],
        watch: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<Reception<'a>, String> {
        let broken = |e: io::Error| format!("rank {}: {e}", self.rank);
        let Some((here, listener)) = own else { return Err(format!("rank {} listens nowhere", self.rank)) };
        let hello =
            Hello { rank: self.rank, size: self.size, port: listener.local_addr().map_err(broken)?.port() };
        let mut reception =
            Reception::new(listener, self.known, (self.rank, self.size), self.rank + 1..self.size)
                .map_err(broken)?;
        // Without a secret the addresses are all that tells ranks from strangers.
        let here = Some(here).filter(|_| self.known.secret.is_empty());
        if here.is_some() {
            reception.origins = addresses.iter().map(|place| place.map(|address| address.ip())).collect();
        }
        let below = addresses.iter().enumerate().take(self.rank);
        for (rank, address) in below.filter_map(|(rank, place)| Some((rank, (*place)?))) {
            let (who, place) = (name_ranks(&[rank]), address.to_string());
            self.next.replace(vec![rank]);
            let session = self.connect(&who, &place, || Ok(vec![address]), here, |_| Ok(hello), watch)?;
            reception.arrived[rank] = Some(Arrival { session, from: address, port: 0 });
        }
        let place = format!("rank {}", self.rank);
        self.collect(&mut reception, &place, |_, _| watch())?;
        Ok(reception)
    }

    /// The addresses of ranks 1 and up, once all have come; `None` if rank 0 has gone before.
    fn await_table(&self, host: &mut Session) -> Result<Option<Vec<SocketAddr>>, String> {
        // Rank 0 answers when all have arrived, or when the time is over there.
        let end = Instant::now() + self.timeout + GREETING;
        loop {
            match host.receive(CONTENT_MAX.max(self.size * ADDRESS_MAX)) {
                Ok(Some((Kind::Waiting, missing))) => {
                    let ranks =
                        missing.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word) as usize);
                    self.report_at.set(Instant::now());
                    self.report(&name_ranks(&ranks.collect::<Vec<_>>()), &self.master.to_string());
                }
                Ok(Some((Kind::Table, table))) => {
                    let addresses = String::from_utf8_lossy(&table).lines().map(str::parse).collect();
                    let addresses: Result<Vec<SocketAddr>, _> = addresses;
                    let complete = addresses.ok().filter(|all| all.len() + 1 == self.size);
                    return complete.map(Some).ok_or("rank 0 sent no addresses of the ranks".into());
                }
                Ok(Some((Kind::Refused, why))) => return Err(clean(&why)),
                Ok(Some(_)) => return Err("rank 0 answers out of order".into()),
                Ok(None) if Instant::now() < end => std::thread::sleep(PAUSE),
                Ok(None) => return Err(format!("rank 0 at {} did not answer", self.master)),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error.to_string()),
                Err(_) => return Ok(None),
            }
        }
    }

    fn greet(&self, socket: TcpStream, hello: &Hello, left: Duration) -> Result<Option<Session>, String> {
        greet_with(socket, hello, &self.introduction, self.known, Instant::now() + left.min(2 * GREETING))
    }

    /// Tries until `who` listens there and has accepted this one. `watch` may end that.
    fn connect(
        &self,
        who: &str,
        place: &str,
        addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
        from: Option<IpAddr>,
        mut hello: impl FnMut(IpAddr) -> io::Result<Hello>,
        watch: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<Session, String> {
        let (mut why, mut pause) = (String::new(), PAUSE);
        loop {
            let Some(left) = self.left() else {
                let all = seconds(self.timeout);
                let absent = if who == STORE { "did not answer at" } else { "did not come to" };
                return Err(format!("rank {}: {who} {absent} {place} within {all} s{why}", self.rank));
            };
            watch()?;
            let found = addresses().unwrap_or_else(|error| {
                why = format!(" ({error})");
                Vec::new()
            });
            for address in found {
                let dialled = dial(address, left.min(ATTEMPT), from).and_then(|socket| {
                    let hello = hello(socket.local_addr()?.ip())?;
                    Ok((socket, hello))
                });
                let (socket, hello) = match dialled {
                    Ok(dialled) => dialled,
                    Err(error) => {
                        why = format!(" ({error})");
                        continue;
                    }
                };
                match self.greet(socket, &hello, left) {
                    Ok(Some(session)) => return Ok(session),
                    Ok(None) => why = " (what listens there closes connections, or says nothing)".into(),
                    Err(why) => {
                        return Err(format!("rank {} came to {address} for {who}: {why}", self.rank));
                    }
                }
            }
            self.report(who, place);
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}

/// Who is visited, where it is no rank.
pub(super) const STORE: &str = "the store";

/// The address by which others see this process, and where it listens there.
pub(super) type Own = (IpAddr, TcpListener);

const GONE: &str = "rank 0 has gone while the ranks connected with each other";

/// Whether rank 0 has said that all ranks are connected.
///
/// # Errors
/// If it has given up, or is gone.
fn still_waits(host: &mut Session) -> Result<bool, String> {
    match host.receive(CONTENT_MAX) {
        Ok(None) => Ok(false),
        Ok(Some((Kind::Go, _))) => Ok(true),
        Ok(Some((Kind::Refused, why))) => Err(clean(&why)),
        Ok(Some(_)) => Err("rank 0 answers out of order".into()),
        Err(_) => Err(GONE.into()),
    }
}

pub(super) fn streams(reception: Reception<'_>) -> Streams {
    reception.arrived.into_iter().map(|place| place.map(|arrival| arrival.session.stream)).collect()
}

fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds.fract() == 0.0 { format!("{seconds}") } else { format!("{seconds:.1}") }
}

/// Connects with an address. The socket has its own port before, so that it is never connected with itself, which the system does if it
/// gives a socket the very port that it looks for. It connects from the address `from`, if that is of the same kind.
pub(super) fn dial(address: SocketAddr, timeout: Duration, from: Option<IpAddr>) -> io::Result<TcpStream> {
    let any: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    let from = from.filter(|from| from.is_ipv4() == any.is_ipv4()).unwrap_or(any);
    socket.bind(&SocketAddr::new(from, 0).into())?;
    let own = socket.local_addr()?.as_socket();
    if own.is_some_and(|own| own.port() == address.port()) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "this end got the port of the other"));
    }
    socket.connect_timeout(&address.into(), timeout)?;
    let socket = socket.into();
    detect_vanished(&socket, VANISHED)?;
    Ok(socket)
}
