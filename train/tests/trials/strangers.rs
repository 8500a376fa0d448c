//! Connections to rank 0's port by what is no rank of the run.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stranger {
    Silent,
    /// A hundred that say nothing.
    Crowd,
    /// A browser.
    Browser,
    /// It says that it is rank 1, and cannot prove it.
    Liar,
    /// A rank of another run.
    OtherRun,
}

impl Stranger {
    pub const ALL: [Stranger; 5] =
        [Stranger::Silent, Stranger::Crowd, Stranger::Browser, Stranger::Liar, Stranger::OtherRun];

    /// Connects as soon as a process listens, and stays until `over`.
    pub fn visit(self, port: u16, ranks: usize, over: Arc<AtomicBool>) {
        std::thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(20);
            let mut connections = Vec::new();
            let wanted = if self == Stranger::Crowd { 100 } else { 1 };
            while !over.load(Ordering::Relaxed) && Instant::now() < end {
                if connections.len() < wanted
                    && let Ok(mut connection) = TcpStream::connect(("127.0.0.1", port))
                {
                    // It may be closed at once.
                    let _ = connection.write_all(&self.says(ranks));
                    connections.push(connection);
                } else {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        });
    }

    fn says(self, ranks: usize) -> Vec<u8> {
        match self {
            Stranger::Silent | Stranger::Crowd | Stranger::OtherRun => vec![],
            Stranger::Browser => b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            // A hello with a nonce, and a message of the right form in place of the proof.
            Stranger::Liar => {
                let hello = [u64::from_le_bytes(*b"phalanx2"), 1, ranks as u64, 4242, 1, 2, 3, 4];
                let proof = [1u8, 0, 0, 0, 0].into_iter().chain([7; 32]);
                hello.into_iter().flat_map(u64::to_le_bytes).chain(proof).collect()
            }
        }
    }
}
