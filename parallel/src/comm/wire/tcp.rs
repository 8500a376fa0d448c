//! [`Tcp`]: a wire of sockets, one to each other rank. `launch::rendezvous` has connected them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::Wire;
use super::driver::Event;
use crate::comm::{Error, Result};

/// Sockets to the other ranks, each with a thread that reads and one that writes, so that the driver does not wait for
/// a rank that does not read.
pub(crate) struct Tcp {
    links: Vec<Option<Sender<Vec<u8>>>>,
    /// The sockets, to end what reads and writes there.
    sockets: Vec<TcpStream>,
    threads: Vec<JoinHandle<()>>,
    /// Messages not yet written.
    unwritten: Arc<AtomicUsize>,
}

impl Tcp {
    /// A wire over connected sockets, in order of the ranks; this one's own place is empty.
    pub(crate) fn new(sockets: Vec<Option<TcpStream>>, events: &Sender<Event>) -> io::Result<Tcp> {
        let unwritten = Arc::new(AtomicUsize::new(0));
        let (mut links, mut ends, mut threads) = (vec![], vec![], vec![]);
        for (rank, socket) in sockets.into_iter().enumerate() {
            let Some(socket) = socket else {
                links.push(None);
                continue;
            };
            socket.set_nodelay(true)?;
            let (link, messages) = channel();
            let (reading, events, count) = (socket.try_clone()?, events.clone(), Arc::clone(&unwritten));
            ends.push(socket.try_clone()?);
            threads.push(spawn("reads", rank, move || read(reading, rank, &events))?);
            threads.push(spawn("writes", rank, move || write(socket, &messages, &count))?);
            links.push(Some(link));
        }
        Ok(Tcp { links, sockets: ends, threads, unwritten })
    }
}

fn spawn(what: &str, rank: usize, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("phalanx {what} {rank}")).spawn(work)
}

/// Hands messages to the driver until the socket ends.
fn read(mut socket: TcpStream, rank: usize, events: &Sender<Event>) {
    let why = loop {
        match read_message(&mut socket) {
            Ok(message) => {
                if events.send(Event::Message(rank, message)).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                break "its connection has closed; has the process died?".into();
            }
            Err(error) => break format!("its connection broke: {error}"),
        }
    };
    // A driver that has ended needs no event.
    let _ = events.send(Event::Lost(rank, why));
}

fn read_message(socket: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    socket.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let mut message = Vec::new();
    let size = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
    message.try_reserve_exact(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
    match socket.take(length).read_to_end(&mut message)? == size {
        true => Ok(message),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Writes messages until there are no more.
fn write(mut socket: TcpStream, messages: &Receiver<Vec<u8>>, unwritten: &AtomicUsize) {
    for message in messages {
        let length = (message.len() as u64).to_le_bytes();
        // Where this fails, so does reading, which reports it.
        let _ = socket.write_all(&length).and_then(|()| socket.write_all(&message));
        unwritten.fetch_sub(1, Ordering::Release);
    }
    let _ = socket.shutdown(Shutdown::Write);
}

impl Wire for Tcp {
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()> {
        let lost = || Error::Lost { rank: to, why: "there is no connection".into() };
        let link = self.links.get(to).and_then(Option::as_ref).ok_or_else(lost)?;
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        link.send(message).map_err(|_| lost())
    }

    fn is_flushed(&mut self) -> bool {
        self.unwritten.load(Ordering::Acquire) == 0
    }

    /// Nothing of this wire is left: no thread, no socket, and no message that comes later.
    fn close(&mut self, _orderly: bool) {
        self.links.clear();
        // What was sent has been written, or belongs to a process that does not read.
        for socket in self.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
