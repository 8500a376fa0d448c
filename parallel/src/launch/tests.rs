//! What ranks believe of processes that have met them and are strangers.

#[path = "../../tests/comm/port.rs"]
mod port;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
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

/// What rank 0 hears if ranks 1 and 2 are strangers, of whom the first sends a message's length and its first bytes.
fn heard_of(length: u64, begin: &[u8]) -> Error {
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
        let stream = &mut sessions[0].stream;
        stream.write_all(&[&length.to_le_bytes()[..], begin].concat()).unwrap();
        stream.socket().shutdown(Shutdown::Write).unwrap();
        host.join().unwrap()
    })
}

/// What rank 0 hears of a failure as if rank `named` had said it.
fn forged_failure(named: usize) -> Error {
    let address = Address { part: named, ..Address::plain(FrameKind::Failure) };
    let frame = address.frame(b"\x1b]0;title\x07rank 0 failed: x");
    heard_of(frame.len() as u64, &frame)
}

/// A length is believed only as far as a call could send so much, and takes memory only as bytes come.
#[test]
fn lengths_that_no_call_can_have_are_refused_with_the_name_of_the_rank() {
    for (kind, length, wanted) in [
        (
            FrameKind::Failure,
            1 << 62,
            "it announced 4611686018427387872 bytes (Failure), wanted at most 4194304",
        ),
        (FrameKind::Check, 1 << 32, "it announced 4294967264 bytes (Check), wanted at most 4194304"),
        // The barrier has no elements.
        (FrameKind::Part, 33, "it announced 1 bytes (Part), wanted at most 0"),
        (FrameKind::Result, u64::MAX, "it announced 18446744073709551583 bytes (Result), wanted at most 0"),
        (
            FrameKind::Message,
            1 << 50,
            "it announced 1125899906842592 bytes (Message), wanted at most 1099511627776",
        ),
        (FrameKind::Message, 1 << 40, "its connection has closed"),
        (FrameKind::Leave, 5, "it sent 5 bytes that are no message of a run"),
    ] {
        let error = heard_of(length, &Address::plain(kind).frame(&[])[..length.min(32) as usize]).to_string();
        assert!(error.contains("rank 1 is lost: ") && error.contains(wanted), "{error}");
    }
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
