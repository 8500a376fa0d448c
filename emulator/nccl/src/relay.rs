//! Ranks in several processes: each process tells the others what its ranks do, and hears what theirs do.
//!
//! The process that made a communicator's id listens, on this machine; the port is in the id. The others connect, and
//! it passes on what each says, so that all hear the same in the same order. Each process then carries out by itself
//! what concerns its own ranks.
//!
//! ```text
//! process B ──┐
//!             ├── process A, which made the id ── process D        A passes on what it hears to the others
//! process C ──┘
//! ```

use std::collections::HashMap;
use std::fmt::Debug;
use std::io::BufReader;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};
use std::thread;

use phalanx_emulator_link::lock;

use crate::call::Call;
use crate::message::{self, Message};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct UniqueId([u8; 128]);

impl UniqueId {
    /// An id that no other process of this machine has, and that no id of a real NCCL looks like; `port` is where this
    /// process listens.
    pub(crate) fn new(port: u16) -> UniqueId {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let mut bytes = [0; 128];
        bytes[..16].copy_from_slice(b"phalanx emulated");
        bytes[16..20].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[20..22].copy_from_slice(&port.to_le_bytes());
        bytes[22..30].copy_from_slice(&LAST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        UniqueId(bytes)
    }

    /// Whether it was made in this process.
    pub(crate) fn is_ours(self) -> bool {
        let made_here = |port: &u16| self.0[..22] == UniqueId::new(*port).0[..22];
        PORT.get().is_some_and(made_here)
    }

    /// Whether an emulator has made it, here or in another process.
    pub(crate) fn is_emulated(self) -> bool {
        self.0.starts_with(b"phalanx emulated") && self.port() != 0
    }

    /// Where its process listens.
    pub(crate) fn port(self) -> u16 {
        u16::from_le_bytes([self.0[20], self.0[21]])
    }

    pub(crate) fn bytes(self) -> [u8; 128] {
        self.0
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<UniqueId> {
        bytes.try_into().ok().map(UniqueId)
    }
}

/// One communicator's way to other processes: what this process tells them and hears from them.
#[derive(Debug)]
pub(crate) struct Relay {
    id: UniqueId,
    arrived: Arrived,
    state: Mutex<RelayState>,
    /// How many messages are not yet written to their sockets.
    unwritten: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct RelayState {
    /// To the process that listens, or from there to all others. Connections that have ended stay.
    connections: Vec<Sender<Vec<u8>>>,
    /// The ranks that have come, for processes that connect later.
    hellos: Vec<Vec<u8>>,
    /// `None` until all ranks have come; the weak reference ends when all ranks of this process have left.
    ranks: Option<Weak<dyn Ranks>>,
    /// Messages that came before this process heard that all ranks have come.
    early: Vec<Message>,
}

static RELAYS: LazyLock<Mutex<HashMap<UniqueId, Arc<Relay>>>> = LazyLock::new(Mutex::default);

/// Where this process listens, once it does.
static PORT: OnceLock<u16> = OnceLock::new();

/// Called for each rank that has come in another process, with the communicator's id, the rank, how many ranks there are,
/// and the rank's device.
pub(crate) type Arrived = fn(UniqueId, usize, usize, i32);

/// What a relay delivers to: the ranks of one communicator.
pub(crate) trait Ranks: Debug + Send + Sync {
    /// The stream of a rank in another process has come to these calls.
    fn posted(&self, rank: usize, ticket: u64, calls: Vec<(Call, Vec<u8>)>);
    /// A rank takes part no more: what waits for it fails.
    fn leave(&self, rank: usize);
}

/// The port at which this process listens, from now on; 0 where that cannot be.
pub(crate) fn port(arrived: Arrived) -> u16 {
    let listen = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        let port = listener.local_addr().ok()?.port();
        let accept = move || {
            listener
                .incoming()
                .flatten()
                .for_each(|connection| drop(thread::spawn(move || welcome(connection, arrived))))
        };
        thread::Builder::new().name("phalanx emulated nccl".into()).spawn(accept).ok().map(|_| port)
    };
    *PORT.get_or_init(|| listen().unwrap_or(0))
}

/// Another process: the first message is the communicator's id.
fn welcome(connection: TcpStream, arrived: Arrived) {
    let Ok(reader) = connection.try_clone() else { return };
    let mut reader = BufReader::new(reader);
    let id = message::read(&mut reader).ok().and_then(|bytes| UniqueId::from_bytes(&bytes));
    if let Some(id) = id.filter(|id| id.is_ours()) {
        let relay = relay(id, arrived);
        let index = relay.add(connection);
        relay.listen(reader, Some(index));
    }
}

fn relay(id: UniqueId, arrived: Arrived) -> Arc<Relay> {
    let mut relays = lock(&RELAYS);
    Arc::clone(relays.entry(id).or_insert_with(|| Arc::new(Relay::new(id, arrived))))
}

/// The relay of a communicator, connected if another process made its id.
///
/// # Errors
/// If that process cannot be reached.
pub(crate) fn open(id: UniqueId, arrived: Arrived) -> std::io::Result<Arc<Relay>> {
    static CONNECTING: Mutex<()> = Mutex::new(());
    let _one = lock(&CONNECTING);
    let relay = relay(id, arrived);
    if !id.is_ours() && relay.state().connections.is_empty() {
        let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, id.port()))?;
        message::write(&mut connection, &id.bytes())?;
        let (reader, ours) = (BufReader::new(connection.try_clone()?), Arc::clone(&relay));
        relay.add(connection);
        thread::spawn(move || ours.listen(reader, None));
    }
    Ok(relay)
}

