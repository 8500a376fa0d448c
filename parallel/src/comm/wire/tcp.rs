//! [`Tcp`]: a wire of connections, one to each other rank, in the clear or with TLS. `phalanx_rendezvous` has made them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_rendezvous::{Reader, Stream, Writer};

use super::driver::Event;
use super::{Address, FrameKind, HEAD, Wire};
use crate::comm::{Error, Result};

/// Bytes of messages about calls and failures, at most: a signature has two numbers for each rank.
const CONTROL_MAX: u64 = 4 << 20;
/// Bytes from a send, at most. They may come before the receive that says how many are wanted.
const MESSAGE_MAX: u64 = 1 << 40;
/// How long the ends of all links may take to be written.
const FAREWELL: Duration = Duration::from_secs(1);
/// Between two looks at whether they are.
const PAUSE: Duration = Duration::from_millis(1);
/// Bytes for which memory is taken at first.
const PIECE: usize = 1 << 20;

/// Connections to the other ranks, each with a thread that reads and one that writes, so that the driver does not wait for
/// a rank that does not read.
pub(crate) struct Tcp {
    links: Vec<Option<Sender<Vec<u8>>>>,
    /// The sockets, to end what reads and writes there.
    sockets: Vec<TcpStream>,
    readers: Vec<JoinHandle<()>>,
    writers: Vec<JoinHandle<()>>,
    /// Messages not yet written.
    unwritten: Arc<AtomicUsize>,
    /// Bytes of the longest message of a collective of which this rank has sent its signature. Others send theirs after that.
    longest: Arc<AtomicUsize>,
}

impl Tcp {
    /// A wire over connected streams, in order of the ranks; this one's own place is empty.
    pub(crate) fn new(streams: Vec<Option<Stream>>, events: &Sender<Event>) -> io::Result<Tcp> {
        let (links, sockets, readers, writers, unwritten, longest) = Default::default();
        // If a link fails, those before it are closed.
        let mut wire = Tcp { links, sockets, readers, writers, unwritten, longest };
        for (rank, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                wire.links.push(None);
                continue;
            };
            stream.socket().set_nodelay(true)?;
            let (link, messages) = channel();
            wire.sockets.push(stream.socket().try_clone()?);
            let (reader, writer) = stream.split()?;
            let (count, longest) = (Arc::clone(&wire.unwritten), Arc::clone(&wire.longest));
            let events = events.clone();
            wire.readers.push(spawn("reads", rank, move || read(reader, rank, &longest, &events))?);
            wire.writers.push(spawn("writes", rank, move || write(writer, &messages, &count))?);
            wire.links.push(Some(link));
        }
        Ok(wire)
    }
}

fn spawn(what: &str, rank: usize, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("phalanx {what} {rank}")).spawn(work)
}

/// Hands messages to the driver until the link ends.
fn read(mut link: Reader, rank: usize, longest: &AtomicUsize, events: &Sender<Event>) {
    let why = loop {
        match read_message(&mut link, longest) {
            Ok(message) => {
                if events.send(Event::Message(rank, message)).is_err() {
                    return;
                }
            }
            Err(error) => break why(&error),
        }
    };
    // A driver that has ended needs no event.
    let _ = events.send(Event::Lost(rank, why));
}

/// Why a link has ended.
fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "its connection has closed; has the process died?".into(),
        io::ErrorKind::TimedOut => "its connection broke: its machine does not answer any more".into(),
        _ => format!("its connection broke: {error}"),
    }
}

/// The next message. Memory for it is taken as its bytes come, and none if it is longer than such a message can be.
fn read_message(link: &mut impl Read, longest: &AtomicUsize) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    link.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let mut message = Vec::with_capacity(HEAD);
    grow(link, &mut message, length.min(HEAD as u64))?;
    let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let Some(address) = Address::of(&message) else {
        return Err(wrong(format!("it sent {length} bytes that are no message of a run")));
    };
    let most = match address.kind {
        FrameKind::Part | FrameKind::Result => longest.load(Ordering::SeqCst) as u64,
        FrameKind::Message => MESSAGE_MAX,
        _ => CONTROL_MAX,
    };
    let content = length - HEAD as u64;
    if content > most {
        let kind = address.kind;
        return Err(wrong(format!("it announced {content} bytes ({kind:?}), wanted at most {most}")));
    }
    while (message.len() as u64) < length {
        let next = length.min((2 * message.len()).max(PIECE) as u64);
        grow(link, &mut message, next)?;
    }
    Ok(message)
}

