//! Ranks in several processes: what one process's ranks do is told to the others, which then know what they need.
//!
//! The process that made a communicator's id listens, on this machine; the port is in the id. The others connect, and
//! it passes on what each says, so that all hear the same in the same order. Each process then carries out by itself
//! what concerns its own ranks.

use std::collections::HashMap;
use std::io::BufReader;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use crate::id::Id;
use crate::joining;
use crate::meeting::Meeting;
use crate::message::{self, Message};

/// What this process tells others of one communicator, and hears.
#[derive(Debug)]
pub(crate) struct Relay {
    id: Id,
    state: Mutex<State>,
    /// Messages that are not yet on their way.
    unwritten: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct State {
    /// To the process that listens, or from there to all others; what has ended stays.
    lines: Vec<Sender<Vec<u8>>>,
    /// Who has come, for those who connect later.
    hellos: Vec<Vec<u8>>,
    /// None until all ranks have come; gone when all of this process have left.
    meeting: Option<Weak<Meeting>>,
    /// What others told before the news that all have come was heard here.
    early: Vec<Message>,
}

static RELAYS: LazyLock<Mutex<HashMap<Id, Arc<Relay>>>> = LazyLock::new(Mutex::default);

/// The port at which this process listens, from now on; none where that cannot be.
pub(crate) fn port() -> u16 {
    static PORT: OnceLock<u16> = OnceLock::new();
    let listen = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        let port = listener.local_addr().ok()?.port();
        let accept =
            move || listener.incoming().flatten().for_each(|line| drop(thread::spawn(|| welcome(line))));
        thread::Builder::new().name("phalanx emulated nccl".into()).spawn(accept).ok().map(|_| port)
    };
    *PORT.get_or_init(|| listen().unwrap_or(0))
}

/// Another process: the first message is the communicator's id.
fn welcome(line: TcpStream) {
    let Ok(reader) = line.try_clone() else { return };
    let mut reader = BufReader::new(reader);
    let id = message::read(&mut reader).ok().and_then(|bytes| Id::from_bytes(&bytes));
    if let Some(id) = id.filter(|id| id.is_ours()) {
        let relay = relay(id);
        let place = relay.add(line);
        relay.listen(reader, Some(place));
    }
}

fn relay(id: Id) -> Arc<Relay> {
    let mut relays = RELAYS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(relays.entry(id).or_insert_with(|| Arc::new(Relay::new(id))))
}

/// The relay of a communicator, connected if another process made its id.
///
/// # Errors
/// If that process cannot be reached.
pub(crate) fn open(id: Id) -> std::io::Result<Arc<Relay>> {
    static CONNECTING: Mutex<()> = Mutex::new(());
    let _one = CONNECTING.lock().unwrap_or_else(PoisonError::into_inner);
    let relay = relay(id);
    if !id.is_ours() && relay.state().lines.is_empty() {
        let mut line = TcpStream::connect((Ipv4Addr::LOCALHOST, id.port()))?;
        message::write(&mut line, &id.bytes())?;
        let (reader, ours) = (BufReader::new(line.try_clone()?), Arc::clone(&relay));
        relay.add(line);
        thread::spawn(move || ours.listen(reader, None));
    }
    Ok(relay)
}

impl Relay {
    fn new(id: Id) -> Relay {
        Relay { id, state: Mutex::default(), unwritten: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more line, which hears who has come so far; its place. What is said never blocks.
    fn add(&self, mut line: TcpStream) -> usize {
        let (sender, messages) = channel::<Vec<u8>>();
        let _ = line.set_nodelay(true);
        let unwritten = Arc::clone(&self.unwritten);
        thread::spawn(move || {
            let mut is_gone = false;
            for bytes in messages {
                is_gone = is_gone || message::write(&mut line, &bytes).is_err();
                unwritten.fetch_sub(1, Ordering::Release);
            }
        });
        let mut state = self.state();
        state.hellos.iter().for_each(|hello| self.send(&sender, hello.clone()));
        state.lines.push(sender);
        state.lines.len() - 1
    }

    fn send(&self, line: &Sender<Vec<u8>>, bytes: Vec<u8>) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        // Its thread takes all messages, whether or not anybody hears them.
        let _ = line.send(bytes);
    }

    /// Whether all that was told and passed on so far is on its way, so that the others hear it if this process ends.
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
        for (_, line) in state.lines.iter().enumerate().filter(|(place, _)| Some(*place) != from) {
            self.send(line, bytes.clone());
        }
        if let Message::Hello { .. } = message {
            state.hellos.push(bytes);
        }
    }

    /// All ranks have come.
    pub(crate) fn meet(&self, meeting: &Arc<Meeting>) {
        loop {
            let mut state = self.state();
            if state.early.is_empty() {
                state.meeting = Some(Arc::downgrade(meeting));
                return;
            }
            let early = std::mem::take(&mut state.early);
            drop(state);
            early.into_iter().for_each(|message| deliver(meeting, message));
        }
    }

    /// Hears what a line says until it ends, and passes it on if it is a line of who listens; its ranks leave with it.
    fn listen(&self, mut reader: BufReader<TcpStream>, place: Option<usize>) {
        let mut ranks = Vec::new();
        while let Some(message) =
            message::read(&mut reader).ok().and_then(|bytes| Message::from_bytes(&bytes))
        {
            if let Message::Hello { rank, .. } = message {
                ranks.push(rank);
            }
            self.hear(message, place);
        }
        ranks.into_iter().for_each(|rank| self.hear(Message::Leave { rank }, place));
    }

    fn hear(&self, message: Message, place: Option<usize>) {
        // First, so that nobody here can do and tell what comes of it before the others have heard of it.
        if place.is_some() {
            self.pass(&message, place);
        }
        if let Message::Hello { rank, ranks } = message {
            return joining::arrived(self.id, rank, ranks);
        }
        let mut state = self.state();
        match state.meeting.as_ref().map(Weak::upgrade) {
            None => state.early.push(message),
            Some(meeting) => {
                drop(state);
                if let Some(meeting) = meeting {
                    deliver(&meeting, message);
                }
            }
        }
    }
}

fn deliver(meeting: &Meeting, message: Message) {
    match message {
        Message::Hello { .. } => {}
        Message::Post { rank, turn, calls } => meeting.posted(rank, turn, calls),
        Message::Leave { rank } => meeting.leave(rank),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn what_is_told_is_on_its_way_when_it_can_be_read_and_not_before() {
        let relay = Relay::new(Id::new());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        relay.add(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut other, _) = listener.accept().unwrap();
        assert!(relay.is_flushed());
        // More than a socket holds.
        let line = relay.state().lines[0].clone();
        let tell = || (0..32).for_each(|_| relay.send(&line, vec![7; 1 << 20]));
        tell();
        assert!(!relay.is_flushed());
        // The messages' heads are left, which it holds.
        other.read_exact(&mut vec![0; 32 << 20]).unwrap();
        while !relay.is_flushed() {
            thread::yield_now();
        }
        // Nobody reads any more, and nobody waits for that.
        drop(other);
        tell();
        while !relay.is_flushed() {
            thread::yield_now();
        }
    }
}
