//! Connections with TLS: what their two ends have and send, and what is between them.

use std::net::TcpListener;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use super::*;
use crate::{Credentials, Master, rendezvous};

const SHORT: Duration = Duration::from_secs(3);

/// Two ends of a socket.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let visitor = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (visitor, listener.accept().unwrap().0)
}

/// The open ends of a connection.
fn opened() -> (TlsStream, TlsStream) {
    let (visitor, host) = pair();
    let (mut visitor, mut host) = (TlsStream::visitor(visitor).unwrap(), TlsStream::host(host).unwrap());
    [&visitor, &host].into_iter().for_each(|end| end.socket.set_nonblocking(true).unwrap());
    while !(visitor.is_open().unwrap() & host.is_open().unwrap()) {}
    [&visitor, &host].into_iter().for_each(|end| end.socket.set_nonblocking(false).unwrap());
    (visitor, host)
}

#[test]
fn both_ends_of_a_connection_have_its_binding_and_no_other() {
    let bindings = [opened(), opened()].map(|(visitor, host)| {
        assert_eq!(visitor.binding().unwrap(), host.binding().unwrap());
        host.binding().unwrap()
    });
    assert_ne!(bindings[0], bindings[1]);
}

/// More than the sockets' buffers hold, while neither end waits for the other.
#[test]
fn both_ends_may_write_much_at_once() {
    let (visitor, host) = opened();
    scope(|scope| {
        for (end, (own, others)) in [(visitor, (1, 2)), (host, (2, 1))] {
            let (mut reader, mut writer) = end.split().unwrap();
            scope.spawn(move || {
                writer.write_all(&vec![own; 20 << 20]).unwrap();
                writer.finish().unwrap();
            });
            scope.spawn(move || {
                let mut all = Vec::new();
                reader.read_to_end(&mut all).unwrap();
                assert!(all == vec![others; 20 << 20]);
            });
        }
    });
}

#[test]
fn a_link_that_was_cut_is_told_from_one_that_has_ended() {
    for is_cut in [false, true] {
        let (visitor, host) = opened();
        let (mut reader, _writer) = host.split().unwrap();
        let (_reader, mut writer) = visitor.split().unwrap();
        writer.write_all(b"abc").unwrap();
        match is_cut {
            true => writer.socket.shutdown(Shutdown::Both).unwrap(),
            false => writer.finish().unwrap(),
        }
        let mut all = Vec::new();
        let end = reader.read_to_end(&mut all);
        assert_eq!((&all[..], end.is_err()), (&b"abc"[..], is_cut));
        assert!(end.is_ok_and(|read| read == 3) || is_cut);
    }
}

#[test]
fn what_came_with_the_last_message_of_the_handshake_is_read_without_more_bytes() {
    let (mut visitor, mut host) = opened();
    host.connection.writer().write_all(b"Go").unwrap();
    host.connection.writer().write_all(b"frame").unwrap();
    host.flush().unwrap();
    visitor.read_exact(&mut [0; 2]).unwrap();
    visitor.socket.set_read_timeout(Some(SHORT)).unwrap();
    let (mut reader, _writer) = visitor.split().unwrap();
    let mut frame = [0; 5];
    reader.read_exact(&mut frame).unwrap();
    assert_eq!(&frame, b"frame");
}

fn known(secret: &str, tls: bool) -> Credentials {
    Credentials { secret: secret.into(), job: String::new(), tls }
}

/// What becomes of ranks 0 and 1, of which the latter comes to another port.
fn meet(host: Credentials, visitor: Credentials, port: u16, visited: u16) -> [Result<usize, String>; 2] {
    let join = |rank, known: &Credentials, port| {
        let master = Master::Address("127.0.0.1".into(), port);
        let met = rendezvous((rank, 2), &master, known, SHORT).map_err(|error| error.to_string());
        met.map(|streams| {
            let tls = streams.iter().flatten().map(crate::Stream::has_tls).collect::<Vec<_>>();
            assert_eq!(tls, [known.tls]);
            tls.len()
        })
    };
    scope(|scope| {
        let host = scope.spawn(|| join(0, &host, port));
        [join(1, &visitor, visited), host.join().unwrap()]
    })
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ranks_of_which_one_has_no_tls_are_told() {
    let port = free_port();
    assert_eq!(meet(known("s", true), known("s", true), port, port), [Ok(1), Ok(1)]);
    // The rank proves that it is one, so that the launch ends at once.
    let (port, begin) = (free_port(), Instant::now());
    for met in meet(known("s", true), known("s", false), port, port) {
        let error = met.unwrap_err();
        assert!(
            error.contains(
                "rank 1 came without TLS, which is on at rank 0: set PHALANX_TLS=1 for all ranks, or for none"
            ),
            "{error}"
        );
    }
    assert!(begin.elapsed() < SHORT);
    let port = free_port();
    let [visitor, host] = meet(known("s", false), known("s", true), port, port).map(Result::unwrap_err);
    assert!(
        visitor.contains("rank 1 came to 127.0.0.1:")
            && visitor.contains("TLS is on here, and off there: set PHALANX_TLS=1"),
        "{visitor}"
    );
    assert!(
        host.contains("rank 1 of 2 did not come")
            && host.contains("has TLS, which is off here: set PHALANX_TLS=1"),
        "{host}"
    );
}

#[test]
fn tls_needs_a_secret() {
    let port = free_port();
    for met in meet(known("", true), known("", true), port, port) {
        let error = met.unwrap_err();
        assert!(error.contains("there is no secret") && error.contains("set PHALANX_SECRET"), "{error}");
    }
}

/// It ends the connection of each, with its own key, and passes on all that they say inside.
#[test]
fn a_man_in_the_middle_is_no_rank() {
    let (port, middle) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let visited = middle.local_addr().unwrap().port();
    scope(|scope| {
        scope.spawn(move || {
            let visitor = middle.accept().unwrap().0;
            let host = std::iter::repeat_with(|| TcpStream::connect(("127.0.0.1", port)));
            let host = host.inspect(|_| sleep(Duration::from_millis(5))).find_map(Result::ok).unwrap();
            let mut ends = [TlsStream::host(visitor).unwrap(), TlsStream::visitor(host).unwrap()];
            ends.iter().for_each(|end| end.socket.set_nonblocking(true).unwrap());
            while !ends.iter_mut().map(TlsStream::is_open).all(|open| open.unwrap()) {}
            let mut passed = [0, 0];
            'ended: loop {
                for (from, to) in [(0, 1), (1, 0)] {
                    let mut bytes = [0; 1024];
                    match ends[from].read(&mut bytes) {
                        Ok(read) if read > 0 && ends[to].write_all(&bytes[..read]).is_ok() => {
                            passed[from] += read;
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        _ => break 'ended,
                    }
                }
            }
            // A hello, and a challenge that the visitor does not believe.
            assert_eq!(passed, [64, 69]);
        });
        let [visitor, host] = meet(known("s", true), known("s", true), port, visited).map(Result::unwrap_err);
        assert!(visitor.contains("it is not of this run: another secret"), "{visitor}");
        assert!(
            host.contains("rank 1 of 2 did not come") && host.contains("no ranks of this run: 1"),
            "{host}"
        );
    });
}
