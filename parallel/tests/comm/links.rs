//! Links between ranks over TCP that a network reads, changes and cuts, in the clear and with TLS.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{self, Reduction};
use phalanx_parallel::launch::{Environment, Rank};
use phalanx_tensor::Tensor;

use crate::port::free_port;
use crate::processes::LONG;
#[cfg(feature = "tls")]
use crate::suite;
use crate::twin::draw;

/// With TLS only in a build that has it.
const WAYS: &[bool] = if cfg!(feature = "tls") { &[false, true] } else { &[false] };

/// What a network does to the first connection that it carries, when so many bytes have passed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    None,
    /// Ends the connection.
    Cut,
    /// Changes a bit of the next byte.
    #[cfg(feature = "tls")]
    Flip,
}

/// A network between rank 1 and rank 0.
struct Network {
    listener: TcpListener,
    /// Where rank 0 listens.
    port: u16,
    harm: Harm,
    /// The bytes before the harm, and the direction, of what rank 1 sends (0) or rank 0 does (1).
    at: (usize, usize),
    has_harmed: AtomicBool,
    /// All that passed in each direction.
    passed: [Mutex<Vec<u8>>; 2],
}

impl Network {
    fn new(port: u16, harm: Harm, at: (usize, usize)) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Network { listener, port, harm, at, has_harmed: AtomicBool::new(false), passed: Default::default() }
    }

    /// Carries connections until both ranks have ended.
    fn carry(&self, have_ended: &AtomicBool) {
        scope(|scope| {
            while !have_ended.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(1));
                let Ok((visitor, _)) = self.listener.accept() else { continue };
                let Ok(host) = TcpStream::connect(("127.0.0.1", self.port)) else { continue };
                for (direction, (from, to)) in [(&visitor, &host), (&host, &visitor)].into_iter().enumerate()
                {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    from.set_nonblocking(false).unwrap();
                    scope.spawn(move || self.carry_one_way(from, to, direction));
                }
            }
        });
    }

    fn carry_one_way(&self, mut from: TcpStream, mut to: TcpStream, direction: usize) {
        let mut bytes = [0; 4096];
        loop {
            let read = match from.read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(read) if read > 0 => read,
                _ => break,
            };
            let mut passed = self.passed[direction].lock().unwrap();
            let place = self.at.1.checked_sub(passed.len()).filter(|place| *place < read);
            passed.extend(&bytes[..read]);
            drop(passed);
            let place = place.filter(|_| self.at.0 == direction && self.harm != Harm::None);
            let place = place.filter(|_| !self.has_harmed.swap(true, Ordering::Relaxed));
            match (self.harm, place) {
                (Harm::Cut, Some(place)) => {
                    let _ = to.write_all(&bytes[..place]);
                    [&from, &to].into_iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
                    return;
                }
                (_, Some(place)) => bytes[place] ^= 1 << (self.at.1 % 8),
                _ => {}
            }
            if to.write_all(&bytes[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// What becomes of two ranks whose link goes through a network, and what has passed there.
fn over<T: Send>(
    tls: bool,
    harm: Harm,
    at: (usize, usize),
    f: impl Fn(Rank) -> Result<T, String> + Sync,
) -> ([Result<T, String>; 2], [Vec<u8>; 2]) {
    let (port, have_ended) = (free_port(), AtomicBool::new(false));
    let network = Network::new(port, harm, at);
    let through = network.listener.local_addr().unwrap().port();
    let join = |rank, port| {
        let place = Environment::new().local(rank, 2, port).secret("of both").tls(tls);
        let place = place.timeout(LONG).join_timeout(Duration::from_secs(3));
        place.run(&f).map_err(|error| error.to_string())
    };
    let join = &join;
    let outcomes = scope(|scope| {
        scope.spawn(|| network.carry(&have_ended));
        let ranks = [(0, port), (1, through)].map(|(rank, port)| scope.spawn(move || join(rank, port)));
        let outcomes = ranks.map(|rank| rank.join().unwrap());
        have_ended.store(true, Ordering::Relaxed);
        outcomes
    });
    (outcomes, network.passed.map(|passed| passed.into_inner().unwrap()))
}

/// A tensor of one rank.
fn known(rank: usize) -> Vec<f32> {
    (0..3000).map(|i| (i + 5000 * rank) as f32 + 0.1234).collect()
}

/// A broadcast and a message from each rank, and a sum. Returns all that the rank got.
fn program(rank: &Rank) -> comm::Result<Vec<f32>> {
    let (comm, me) = (rank.comm(), rank.rank());
    let own = Tensor::from_slice(&known(me), &[3000], rank.device())?;
    let mut all = vec![];
    for root in [0, 1] {
        let mut x = own.copy()?;
        comm.broadcast(&mut x, root)?;
        all.extend(x.to_vec::<f32>()?);
        match root == me {
            true => comm.send(&own, 1 - root)?,
            false => comm.recv(&mut x, root)?,
        }
        all.extend(x.to_vec::<f32>()?);
    }
    let mut sum = own.copy()?;
    comm.all_reduce(&mut sum, Reduction::Sum)?;
    all.extend(sum.to_vec::<f32>()?);
    Ok(all)
}

/// What each rank gets of the program.
fn wanted() -> Vec<f32> {
    let [a, b] = [known(0), known(1)];
    let sum = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    [a.clone(), a, b.clone(), b, sum].concat()
}

fn run(rank: Rank) -> Result<Vec<f32>, String> {
    program(&rank).map_err(|error| error.to_string())
}

/// Whether bytes have passed as they are.
fn has_passed(passed: &[u8], bytes: &[f32]) -> bool {
    let bytes: Vec<u8> = bytes.iter().flat_map(|x| x.to_le_bytes()).collect();
    passed.windows(bytes.len()).any(|window| window == bytes)
}

#[test]
fn a_network_reads_what_ranks_send_unless_they_have_tls() {
    for &tls in WAYS {
        let (outcomes, passed) = over(tls, Harm::None, (0, 0), run);
        assert_eq!(outcomes, [Ok(wanted()), Ok(wanted())]);
        for rank in [0, 1] {
            for values in [&known(rank)[..8], &known(rank)[1000..1008]] {
                assert_eq!(has_passed(&passed[1 - rank], values), !tls);
            }
        }
    }
}

/// The outcomes of a network that does harm at some place of a run's bytes. No rank may get wrong values, wait forever or name no rank.
fn harmed(tls: bool, harm: Harm, at: (usize, usize)) -> [Result<Vec<f32>, String>; 2] {
    let begin = Instant::now();
    let (outcomes, _) = over(tls, harm, at, run);
    assert!(begin.elapsed() < LONG + LONG / 2, "{harm:?} at {at:?} took {:?}", begin.elapsed());
    for (rank, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Ok(values) => assert!(*values == wanted(), "{harm:?} at {at:?}: wrong values on rank {rank}"),
            Err(error) => {
                assert!(error.contains("rank 0") || error.contains("rank 1"), "{harm:?} at {at:?}: {error}")
            }
        }
    }
    outcomes
}

/// The bytes of a whole run in each direction.
fn lengths(tls: bool) -> [usize; 2] {
    over(tls, Harm::None, (0, 0), run).1.map(|passed| passed.len())
}

#[test]
fn a_link_that_is_cut_at_any_byte_ends_both_ranks_with_an_error_that_names_one() {
    for &tls in WAYS {
        let lengths = lengths(tls);
        let one = |seed: u64| {
            let direction = (draw(seed, 0) % 2) as usize;
            // Half of them among the first bytes, where ranks meet.
            let of = if draw(seed, 1).is_multiple_of(2) { 1200 } else { lengths[direction] };
            let _ = harmed(tls, Harm::Cut, (direction, (draw(seed, 2) % of as u64) as usize));
        };
        scope(|scope| {
            (0..4).for_each(|part| drop(scope.spawn(move || (0..4).for_each(|i| one(4 * part + i)))))
        });
        // The run has begun, and cannot go on.
        let cut = harmed(tls, Harm::Cut, (0, lengths[0] / 2)).map(Result::unwrap_err);
        assert!(cut[0].contains("rank 1 is lost: its connection ") && cut[1].contains("rank 0"), "{cut:?}");
        assert!(!tls || cut[0].contains("it was cut, without TLS's end"), "{cut:?}");
    }
}

#[test]
#[cfg(feature = "tls")]
fn a_bit_that_is_changed_on_the_way_ends_the_run_with_an_error_that_names_the_link() {
    let lengths = lengths(true);
    for direction in [0, 1] {
        let found = [3, 4, 5].map(|part| {
            let outcomes = harmed(true, Harm::Flip, (direction, lengths[direction] * part / 6));
            let other = ["rank 1", "rank 0"][direction];
            let error = outcomes[direction].clone().unwrap_err();
            error.contains(&format!("{other} is lost: its connection broke: bytes were changed on the way"))
        });
        // Where the length of a record is changed, bytes are waited for that do not come.
        assert!(found.into_iter().filter(|found| *found).count() >= 2, "{found:?}");
    }
    // Where the ranks meet.
    for seed in 0..6 {
        let (direction, at) = ((draw(seed, 3) % 2) as usize, (draw(seed, 4) % 1200) as usize);
        let _ = harmed(true, Harm::Flip, (direction, at));
    }
}

#[test]
#[cfg(feature = "tls")]
fn ranks_with_tls_pass_the_suite() {
    let (port, size) = (free_port(), 3);
    scope(|scope| {
        for rank in 0..size {
            scope.spawn(move || {
                let place =
                    Environment::new().local(rank, size, port).secret("of all").tls(true).timeout(LONG);
                place.run(|rank| suite::all(rank.comm(), rank.device())).unwrap();
            });
        }
    });
}
