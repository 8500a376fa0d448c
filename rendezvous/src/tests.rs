//! How ranks meet: in any order, beside strangers and other runs, and with ranks that die or do not come.

#[path = "../../parallel/tests/comm/port.rs"]
pub(crate) mod port;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use crate::Result;
use crate::handshake::{Credentials, GREETING, Hello, Kind, Session, greet};
use crate::master::Master;
use crate::rendezvous::{Rendezvous, dial};
use port::free_port;

const LONG: Duration = Duration::from_secs(20);

/// The tests are compiled twice where there is TLS.
const TLS: bool = module_path!().len() > "phalanx_rendezvous::tests".len();

fn here(port: u16) -> Master {
    Master::Address("127.0.0.1".into(), port)
}

fn known(secret: &str) -> Credentials {
    // TLS needs one.
    let secret = if TLS && secret.is_empty() { "any" } else { secret };
    Credentials { secret: secret.into(), job: String::new(), tls: TLS }
}

/// The number of sockets that a rank gets, or the error; lines that it prints go to `lines`.
fn join(
    (rank, size): (usize, usize),
    master: &Master,
    known: &Credentials,
    timeout: Duration,
    lines: &Mutex<Vec<String>>,
) -> Result<usize> {
    let tell = |line: &str| lines.lock().unwrap().push(line.into());
    let mut rendezvous = Rendezvous::new((rank, size), master, known, timeout, &tell);
    rendezvous.report_every = Duration::from_millis(200);
    rendezvous.report_at.set(Instant::now() + rendezvous.report_every);
    rendezvous.meet().map(|sockets| sockets.iter().flatten().count())
}

