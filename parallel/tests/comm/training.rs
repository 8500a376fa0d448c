//! Random faults in the middle of training over `Ddp` or `Zero`, in forward, backward or the optimizer: every other rank ends in
//! time, with an error that names the culprit and the call in which it was missed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_nn::autograd::{self, Var};
use phalanx_nn::models::{Decoder, GptConfig, ModelConfig};
use phalanx_nn::{AdamW, Group, Parameters, Rule, Scope};
use phalanx_parallel::Result;
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_tensor::DType;

use crate::faults::{first_seed, patiently, stall, trials, trials_over_wires};
use crate::processes::run;
use crate::twin::draw;

/// Tokens of a sequence, and how many kinds there are.
const LENGTH: usize = 4;
const KINDS: usize = 11;

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
    /// The process dies.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Forward,
    Backward,
    Optimizer,
}

/// A run of training in which one rank goes wrong.
#[derive(Clone, Debug)]
pub struct Trial {
    seed: u64,
    pub size: usize,
    pub fault: Fault,
    rank: usize,
    steps: u64,
    /// Where.
    step: u64,
    phase: Phase,
    /// What is spread over the ranks: ZeRO's stage, or nothing.
    zero: u8,
}

impl Trial {
    /// Where ranks are processes they may be killed, too.
    pub fn random(seed: u64, killable: bool) -> Trial {
        let pick = |n: u64, of: u64| draw(seed ^ 0x7472_6169, n) % of;
        let faults = [Fault::Panic, Fault::Error, Fault::Desert, Fault::Stall, Fault::Kill];
        let fault = match pick(0, 11) as usize {
            0 => Fault::None,
            n if killable => faults[(n - 1) / 2],
            n => faults[(n - 1) % 4],
        };
        let phase = [Phase::Forward, Phase::Backward, Phase::Optimizer][pick(1, 3) as usize];
        let (size, steps) = (2 + pick(2, 3) as usize, 1 + pick(3, 3));
        let (rank, step) = (pick(4, size as u64) as usize, pick(5, steps));
        Trial { seed, size, fault, rank, steps, step, phase, zero: pick(6, 4) as u8 }
    }

    /// One rank's part.
    pub fn run(&self, rank: &Rank) -> Result<(), String> {
        match self.train(rank) {
            Err(_) if self.fault == Fault::Desert && rank.rank() == self.rank => Ok(()),
            outcome => outcome.map_err(|e| e.to_string()),
        }
    }

    fn train(&self, rank: &Rank) -> Result<()> {
        let config = GptConfig::new(KINDS, LENGTH, 1, 1, 8);
        let model: Decoder = ModelConfig::Gpt(config).init(&Scope::new(1, DType::F32, rank.device()))?;
        let buckets = DdpConfig { first_bucket_bytes: 1 << 8, bucket_bytes: 1 << 10, ..DdpConfig::default() };
        let comm = rank.comm().clone();
        let share: Box<dyn DataParallel> = match ZeroStage::try_from(self.zero) {
            Ok(stage) => Box::new(Zero::new(&model, comm.clone(), ZeroConfig::new(stage))?),
            Err(_) => Box::new(Ddp::new(&model, comm.clone(), buckets)?),
        };
        let mut optimizer = AdamW::default().init(vec![Group::new(share.parameters(), 1e-3)])?;
        let (due, trial, parameters) = (Arc::new(AtomicBool::new(false)), self.clone(), model.parameters());
        let in_backward = Arc::clone(&due);
        let _hook = parameters[parameters.len() / 2].leaves()[0].on_accumulate(move |_| {
            if in_backward.swap(false, Ordering::Relaxed) { trial.strike(&comm) } else { Ok(()) }
        });
        for step in 0..self.steps {
            let strikes = |phase| !self.is_innocent(rank.rank()) && (self.step, self.phase) == (step, phase);
            let tokens = |salt| {
                let tokens: Vec<i64> =
                    (0..LENGTH as u64).map(|i| (draw(salt, i) % KINDS as u64) as i64).collect();
                Var::from_slice(&tokens, &[1, LENGTH], rank.device())
            };
            let x = model.forward(&tokens(step)?)?;
            if strikes(Phase::Forward) {
                self.strike(rank.comm())?;
            }
            let loss = model.loss(&x, &tokens(step + 1)?, 1.0 / (LENGTH * self.size) as f64)?;
            due.store(strikes(Phase::Backward), Ordering::Relaxed);
            share.begin()?;
            loss.backward()?;
            share.finish()?;
            share.grad_norm()?;
            if strikes(Phase::Optimizer) {
                self.strike(rank.comm())?;
            }
            optimizer.step()?;
            share.updated()?;
            share.zero_grad()?;
        }
        Ok(rank.comm().barrier()?)
    }

    fn strike(&self, comm: &Comm) -> autograd::Result<()> {
        let text = format!("a fault of trial {}", self.seed);
        match self.fault {
            Fault::Panic => panic!("{text}"),
            Fault::Stall => stall(comm),
            Fault::Kill => {
                let me = std::process::id().to_string();
                std::process::Command::new("kill").args(["-9", &me]).status().unwrap();
            }
            _ => return Err(autograd::Error::Custom(text)),
        }
        Ok(())
    }

