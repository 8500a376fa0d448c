//! Random programs with random faults: never a hang, never a wrong value, and the culprit is named.

use std::io::Write;
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, Comm, Reduction};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::{DType, Device, Tensor};

use crate::processes::LONG;
use crate::program::{Running, Step};
use crate::twin::draw;

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
                        .all_reduce(&mut zeros(987, device).map_err(text)?, Reduction::Prod)
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
                // What is wanted of a step takes long to find out for a large one; nobody else may be late.
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

fn zeros(count: usize, device: Device) -> phalanx_parallel::comm::Result<Tensor> {
    Ok(Tensor::zeros(&[count], DType::I64, device)?)
}

/// Each rank sends to the next.
fn ring(comm: &Comm, device: Device, seed: u64) -> phalanx_parallel::comm::Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let count = (seed % 50) as usize;
    let made =
        |rank: usize| Tensor::from_slice(&vec![draw(seed, rank as u64) as i64; count], &[count], device);
    let sent = comm.start(Call::send(made(rank)?, (rank + 1) % size));
    let mut came = zeros(count, device)?;
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
