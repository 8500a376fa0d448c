//! What ranks believe of processes that have met them and are strangers.

#[path = "../../tests/comm/port.rs"]
mod port;

use std::io::Write;
use std::net::TcpStream;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use phalanx_rendezvous::{Credentials, Hello, Kind, Session, greet};

use super::Environment;
use crate::comm::Error;
use crate::comm::wire::{Address, FrameKind};
use port::free_port;

const LONG: Duration = Duration::from_secs(20);

/// Waits for a message.
fn hear(session: &mut Session, wanted: Kind) {
    let end = Instant::now() + LONG;
    while session.receive(4096).unwrap().is_none_or(|(kind, _)| kind != wanted) {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(1));
    }
}

/// What rank 0 hears if ranks 1 and 2 are strangers, of whom the first sends a failure as if rank `named` had said it.
fn forged_failure(named: usize) -> Error {
    let port = free_port();
    scope(|scope| {
        let host = scope.spawn(|| {
            let environment = Environment::new().local(0, 3, port).timeout(LONG);
            environment.run(|rank| rank.comm().barrier()).unwrap_err()
        });
        let end = Instant::now() + LONG;
        let connect = || {
            std::iter::repeat_with(|| TcpStream::connect(("127.0.0.1", port))).find_map(|s| s.ok()).unwrap()
        };
        let mut sessions = [1, 2].map(|rank| {
            greet(connect(), &Hello { rank, size: 3, port: 1 }, &Credentials::default(), end)
                .unwrap()
                .unwrap()
        });
        for wanted in [Kind::Table, Kind::Go] {
            for session in &mut sessions {
                hear(session, wanted);
                if wanted == Kind::Table {
                    session.send(Kind::Ready, &[]).unwrap();
                }
            }
        }
        let address = Address { part: named, ..Address::plain(FrameKind::Failure) };
        let frame = address.frame(b"\x1b]0;title\x07rank 0 failed: x");
        let bytes = [&(frame.len() as u64).to_le_bytes()[..], &frame].concat();
        sessions[0].socket.write_all(&bytes).unwrap();
        host.join().unwrap()
    })
}

/// Without a secret a stranger may be a rank. What it says is shown as plain text, with its own number.
#[test]
fn a_forged_failure_is_reported_with_the_rank_that_sent_it() {
    let text = "\\u{1b}]0;title\\u{7}rank 0 failed: x";
    let heard = forged_failure(0);
    assert!(matches!(heard, Error::Reported { rank: 1, .. }), "{heard}");
    assert_eq!(heard.to_string(), format!("{text} (said rank 1)"));
    assert_eq!(forged_failure(2).to_string(), format!("{text} (passed on by rank 1) (said rank 2)"));
}