    /// Whether a rank is to end only because of another.
    pub fn is_innocent(&self, rank: usize) -> bool {
        self.fault == Fault::None || rank != self.rank
    }

    /// Whether a launcher's output says which process has died.
    #[cfg(feature = "mpi")]
    pub fn is_named_by_launcher(&self, output: &str) -> bool {
        self.fault == Fault::Kill
            && output.contains("signal 9")
            && output.contains(&format!("rank {}", self.rank))
    }

    /// Whether its ranks need a short timeout.
    pub fn stalls(&self) -> bool {
        self.fault == Fault::Stall
    }

    /// Whether every rank has ended as it should, by what each of them says; if not, why.
    pub fn judge(&self, said: &[(usize, Result<(), String>)]) -> Result<(), String> {
        let named = [format!("rank {}", self.rank), format!("ranks [{}]", self.rank)];
        let named = |why: &str| named.iter().any(|name| why.contains(name));
        for (rank, outcome) in said {
            let fine = match (outcome, self.fault) {
                (Ok(()), fault) => fault == Fault::None || (*rank == self.rank && fault != Fault::Stall),
                (Err(_), Fault::None) => false,
                (Err(_), _) if *rank == self.rank => true,
                (Err(why), fault) => {
                    let cause = match fault {
                        // Backward turns a panic into an error of the operation.
                        Fault::Panic if self.phase == Phase::Backward => {
                            why.contains("leaf: panicked in backward")
                        }
                        Fault::Panic => why.contains("panicked at ") && why.contains("training.rs:"),
                        Fault::Error => why.contains(&format!("a fault of trial {}", self.seed)),
                        _ => true,
                    };
                    let place = why.contains("(call ") && why.contains(" of group [");
                    named(why) && (place || why.contains("the beginning of a backward pass")) && cause
                }
            };
            if !fine {
                return Err(format!("{self:?}: rank {rank}: {outcome:?}"));
            }
        }
        Ok(())
    }
}

/// Runs the trial by `run`, which starts its ranks with this timeout; whether all have ended as they should.
fn judged(
    trial: &Trial,
    run: impl FnOnce(&(dyn Fn(Rank) -> Result<(), String> + Sync)) -> bool,
) -> Result<(), String> {
    let (said, start) = (Mutex::new(vec![]), Instant::now());
    let ended_well = run(&|rank| {
        let outcome = trial.run(&rank);
        said.lock().unwrap().push((rank.rank(), outcome.clone()));
        outcome
    });
    let said = said.into_inner().unwrap();
    // A rank that panics says nothing itself.
    let silent = trial.fault == Fault::Panic && trial.phase != Phase::Backward;
    assert!(said.len() + usize::from(silent) == trial.size, "{trial:?}: {said:?}");
    assert!(start.elapsed() < Duration::from_secs(30), "{trial:?} took {:?}", start.elapsed());
    assert_eq!(ended_well, trial.fault == Fault::None, "{trial:?}: {said:?}");
    trial.judge(&said)
}

#[test]
fn random_faults_in_training_over_threads() {
    for seed in first_seed()..first_seed() + trials(60) {
        let trial = Trial::random(seed, false);
        patiently(trial.stalls(), Duration::from_millis(50), |timeout| {
            judged(&trial, |f| Threads::new(trial.size).timeout(timeout).run(f).is_ok())
        });
    }
}

#[test]
fn random_faults_in_training_over_tcp() {
    for seed in first_seed()..first_seed() + trials_over_wires(10) {
        let trial = Trial::random(seed, false);
        patiently(trial.stalls(), Duration::from_secs(1), |timeout| {
            judged(&trial, |f| run(trial.size, timeout, f).iter().all(Result::is_ok))
        });
    }
}

#[test]
fn the_judge_of_training_is_not_blind() {
    let blind = |fault, rank, outcome: Result<(), &str>| {
        let trial = Trial { fault, rank: 1, phase: Phase::Forward, ..Trial::random(1, false) };
        trial.judge(&[(rank, outcome.map_err(String::from))]).is_ok()
    };
    assert!(!blind(Fault::None, 0, Err("barrier (call 1 of group [0, 1]): ranks [1] did not arrive")));
    assert!(!blind(Fault::Stall, 0, Ok(())) && !blind(Fault::Stall, 1, Ok(())));
    assert!(!blind(Fault::Desert, 0, Err("barrier (call 1 of group [0, 1]): rank 0 has ended")));
    assert!(!blind(Fault::Desert, 0, Err("rank 1 has ended")));
    assert!(!blind(Fault::Panic, 0, Err("barrier (call 1 of group [0, 1]): rank 1 failed: panicked")));
    assert!(blind(Fault::Desert, 0, Err("barrier (call 1 of group [0, 1]): rank 1 has ended")));
}
