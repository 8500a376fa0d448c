//! The store: ranks that meet again and again, beside strangers, processes of old epochs, and ranks that die meanwhile.

mod elastic;

use std::io::Write;
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, scope, sleep, spawn};
use std::time::{Duration, Instant};

use crate::handshake::{GREETING, Hello, Kind, Session, greet, greet_with};
use crate::introduction::Introduction;
use crate::tests::port::free_port;
use crate::{Credentials, Member, Met, Node, Store};

const LONG: Duration = Duration::from_secs(20);

fn known() -> Credentials {
    Credentials { secret: "secret".into(), job: "job".into(), tls: cfg!(feature = "tls") }
}

/// A store on a thread, until it is dropped.
struct Served {
    port: u16,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn at(port: u16, size: usize) -> Served {
        Served::of(port, size..=size, LONG)
    }

    fn of(port: u16, sizes: RangeInclusive<usize>, last_call: Duration) -> Served {
        let (mut store, stop) =
            (Store::bind("127.0.0.1", port, known(), sizes).unwrap(), Arc::new(AtomicBool::new(false)));
        store.last_call = last_call;
        let stopped = Arc::clone(&stop);
        Served { port, stop, thread: Some(spawn(move || store.serve(&stopped))) }
    }

    fn new(size: usize) -> Served {
        Served::at(free_port(), size)
    }

    fn member(&self) -> Member {
        Member::new("127.0.0.1".into(), self.port, known())
    }