/// The results of the ranks that come, each after so many milliseconds.
fn meet_at(
    master: &Master,
    arrived: &[(usize, usize, u64)],
    secret: &str,
    timeout: Duration,
) -> Vec<Result<usize>> {
    let lines = Mutex::new(vec![]);
    scope(|scope| {
        let join = |&(rank, size, after)| {
            let (lines, known) = (&lines, known(secret));
            scope.spawn(move || {
                sleep(Duration::from_millis(after));
                join((rank, size), master, &known, timeout, lines)
            })
        };
        let threads: Vec<_> = arrived.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn errors(arrived: &[(usize, usize, u64)], secret: &str, timeout_ms: u64) -> Vec<String> {
    let met = meet_at(&here(free_port()), arrived, secret, Duration::from_millis(timeout_ms));
    met.into_iter().map(|met| met.map_or_else(|e| e.to_string(), |n| format!("met {n}"))).collect()
}

#[test]
fn each_rank_gets_a_socket_to_each_other() {
    for secret in ["", "secret"] {
        let met = errors(&[(3, 4, 0), (1, 4, 0), (0, 4, 50), (2, 4, 100)], secret, 20_000);
        assert_eq!(met, ["met 3"; 4]);
    }
}

#[test]
fn a_rank_that_came_long_before_rank_0_still_meets_one_that_comes_long_after() {
    for met in
        meet_at(&here(free_port()), &[(1, 3, 0), (0, 3, 1500), (2, 3, 2800)], "", Duration::from_secs(2))
    {
        assert_eq!(met.unwrap(), 2);
    }
}

#[test]
fn ranks_may_have_all_the_time_that_there_is() {
    let met = meet_at(&here(free_port()), &[(0, 2, 0), (1, 2, 0)], "", Duration::MAX);
    assert!(met.iter().all(Result::is_ok), "{met:?}");
}

#[test]
fn ranks_that_do_not_come_are_named_to_those_that_did() {
    for error in errors(&[(0, 4, 0), (2, 4, 0)], "", 1000) {
        assert!(
            error.contains("ranks 1, 3 of 4 did not come to 127.0.0.1:") && error.contains("within 1 s"),
            "{error}"
        );
    }
    let error = errors(&[(1, 2, 0)], "", 100).remove(0);
    assert!(error.contains("rank 1: rank 0 did not come to 127.0.0.1:"), "{error}");
}

#[test]
fn ranks_that_contradict_each_other_are_told() {
    let wanted = "rank 1 says there are 2 ranks, rank 0 says 3";
    // With a secret no stranger can say so, and the launch ends at once.
    let begin = Instant::now();
    assert!(errors(&[(0, 3, 0), (1, 2, 0)], "secret", 20_000).iter().all(|error| error.contains(wanted)));
    let twice = errors(&[(0, 3, 0), (1, 3, 0), (1, 3, 100)], "secret", 20_000);
    assert!(
        twice.iter().all(|error| error.contains("two processes say they are rank 1, at 127.0.0.1:")),
        "{twice:?}"
    );
    assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
    if TLS {
        return;
    }
    // Without one the others are waited for.
    let met = errors(&[(0, 2, 0), (1, 3, 0), (7, 2, 0), (1, 2, 300)], "", 20_000);
    assert_eq!((&met[0][..], &met[3][..]), ("met 1", "met 1"), "{met:?}");
    assert!(met[1].contains("rank 1 says there are 3 ranks, rank 0 says 2"), "{met:?}");
    assert!(met[2].contains("rank 7 came to rank 0, which does not wait for it"), "{met:?}");
    assert!(errors(&[(0, 3, 0), (1, 2, 0)], "", 1000).iter().all(|error| error.contains(wanted)));
}

#[test]
fn ranks_meet_by_a_file_even_if_a_killed_run_has_left_one() {
    let path = std::env::temp_dir().join(format!("phalanx-rendezvous-{}", std::process::id()));
    // A free port has no listener: a rank that reads this before rank 0 has replaced it tries again.
    std::fs::write(&path, format!("127.0.0.1:{}\n", free_port())).unwrap();
    for met in meet_at(&Master::File(path.clone()), &[(2, 3, 0), (1, 3, 0), (0, 3, 0)], "", LONG) {
        assert_eq!(met.unwrap(), 2);
    }
    assert!(!path.exists(), "the file is left");
    let short = Duration::from_millis(100);
    // Another run's rank 0 has replaced the file of one that gives up.
    let master = Master::File(path.clone());
    let (_old, written) = master.listen().unwrap();
    let (_new, replaced) = master.listen().unwrap();
    master.met(written);
    assert_eq!(master.addresses().unwrap(), [replaced.unwrap()]);
    master.met(replaced);
    assert!(!path.exists(), "the file is left");
    let error =
        meet_at(&Master::File(path.clone()), &[(1, 2, 0)], "", short).remove(0).unwrap_err().to_string();
    assert!(error.contains("rank 0 did not come to the address in"), "{error}");
    let nowhere = Master::File(path.join("nowhere"));
    let error = meet_at(&nowhere, &[(0, 2, 0)], "", short).remove(0).unwrap_err().to_string();
    assert!(error.contains("rank 0 cannot listen at the address in") && error.contains("nowhere"), "{error}");
}

/// Attempts to connect walk through the ports that the system deals out, of which the wanted one may be one.
#[test]
fn a_rank_does_not_connect_with_itself_where_the_system_deals_out_the_port() {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let bounds: Vec<u16> = range.split_whitespace().filter_map(|port| port.parse().ok()).collect();
    let [first, last] = bounds[..] else { return };
    let port = (first..last).find(|port| port % 2 == 0 && TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let address = ([127, 0, 0, 1], port.unwrap()).into();
    for _ in first..last {
        assert!(dial(address, LONG, None).is_err(), "a connection where no process listens");
    }
}

#[test]
fn ranks_of_another_run_are_told_apart() {
    let port = free_port();
    let (lines, a, b) = (Mutex::new(vec![]), known("a"), known("b"));
    let none = known("");
    let b_job = Credentials { job: "b".into(), ..known("a") };
    scope(|scope| {
        let join = |rank, known, after| {
            let lines = &lines;
            scope.spawn(move || {
                sleep(Duration::from_millis(after));
                join((rank, 2), &here(port), known, LONG, lines).map_err(|e| e.to_string())
            })
        };
        let first = join(0, &a, 0);
        let others = [join(1, &b, 100), join(1, &b_job, 100), join(1, &none, 100)];
        for other in others {
            let error = other.join().unwrap().unwrap_err();
            assert!(error.contains("for rank 0: it is not of this run: another secret or job"), "{error}");
        }
        assert_eq!(join(1, &a, 0).join().unwrap(), Ok(1));
        assert_eq!(first.join().unwrap(), Ok(1));
    });
}

#[test]
fn strangers_neither_delay_the_ranks_nor_end_the_launch() {
    let port = free_port();
    let lines = Mutex::new(vec![]);
    let secret = known("secret");
    scope(|scope| {
        let join = |rank| {
            let (lines, secret) = (&lines, &secret);
            scope.spawn(move || join((rank, 2), &here(port), secret, LONG, lines))
        };
        let host = join(0);
        let connect = || loop {
            if let Ok(socket) = TcpStream::connect(("127.0.0.1", port)) {
                return socket;
            }
        };
        // Idle ones, ones that send a byte, a web browser, a wrong hello, and a rank with another secret.
        let mut idle: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
        idle.iter_mut().step_by(2).for_each(|socket| drop(socket.write_all(b"p")));
        connect()
            .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n and more than a hello is long ......")
            .unwrap();
        connect().write_all(&[b"phalanx2".as_slice(), &[0xff; 56]].concat()).unwrap();
        let hello = Hello { rank: 1, size: 9, port: 1 };
        assert!(greet(connect(), &hello, &known("other"), Instant::now() + LONG).is_err());
        // One that says it is rank 1 and makes up a proof.
        let mut forged = connect();
        let words = [u64::from_le_bytes(*b"phalanx2"), 1, 2, 1].map(u64::to_le_bytes).concat();
        forged.write_all(&[&words[..], &[7; 32]].concat()).unwrap();
        forged.read_exact(&mut [0; 69]).unwrap();
        forged.write_all(&[&[1, 0, 0, 0, 0][..], &[7; 32]].concat()).unwrap();
        assert_eq!(forged.read(&mut [0]).unwrap_or(0), 0, "it was answered");
        let begin = Instant::now();
        assert_eq!(join(1).join().unwrap().unwrap(), 1);
        assert_eq!(host.join().unwrap().unwrap(), 1);
        assert!(begin.elapsed() < GREETING, "{:?}", begin.elapsed());
    });
}

#[test]
fn what_stands_in_for_rank_0_is_believed_nothing_and_read_no_further() {
    // The length of a message that would fill the memory, an answer of a web server, and text for the terminal.
    let endless = [&[3, 0xff, 0xff, 0xff, 0xff][..], &[b'x'; 4096]].concat();
    for answer in [&endless[..], b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x1b[2J"] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (port, lines) = (listener.local_addr().unwrap().port(), Mutex::new(vec![]));
        let error = scope(|scope| {
            let visitor = scope.spawn(|| join((1, 2), &here(port), &known("secret"), LONG, &lines));
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; 64]).unwrap();
            socket.write_all(answer).unwrap();
            let _ = socket.shutdown(std::net::Shutdown::Write);
            visitor.join().unwrap().unwrap_err().to_string()
        });
        assert!(error.contains("rank 1 came to 127.0.0.1:") && error.contains("(it sent \""), "{error}");
        assert!(error.len() < 400 && !error.contains(char::is_control), "{error}");
    }
}

/// A rank that rank 0 has accepted, and that does nothing more.
fn say_hello(port: u16, rank: usize, size: usize) -> Session {
    let end = Instant::now() + LONG;
    let socket = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(socket) => break socket,
            Err(_) => assert!(Instant::now() < end),
        }
    };
    greet(socket, &Hello { rank, size, port: 1 }, &known(""), end).unwrap().unwrap()
}

#[test]
fn a_rank_that_dies_after_its_hello_is_named_and_may_come_again() {
    let (port, lines) = (free_port(), Mutex::new(vec![]));
    scope(|scope| {
        let join = |rank| {
            let lines = &lines;
            scope.spawn(move || {
                join((rank, 3), &here(port), &known(""), LONG, lines).map_err(|e| e.to_string())
            })
        };
        let host = join(0);
        say_hello(port, 1, 3);
        sleep(Duration::from_millis(300));
        let ranks = [join(1), join(2)];
        assert_eq!(host.join().unwrap(), Ok(2));
        ranks.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap(), Ok(2)));
    });
    let lines = lines.into_inner().unwrap();
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("rank 0: rank 1 at 127.0.0.1:") && line.contains("has gone")),
        "{lines:?}"
    );
    // If it does not, it is one of those that did not come; or the one that has gone, if all had come.
    for (size, wanted) in [(3, "ranks 1, 2 of 3 did not come to"), (2, "rank 1 ")] {
        let (port, lines) = (free_port(), Mutex::new(vec![]));
        let error = scope(|scope| {
            let host =
                scope.spawn(|| join((0, size), &here(port), &known(""), Duration::from_secs(1), &lines));
            say_hello(port, 1, size);
            host.join().unwrap().unwrap_err().to_string()
        });
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn a_rank_that_waits_says_for_whom() {
    let (port, lines) = (free_port(), Mutex::new(vec![]));
    scope(|scope| {
        for rank in [0, 1] {
            let lines = &lines;
            scope.spawn(move || join((rank, 4), &here(port), &known(""), Duration::from_millis(1100), lines));
        }
    });
    let lines = lines.into_inner().unwrap();
    for rank in [0, 1] {
        let wanted = format!("rank {rank}: waiting for ranks 2, 3 of 4 at 127.0.0.1:{port} (0 s of 1.1)");
        assert!(lines.contains(&wanted), "{lines:?}");
    }
    let (port, lines) = (free_port(), Mutex::new(vec![]));
    join((1, 2), &here(port), &known(""), Duration::from_millis(500), &lines).unwrap_err();
    let lines = lines.into_inner().unwrap();
    assert!(lines[0].contains("rank 1: waiting for rank 0 of 2 at 127.0.0.1:"), "{lines:?}");
}

#[test]
fn a_port_that_another_process_has_is_an_error_that_says_so() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let taken = here(listener.local_addr().unwrap().port());
    let error = meet_at(&taken, &[(0, 2, 0)], "", LONG).remove(0).unwrap_err().to_string();
    assert!(
        error.contains("rank 0 cannot listen at 127.0.0.1:")
            && error.contains("another process has the port"),
        "{error}"
    );
}