impl Relay {
    fn new(id: UniqueId, arrived: Arrived) -> Relay {
        Relay { id, arrived, state: Mutex::default(), unwritten: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, RelayState> {
        lock(&self.state)
    }

    /// Adds a connection, which is told of the ranks that have come so far, and gives its index. Sending never blocks.
    fn add(&self, mut connection: TcpStream) -> usize {
        let (sender, messages) = channel::<Vec<u8>>();
        let _ = connection.set_nodelay(true);
        let unwritten = Arc::clone(&self.unwritten);
        thread::spawn(move || {
            let mut is_gone = false;
            for bytes in messages {
                is_gone = is_gone || message::write(&mut connection, &bytes).is_err();
                unwritten.fetch_sub(1, Ordering::Release);
            }
        });
        let mut state = self.state();
        state.hellos.iter().for_each(|hello| self.send(&sender, hello.clone()));
        state.connections.push(sender);
        state.connections.len() - 1
    }

    fn send(&self, connection: &Sender<Vec<u8>>, bytes: Vec<u8>) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        // Its thread takes all messages, even after the other end has closed.
        let _ = connection.send(bytes);
    }

    /// Whether all messages so far are written to their sockets, so that the others get them even if this process ends.
    pub(crate) fn is_flushed(&self) -> bool {
        self.unwritten.load(Ordering::Acquire) == 0
    }

    /// Tells all other processes; those that are gone do not hear it.
    pub(crate) fn tell(&self, message: &Message) {
        self.pass(message, None);
    }

    fn pass(&self, message: &Message, from: Option<usize>) {
        let mut state = self.state();
        let bytes = message.bytes();
        for (_, connection) in state.connections.iter().enumerate().filter(|(index, _)| Some(*index) != from)
        {
            self.send(connection, bytes.clone());
        }
        if let Message::Hello { .. } = message {
            state.hellos.push(bytes);
        }
    }

    /// All ranks have come.
    pub(crate) fn meet(&self, to: &Arc<dyn Ranks>) {
        loop {
            let mut state = self.state();
            if state.early.is_empty() {
                state.ranks = Some(Arc::downgrade(to));
                return;
            }
            let early = std::mem::take(&mut state.early);
            drop(state);
            early.into_iter().for_each(|message| deliver(&**to, message));
        }
    }

    /// Hears what comes over a connection until it ends, and passes it on if this process listens. The connection's
    /// ranks leave when it ends.
    fn listen(&self, mut reader: BufReader<TcpStream>, index: Option<usize>) {
        let mut ranks = Vec::new();
        while let Some(message) =
            message::read(&mut reader).ok().and_then(|bytes| Message::from_bytes(&bytes))
        {
            if let Message::Hello { rank, .. } = message {
                ranks.push(rank);
            }
            self.hear(message, index);
        }
        ranks.into_iter().for_each(|rank| self.hear(Message::Leave { rank }, index));
    }

    fn hear(&self, message: Message, index: Option<usize>) {
        // First, so that the others hear of it before they hear what this process does because of it.
        if index.is_some() {
            self.pass(&message, index);
        }
        if let Message::Hello { rank, ranks, device } = message {
            return (self.arrived)(self.id, rank, ranks, device);
        }
        let mut state = self.state();
        match state.ranks.as_ref().map(Weak::upgrade) {
            None => state.early.push(message),
            Some(ranks) => {
                drop(state);
                if let Some(ranks) = ranks {
                    deliver(&*ranks, message);
                }
            }
        }
    }
}

fn deliver(to: &dyn Ranks, message: Message) {
    match message {
        Message::Hello { .. } => {}
        Message::Post { rank, ticket, calls } => to.posted(rank, ticket, calls),
        Message::Leave { rank } => to.leave(rank),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn what_is_told_is_on_its_way_when_it_can_be_read_and_not_before() {
        let relay = Relay::new(UniqueId::new(0), |_, _, _, _| ());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        relay.add(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut other, _) = listener.accept().unwrap();
        assert!(relay.is_flushed());
        // More than a socket holds.
        let connection = relay.state().connections[0].clone();
        let tell = || (0..32).for_each(|_| relay.send(&connection, vec![7; 1 << 20]));
        tell();
        assert!(!relay.is_flushed());
        // The messages' heads are left, which it holds.
        other.read_exact(&mut vec![0; 32 << 20]).unwrap();
        while !relay.is_flushed() {
            thread::yield_now();
        }
        // The other end does not read any more, and this end does not wait for that.
        drop(other);
        tell();
        while !relay.is_flushed() {
            thread::yield_now();
        }
    }
}