    fn members(&self, size: usize) -> Vec<Member> {
        (0..size).map(|_| self.member()).collect()
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).unwrap()
    }

    /// A process that says this of itself, as the store has accepted it.
    fn visit(&self, (rank, size): (usize, usize), last: Option<u64>) -> Result<Session, String> {
        let hello = Hello { rank, size, port: 1 };
        let introduction = Introduction::Rank { last }.bytes();
        let session = greet_with(self.connect(), &hello, &introduction, &known(), Instant::now() + LONG);
        session.map(Option::unwrap)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Lets all members meet, as the ranks of their places.
fn meet(members: &mut [Member]) -> Vec<Met> {
    let size = members.len();
    scope(|scope| {
        let meet = |(rank, member): (usize, &'_ mut Member)| member.meet((rank, size), LONG).unwrap();
        let threads: Vec<_> =
            members.iter_mut().enumerate().map(|each| scope.spawn(move || meet(each))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn hear(session: &mut Session) -> (Kind, String) {
    let end = Instant::now() + LONG;
    loop {
        match session.receive(4096).unwrap() {
            Some((Kind::Waiting, _)) => {}
            Some((kind, content)) => return (kind, String::from_utf8(content).unwrap()),
            None => assert!(Instant::now() < end),
        }
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn ranks_meet_again_and_again_and_a_new_store_goes_on_counting() {
    let store = Served::new(3);
    let mut members = store.members(3);
    for epoch in 0..3 {
        for (rank, met) in meet(&mut members).iter().enumerate() {
            assert_eq!((met.epoch, met.rank, met.streams.iter().flatten().count()), (epoch, rank, 2));
        }
    }
    let port = store.port;
    drop(store);
    let _store = Served::at(port, 3);
    assert!(meet(&mut members).iter().all(|met| met.epoch == 3));
}

#[test]
fn a_rank_that_goes_while_the_ranks_connect_lets_the_others_come_again() {
    let store = Served::new(3);
    let mut dies = store.visit((1, 3), None).unwrap();
    scope(|scope| {
        let join = |rank| {
            let mut member = store.member();
            scope.spawn(move || member.meet((rank, 3), LONG))
        };
        let others = [join(0), join(2)];
        assert_eq!(hear(&mut dies).0, Kind::Table);
        drop(dies);
        let next = join(1);
        for met in others.into_iter().chain([next]) {
            let met = met.join().unwrap().unwrap();
            assert_eq!((met.epoch, met.streams.iter().flatten().count()), (1, 2));
        }
    });
}

#[test]
fn launchers_hear_of_a_rank_that_is_stopped_while_the_ranks_connect() {
    let store = Served::new(2);
    let mut members = store.members(2);
    meet(&mut members);
    let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 2));
    let mut stopped = store.visit((1, 2), Some(0)).unwrap();
    let (first, second) = members.split_at_mut(1);
    first[0] = std::mem::replace(&mut first[0], store.member()).with_patience(Duration::from_millis(300));
    scope(|scope| {
        let first = scope.spawn(|| first[0].meet((0, 2), LONG).unwrap());
        assert_eq!(hear(&mut stopped).0, Kind::Table);
        let (mut absent, end) = (None, Instant::now() + LONG);
        while absent.is_none() && Instant::now() < end {
            assert_eq!(node.over(), None);
            absent = node.absent();
        }
        let absent = absent.unwrap();
        assert!(absent.ranks == [1] && absent.waited >= Duration::from_millis(300), "{absent:?}");
        // It is killed, and another one comes in its place.
        drop(stopped);
        second[0] = store.member();
        assert_eq!(second[0].meet((1, 2), LONG).unwrap().epoch, 2);
        first.join().unwrap();
    });
}

#[test]
fn processes_of_old_epochs_and_doubles_are_refused() {
    let store = Served::new(2);
    let mut members = store.members(2);
    meet(&mut members);
    // A new process waits for the next epoch, and gives way to the one that has been this rank.
    let mut newcomer = store.visit((1, 2), None).unwrap();
    assert!(store.visit((1, 2), None).unwrap_err().contains("two processes say they are rank 1"));
    let (first, second) = members.split_at_mut(1);
    let met = scope(|scope| {
        let second = scope.spawn(|| second[0].meet((1, 2), LONG).unwrap());
        // With rank 0 and the new process all would be there.
        sleep(Duration::from_millis(300));
        [first[0].meet((0, 2), LONG).unwrap(), second.join().unwrap()]
    });
    assert!(met.iter().all(|met| met.epoch == 1));
    let (kind, why) = hear(&mut newcomer);
    assert!(kind == Kind::Refused && why.contains("two processes say they are rank 1"), "{why}");
    let why = store.visit((1, 2), Some(0)).unwrap_err();
    assert_eq!(
        why,
        "another process has been rank 1 since epoch 1, or none, and this one last was in epoch 0"
    );
    // A new process that comes after one that has been this rank does not take its place.
    let _waits = store.visit((1, 2), Some(1)).unwrap();
    assert!(store.visit((1, 2), None).unwrap_err().contains("two processes say they are rank 1"));
}

#[test]
fn what_is_no_rank_of_the_run_is_refused_with_the_reason() {
    let store = Served::new(2);
    assert!(store.visit((0, 3), None).unwrap_err().contains("got rank 0 of 3, the store is for 2 ranks"));
    assert!(store.visit((2, 2), None).unwrap_err().contains("got rank 2 of 2"));
    let hello = Hello { rank: 0, size: 2, port: 1 };
    let why = greet(store.connect(), &hello, &known(), Instant::now() + LONG).unwrap_err();
    assert!(why.contains("set PHALANX_STORE"), "{why}");
    let other = Credentials { job: "other".into(), ..known() };
    let why = greet(store.connect(), &hello, &other, Instant::now() + LONG).unwrap_err();
    assert!(why.contains("it is not of this run: another secret or job"), "{why}");
}

#[test]
fn a_launcher_outwaits_the_store_of_the_run_before() {
    let before = Served::new(2);
    let port = before.port;
    let node = |rank| Node::new(("127.0.0.1".into(), port), known(), (rank, 2));
    assert!(node(0).end("rank 0 failed for good"));
    while before.visit((0, 2), None).is_ok() {}
    sleep(Duration::from_millis(100));
    let mut next = node(1);
    for _ in 0..20 {
        assert_eq!(next.over(), None);
        sleep(Duration::from_millis(5));
    }
    drop(before);
    let (store, end) = (Served::at(port, 2), Instant::now() + LONG);
    while !next.end("of the next run") {
        assert!(Instant::now() < end);
    }
    while !store.visit((0, 2), None).is_err_and(|why| why.contains("of the next run")) {
        assert!(Instant::now() < end);
    }
}

/// One whose address leads to a stranger, in each meeting.
#[test]
fn a_rank_that_can_never_connect_with_another_gives_up() {
    let store = Served::new(2);
    let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hello = Hello { rank: 0, size: 2, port: stranger.local_addr().unwrap().port() };
    spawn(move || stranger.incoming().flatten().for_each(|mut to| drop(to.write_all(&[b'H'; 100]))));
    let mut member = store.member();
    let meets = spawn(move || member.meet((1, 2), LONG).unwrap_err().to_string());
    let begin = Instant::now();
    while !meets.is_finished() && begin.elapsed() < LONG {
        let introduction = Introduction::Rank { last: None }.bytes();
        let greeted = greet_with(store.connect(), &hello, &introduction, &known(), Instant::now() + LONG);
        let mut session = greeted.unwrap().unwrap();
        while !meets.is_finished() && !matches!(session.receive(4096), Ok(Some((Kind::Again, _)))) {
            sleep(Duration::from_millis(1));
        }
    }
    let why = meets.join().unwrap();
    assert!(why.contains("for rank 0: ") && why.ends_with("it has not connected in 10 meetings"), "{why}");
}

#[test]
fn without_a_secret_there_is_no_store() {
    let why = Store::bind("127.0.0.1", free_port(), Credentials::default(), 1..=2).unwrap_err().to_string();
    assert!(why.contains("a store needs a secret"), "{why}");
}

#[test]
fn strangers_at_the_store_delay_no_rank() {
    let store = Served::new(2);
    let mut idle: Vec<TcpStream> = (0..500).map(|_| store.connect()).collect();
    idle.iter_mut().step_by(2).for_each(|socket| drop(socket.write_all(b"p")));
    store.connect().write_all(&[b'G'; 4096]).unwrap();
    let mut endless = store.connect();
    endless.write_all(&[b"phalanx2".as_slice(), &[0; 56]].concat()).unwrap();
    endless.write_all(&[1, 0xff, 0xff, 0xff, 0xff]).unwrap();
    let begin = Instant::now();
    meet(&mut store.members(2));
    assert!(begin.elapsed() < GREETING, "{:?}", begin.elapsed());
}

#[test]
fn ranks_that_do_not_come_to_the_store_are_named() {
    let store = Served::new(3);
    let why = store.member().meet((1, 3), Duration::from_millis(1200)).unwrap_err().to_string();
    let place = format!("the store at 127.0.0.1:{}", store.port);
    assert_eq!(why, format!("ranks 0, 2 of 3 did not come to {place} within 1.2 s"));
    let port = free_port();
    let nowhere = Member::new("127.0.0.1".into(), port, known()).meet((1, 3), Duration::from_millis(200));
    let why = nowhere.unwrap_err().to_string();
    assert!(
        why.contains("rank 1: the store did not answer at 127.0.0.1:") && why.contains("within 0.2 s"),
        "{why}"
    );
}

#[test]
fn a_launcher_ends_the_run_for_all() {
    let store = Served::new(2);
    let node = |rank| Node::new(("127.0.0.1".into(), store.port), known(), (rank, 2));
    let (mut first, mut second) = (node(0), node(1));
    assert_eq!(second.over(), None);
    let mut member = store.member();
    let waits = spawn(move || member.meet((1, 2), LONG).unwrap_err().to_string());
    sleep(Duration::from_millis(200));
    assert!(first.end("rank 0 failed for good"));
    assert_eq!(waits.join().unwrap(), "rank 0 failed for good");
    assert!(store.visit((0, 2), None).unwrap_err().contains("rank 0 failed for good"));
    let end = Instant::now() + LONG;
    while second.over() != Some("rank 0 failed for good") {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_run_ends_when_all_ranks_have_ended_well() {
    let store = Served::new(2);
    let mut members = store.members(2);
    meet(&mut members);
    let (first, second) = members.split_at_mut(1);
    scope(|scope| {
        let waits = scope.spawn(|| first[0].end(LONG));
        sleep(Duration::from_millis(100));
        assert!(!waits.is_finished());
        assert!(second[0].end(LONG) && waits.join().unwrap());
    });
    let why = store.visit((1, 2), None).unwrap_err();
    assert_eq!(why, "the run has ended: all of its ranks have ended well");
}

/// By a failure that it notices alone, or with its process.
#[test]
fn a_rank_that_has_ended_well_is_needed_again_if_another_goes_before() {
    let store = Served::new(3);
    let mut members = store.members(3);
    for replaced in [false, true] {
        meet(&mut members);
        let (first, others) = members.split_at_mut(2);
        scope(|scope| {
            let done: Vec<_> = first.iter_mut().map(|member| scope.spawn(|| member.end(LONG))).collect();
            sleep(Duration::from_millis(50));
            match replaced {
                true => others[0] = store.member(),
                false => others[0].session = None,
            }
            assert!(done.into_iter().all(|done| !done.join().unwrap()));
        });
    }
    assert!(meet(&mut members).iter().all(|met| met.epoch == 2));
}

/// A meeting has a number of its own, by which ranks tell each other from those of another one.
#[test]
fn a_rank_of_another_meeting_is_a_stranger() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, ours) = (listener.local_addr().unwrap(), known().of_meeting("a"));
    let mut reception = crate::reception::Reception::new(listener, &ours, (0, 2), 1..2).unwrap();
    scope(|scope| {
        let come = |number: &'static str| {
            let (socket, hello) = (TcpStream::connect(address).unwrap(), Hello { rank: 1, size: 2, port: 1 });
            greet(socket, &hello, &known().of_meeting(number), Instant::now() + LONG)
        };
        let [old, new] = ["b", "a"].map(|number| scope.spawn(move || come(number)));
        let end = Instant::now() + LONG;
        while !(old.is_finished() && new.is_finished()) {
            reception.step().unwrap();
            assert!(Instant::now() < end);
        }
        assert!(old.join().unwrap().unwrap_err().contains("it is not of this run"));
        assert!(new.join().unwrap().unwrap().is_some());
    });
    assert!(reception.missing().is_empty());
}