#[test]
fn ranks_meet_over_ipv6() {
    if TcpListener::bind(("::1", 0)).is_err() {
        return;
    }
    for met in meet_at(&Master::Address("::1".into(), free_port()), &[(0, 2, 0), (1, 2, 0)], "", LONG) {
        assert_eq!(met.unwrap(), 1);
    }
}

/// Waits for a message.
fn hear(session: &mut Session, wanted: Kind) {
    let end = Instant::now() + LONG;
    while session.receive(4096).unwrap().is_none_or(|(kind, _)| kind != wanted) {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(1));
    }
}

/// Rank 0 hears from the one that waited for it in vain.
#[test]
fn a_rank_that_stops_while_ranks_connect_is_named_to_all() {
    let (port, lines) = (free_port(), Mutex::new(vec![]));
    scope(|scope| {
        let join = |rank| {
            let lines = &lines;
            scope.spawn(move || join((rank, 3), &here(port), &known(""), Duration::from_secs(1), lines))
        };
        let ranks = [join(0), join(1)];
        let _stopped = say_hello(port, 2, 3);
        for rank in ranks {
            let why = rank.join().unwrap().unwrap_err().to_string();
            assert!(why.contains("rank 2 of 3 did not come to rank 1 within 1 s"), "{why}");
        }
    });
}

/// The connections take a little longer than what was left of rank 0's time, and than a handshake may take.
#[test]
fn ranks_that_came_late_have_time_to_connect_with_each_other() {
    let (port, timeout, lines) = (free_port(), Duration::from_secs(7), Mutex::new(vec![]));
    let met = scope(|scope| {
        let host = scope.spawn(|| join((0, 2), &here(port), &known(""), timeout, &lines));
        sleep(Duration::from_millis(2500));
        let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let hello = Hello { rank: 1, size: 2, port: 1 };
        let mut session = greet(socket, &hello, &known(""), Instant::now() + LONG).unwrap().unwrap();
        hear(&mut session, Kind::Table);
        sleep(Duration::from_millis(5300));
        session.send(Kind::Ready, &[]).unwrap();
        host.join().unwrap()
    });
    assert_eq!(met.unwrap(), 1);
}
