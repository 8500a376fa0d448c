//! Faults of one rank: all ranks end, with an error that names the rank and the call. First single faults, then random ones in
//! random programs: no run may hang, return a wrong value or blame another rank.

use std::io::Write;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, Comm, Error, Reduction};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::{DType, Device, Tensor};

use crate::processes::LONG;
use crate::suite::{Running, Step};
use crate::twin::draw;

type Result<T, E = Error> = std::result::Result<T, E>;

fn zeros(rank: &Rank, count: usize, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::zeros(&[count], dtype, rank.device())?)
}

/// What the launcher says, and what each rank heard.
fn run(ranks: usize, timeout_ms: u64, f: impl Fn(&Rank) -> Result<()> + Sync) -> (String, Vec<String>) {
    let (heard, start) = (Mutex::new(vec![String::new(); ranks]), Instant::now());
    let outcome = Threads::new(ranks).timeout(Duration::from_millis(timeout_ms)).run(|rank| {
        let outcome = f(&rank);
        heard.lock().unwrap()[rank.rank()] = outcome.as_ref().map_or_else(Error::to_string, |()| "ok".into());
        outcome
    });
    assert!(start.elapsed() < Duration::from_secs(20), "took {:?}", start.elapsed());
    (outcome.unwrap_err().to_string(), heard.into_inner().unwrap())
}

#[test]
fn a_mismatch_is_an_error_on_every_rank_that_names_both_sides() {
    type Odd = fn(&Rank) -> Result<()>;
    let sum = |rank: &Rank, n, dtype| rank.comm().all_reduce(&mut zeros(rank, n, dtype)?, Reduction::Sum);
    let cases: [(Odd, &str); 4] = [
        (|r| r.comm().all_reduce(&mut zeros(r, 5, DType::F32)?, Reduction::Max), "all_reduce(max) of 5 f32"),
        (|r| r.comm().all_reduce(&mut zeros(r, 5, DType::F64)?, Reduction::Sum), "all_reduce(sum) of 5 f64"),
        (|r| r.comm().all_reduce(&mut zeros(r, 6, DType::F32)?, Reduction::Sum), "all_reduce(sum) of 6 f32"),
        (|r| r.comm().barrier(), "barrier"),
    ];
    for (odd, named) in cases {
        let (_, heard) = run(3, 5000, |rank| {
            rank.comm().barrier()?;
            if rank.rank() == 1 { odd(rank) } else { sum(rank, 5, DType::F32) }
        });
        for text in heard {
            assert!(text.contains(&format!("rank 1 {named} (call 1")), "{text}");
            assert!(text.contains("rank 0 all_reduce(sum) of 5 f32 (call 1"), "{text}");
        }
    }
}

#[test]
fn messages_that_do_not_fit_name_both_sides() {
    let (_, heard) = run(2, 5000, |rank| match rank.rank() {
        0 => rank.comm().send(&zeros(rank, 3, DType::F32)?, 1),
        _ => rank.comm().recv(&mut zeros(rank, 4, DType::F32)?, 0),
    });
    for text in heard {
        assert!(text.contains("rank 0 send of 3 f32") && text.contains("rank 1 recv of 4 f32"), "{text}");
    }
}

#[test]
fn a_rank_that_does_not_arrive_is_named() {
    let there = Barrier::new(2);
    let (said, heard) = run(3, 500, |rank| {
        match rank.rank() {
            2 => stall(rank.comm()),
            _ => drop(there.wait()),
        }
        rank.comm().barrier()
    });
    assert!(
        said.contains("barrier (call 0 of group [0, 1, 2]): ranks [2] did not arrive within 500 ms"),
        "{said}"
    );
    assert!(heard.iter().all(|text| text.contains("[2] did not arrive")), "{heard:?}");
}

#[test]
fn who_only_waits_for_the_late_one_is_not_blamed() {
    let there = Barrier::new(2);
    let (said, _) = run(3, 500, |rank| {
        let pair = |a, b| rank.comm().group(&[a, b]);
        match rank.rank() {
            // Waits longest, but for a rank that itself waits.
            0 => {
                let pending = pair(0, 1)?.start(Call::barrier());
                there.wait();
                pending.wait()
            }
            1 => {
                there.wait();
                pair(1, 2)?.barrier()?;
                pair(0, 1)?.barrier()
            }
            _ => {
                stall(rank.comm());
                pair(1, 2)?.barrier()
            }
        }
    });
    assert!(said.contains("ranks [2] did not arrive"), "{said}");
}

