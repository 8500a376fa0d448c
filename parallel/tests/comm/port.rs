//! A port for ranks that meet over TCP on this machine.

use std::net::TcpStream;
use std::sync::atomic::{AtomicU16, Ordering};

/// A port where no process listens. It is none of those that systems deal out (from 32768 on, or from 16000), so no process is given it
/// before rank 0 listens there, and no rank that tries to reach it is given it as its own end. Processes begin at different ones.
///
/// It is found by a visit: a listener that is opened to try the port would live on, for a moment, in a process that another
/// test begins just then, and rank 0 would find the port taken.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let begin = std::process::id().wrapping_mul(97);
    let place = || begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).into());
    let ports = std::iter::repeat_with(|| 12_000 + (place() % 4_000) as u16);
    let mut free = ports.take(4_000).filter(|&port| TcpStream::connect(("127.0.0.1", port)).is_err());
    free.next().expect("a free port")
}