/// Reads until the message has so many bytes.
fn grow(link: &mut impl Read, message: &mut Vec<u8>, wanted: u64) -> io::Result<()> {
    let more = wanted - message.len() as u64;
    let size = usize::try_from(more).map_err(|_| io::ErrorKind::OutOfMemory)?;
    message.try_reserve_exact(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
    match link.take(more).read_to_end(message)? == size {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Writes messages until there are no more.
fn write(mut link: Writer, messages: &Receiver<Vec<u8>>, unwritten: &AtomicUsize) {
    for message in messages {
        let length = (message.len() as u64).to_le_bytes();
        // Where this fails, so does reading, which reports it.
        let _ = link.write_all(&length).and_then(|()| link.write_all(&message));
        unwritten.fetch_sub(1, Ordering::Release);
    }
    let _ = link.finish();
}

impl Wire for Tcp {
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()> {
        let lost = || Error::Lost { rank: to, why: "there is no connection".into() };
        let link = self.links.get(to).and_then(Option::as_ref).ok_or_else(lost)?;
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        link.send(message).map_err(|_| lost())
    }

    fn expect(&mut self, bytes: usize) {
        self.longest.fetch_max(bytes, Ordering::SeqCst);
    }

    fn is_flushed(&mut self) -> bool {
        self.unwritten.load(Ordering::Acquire) == 0
    }

    /// Nothing of this wire is left: no thread, no socket, and no message that comes later.
    fn close(&mut self, orderly: bool) {
        self.links.clear();
        if orderly {
            // What was sent has been written. The writers say that nothing follows.
            let end = Instant::now() + FAREWELL;
            while !self.writers.iter().all(JoinHandle::is_finished) && Instant::now() < end {
                std::thread::sleep(PAUSE);
            }
        }
        // What was sent and is not written belongs to a process that does not read.
        self.sockets.drain(..).for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        self.readers.drain(..).chain(self.writers.drain(..)).for_each(|thread| drop(thread.join()));
    }
}

/// A wire whose driver panicked, or that failed while it was made, leaves nothing either.
impl Drop for Tcp {
    fn drop(&mut self) {
        self.close(false);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::RecvTimeoutError;

    use phalanx_rendezvous::detect_vanished;
    use socket2::{SockFilter, SockRef};

    use super::*;

    /// No time limit of calls is known here.
    #[test]
    fn a_rank_whose_machine_vanishes_is_lost_even_if_it_is_sent_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        detect_vanished(&socket, Duration::from_secs(3)).unwrap();
        // The other end's system drops all packets for it.
        SockRef::from(&other).attach_filter(&[SockFilter::new(0x06, 0, 0, 0)]).unwrap();
        let (events, heard) = channel();
        let begin = Instant::now();
        let _wire = Tcp::new(vec![None, Some(Stream::Plain(socket))], &events).unwrap();
        match heard.recv_timeout(Duration::from_secs(20)).unwrap() {
            Event::Lost(1, why) => assert!(why.contains("its machine does not answer"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
    #[test]
    fn a_wire_that_is_dropped_leaves_no_link() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        other.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let socket = listener.accept().unwrap().0;
        let (events, heard) = channel();
        drop(Tcp::new(vec![None, Some(Stream::Plain(socket))], &events).unwrap());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        // The thread that read is gone, and its sender with it.
        drop(events);
        let mut last = heard.recv_timeout(Duration::from_secs(5)).map(drop);
        if last.is_ok() {
            last = heard.recv_timeout(Duration::from_secs(5)).map(drop);
        }
        assert_eq!(last, Err(RecvTimeoutError::Disconnected));
    }
}