#[test]
fn a_circle_of_waits_ends() {
    let (said, _) = run(2, 100, |rank| {
        let (me, other) = (rank.rank(), 1 - rank.rank());
        rank.comm().send(&zeros(rank, 1, DType::F32)?, other)?;
        rank.comm().recv(&mut zeros(rank, me, DType::F32)?, other)
    });
    assert!(said.contains("did not arrive within 100 ms") && said.contains("send of 1 f32"), "{said}");
}

#[test]
fn a_rank_that_ends_early_is_named_at_once() {
    let (said, heard) = run(3, 60_000, |rank| if rank.rank() == 1 { Ok(()) } else { rank.comm().barrier() });
    assert!(
        said.contains("barrier (call 0 of group [0, 1, 2]): rank 1 has ended without arriving"),
        "{said}"
    );
    assert!(heard[0].contains("rank 1") && heard[2].contains("rank 1"), "{heard:?}");
}

#[test]
fn an_error_or_panic_reaches_all_with_its_cause_and_their_place() {
    let cause = |panic: bool| {
        run(3, 60_000, move |rank| {
            let pending = rank.comm().start(Call::all_reduce(zeros(rank, 2, DType::F32)?, Reduction::Sum));
            if rank.rank() == 2 {
                pending.wait()?;
                assert!(!panic, "the layer is broken");
                zeros(rank, 1, DType::F32)?.item::<f64>()?;
            }
            rank.comm().barrier()
        })
    };
    let (said, heard) = cause(true);
    assert!(said.starts_with("rank 2 failed: panicked at ") && said.contains("faults.rs:"), "{said}");
    assert!(said.contains("the layer is broken"), "{said}");
    for text in &heard[..2] {
        assert!(text.starts_with("barrier (call 1 of group [0, 1, 2]): rank 2 failed"), "{text}");
        assert!(text.contains("the layer is broken"), "{text}");
    }
    let (said, _) = cause(false);
    assert!(said.contains("rank 2 failed: item: ") || said.contains("rank 2 failed: to_vec: "), "{said}");
}

#[test]
fn a_storage_in_use_is_an_error_of_its_rank() {
    let (said, _) = run(2, 5000, |rank| {
        let x = zeros(rank, 2, DType::F32)?;
        // Only this rank's thread could release it, which waits in the collective.
        let _guard = if rank.rank() == 1 { Some(x.read::<f32>("test")?) } else { None };
        rank.comm().all_reduce(&mut x.clone(), Reduction::Sum)
    });
    assert!(said.contains("rank 1 failed: all_reduce: the tensor's storage is in use"), "{said}");
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    Panic,
    Error,
    /// Ends early, as if all were well.
    Desert,
    /// Comes too late.
    Stall,
    /// Calls something else.
    Differ,
}

/// A random program of `size` ranks.
#[derive(Debug)]
pub struct Trial {
    pub seed: u64,
    pub size: usize,
    pub steps: usize,
    pub fault: Fault,
    /// Where and on which rank.
    pub at: usize,
    pub rank: usize,
}

impl Trial {
    pub fn random(seed: u64) -> Trial {
        let pick = |n: u64, of: usize| (draw(seed, n) % of as u64) as usize;
        let (size, steps) = (1 + pick(0, 4), 1 + pick(1, 12));
        let faults = [Fault::Panic, Fault::Error, Fault::Desert, Fault::Stall, Fault::Differ];
        let fault = match pick(2, 8) {
            0..3 => Fault::None,
            n if size > 1 => faults[n - 3],
            n => faults[n % 2],
        };
        Trial { seed, size, steps, fault, at: pick(3, steps), rank: pick(4, size) }
    }

    /// One rank's part.
    pub fn run(&self, comm: &Comm, device: Device) -> Result<(), String> {
        let text = |e: phalanx_parallel::comm::Error| e.to_string();
        let (rank, size) = (comm.rank(), comm.size());
        let parity: Vec<usize> = (0..size).filter(|r| r % 2 == rank % 2).collect();
        let parity = comm.group(&parity).map_err(text)?;
        let mut running: Vec<Running> = vec![];
        for i in 0..self.steps {
            let seed = draw(self.seed, 100 + i as u64);
            if self.fault != Fault::None && (i, rank) == (self.at, self.rank) {
                match self.fault {
                    Fault::Panic => panic!("a fault of trial {}", self.seed),
                    Fault::Error => return Err(format!("a fault of trial {}", self.seed)),
                    Fault::Desert => return Ok(()),
                    Fault::Stall => stall(comm),
                    // What no other step is.
                    _ => comm
                        .all_reduce(&mut zeros_on(987, device).map_err(text)?, Reduction::Prod)
                        .map_err(text)?,
                }
            }
            if seed.is_multiple_of(5) && i != self.at {
                ring(comm, device, seed).map_err(text)?;
                continue;
            }
            // Culprits of the other faults are only known for certain in the group of all.
            let group = if seed.is_multiple_of(3) && i != self.at { &parity } else { comm };
            let mut step = Step::random(seed, group.size());
            if self.fault == Fault::Stall {
                // The wanted result of a large step takes long to compute; no other rank may be late.
                step.count = step.count.min(100);
            }
            running.push(step.start(group, device));
            if seed.is_multiple_of(2) || running.len() > 3 {
                running.drain(..).try_for_each(Running::finish)?;
            }
        }
        running.into_iter().try_for_each(Running::finish)?;
        comm.barrier().map_err(text)
    }

