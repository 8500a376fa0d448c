//! A port for ranks that meet over TCP on this machine.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// A port that nobody has. It is none of those that the system deals out (from 32768 on), so nobody is given it before rank 0
/// listens there, and no rank that tries to reach it is given it as its own end. Processes begin at different ones.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let begin = std::process::id().wrapping_mul(97);
    let place = || begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).into());
    let ports = std::iter::repeat_with(|| 12_000 + (place() % 20_000) as u16);
    let mut free = ports.take(20_000).filter(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    free.next().expect("a free port")
}