    /// Whether the run's end is as it should be; if not, why.
    pub fn judge(&self, outcome: Result<(), String>) -> Result<(), String> {
        let fine = match (&outcome, self.fault) {
            (outcome, Fault::None) => outcome.is_ok(),
            (Ok(()), _) => false,
            (Err(why), _) => {
                let named = [format!("rank {}", self.rank), format!("ranks [{}]", self.rank)];
                named.iter().any(|name| why.contains(name)) && !why.contains("WRONG")
            }
        };
        if fine { Ok(()) } else { Err(format!("{self:?}: {outcome:?}")) }
    }
}

/// Comes when the others have given up.
pub fn stall(comm: &Comm) {
    let begin = Instant::now();
    while comm.failure().is_none() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A trial with a short timeout if a rank `stalls` in it. A machine that is busy with something else makes ranks late
/// that are not meant to be: what goes wrong with a short timeout has to go wrong with longer ones too.
pub fn patiently(stalls: bool, short: Duration, trial: impl Fn(Duration) -> Result<(), String>) {
    if !stalls {
        return trial(LONG).unwrap();
    }
    for timeout in [short, short * 4] {
        let Err(why) = trial(timeout) else { return };
        // Written directly: the test harness shows nothing that a test prints and passes.
        let _ = writeln!(std::io::stderr(), "repeated with a longer timeout than {timeout:?}: {why}");
    }
    trial(short * 16).unwrap();
}

fn zeros_on(count: usize, device: Device) -> phalanx_parallel::comm::Result<Tensor> {
    Ok(Tensor::zeros(&[count], DType::I64, device)?)
}

/// Each rank sends to the next.
fn ring(comm: &Comm, device: Device, seed: u64) -> phalanx_parallel::comm::Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let count = (seed % 50) as usize;
    let made =
        |rank: usize| Tensor::from_slice(&vec![draw(seed, rank as u64) as i64; count], &[count], device);
    let sent = comm.start(Call::send(made(rank)?, (rank + 1) % size));
    let mut came = zeros_on(count, device)?;
    let from = (rank + size - 1) % size;
    comm.recv(&mut came, from)?;
    assert_eq!(came.to_vec::<i64>()?, made(from)?.to_vec::<i64>()?, "WRONG message");
    sent.wait()
}

/// `PHALANX_FUZZ_TRIALS`, or so many.
pub fn trials(default: u64) -> u64 {
    std::env::var("PHALANX_FUZZ_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// A tenth of `PHALANX_FUZZ_TRIALS`, or so many: processes take long to start, and timeouts over wires are longer.
pub fn trials_over_wires(default: u64) -> u64 {
    trials(default * 10).div_ceil(10)
}

/// `PHALANX_FUZZ_SEED`, or 0.
pub fn first_seed() -> u64 {
    std::env::var("PHALANX_FUZZ_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[test]
fn random_programs_over_threads() {
    let first = first_seed();
    for seed in first..first + trials(60) {
        let trial = Trial::random(seed);
        patiently(trial.fault == Fault::Stall, Duration::from_millis(50), |timeout| {
            let start = Instant::now();
            let run = |rank: Rank| trial.run(rank.comm(), rank.device());
            let outcome = Threads::new(trial.size).timeout(timeout).run(run);
            assert!(start.elapsed() < Duration::from_secs(15), "{trial:?} took {:?}", start.elapsed());
            trial.judge(outcome.map(drop).map_err(|e| e.to_string()))
        });
    }
}

#[test]
fn the_judge_is_not_blind() {
    let trial = Trial { size: 2, rank: 1, fault: Fault::None, ..Trial::random(1) };
    assert!(trial.judge(Err("WRONG".into())).is_err());
    let trial = Trial { fault: Fault::Stall, ..trial };
    assert!(trial.judge(Ok(())).is_err());
    assert!(trial.judge(Err("ranks [0] did not arrive".into())).is_err());
}
