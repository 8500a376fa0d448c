//! One rank goes wrong somewhere in a step over all axes: all ranks end soon, with an error that names it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_nn::autograd::{self, Leaf, Var};
use phalanx_nn::models::{Family, RecomputeMode};
use phalanx_nn::{Batch, Parameters};
use phalanx_parallel::comm::{self, Call, Comm, Communicator, Pending, Traffic};
use phalanx_parallel::hybrid::{self, Layout};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::pipeline::ranks::Spec;
use phalanx_parallel::pipeline::schedule::NAMES;
use phalanx_parallel::{Error, Result};

use crate::case::Draws;
use crate::case::{Case, gpt, llama, mixture};
use crate::run::{Run, Update, context};

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Error,
    Panic,
    /// Ends as if all were well, and says nothing.
    Vanish,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// In some forward pass of a stage, a recomputed one perhaps.
    Forward,
    /// When some parameter gets a gradient of some micro-batch.
    Backward,
    /// Between the norm and the update.
    Optimizer,
    /// Between the update and what ranks tell each other of it.
    Updated,
}

/// Two steps, in one of which a rank goes wrong.
#[derive(Clone, Debug)]
struct Trial {
    seed: u64,
    case: Case,
    how: How,
    phase: Phase,
    rank: usize,
    step: u64,
    /// How often it goes well in that phase before.
    after: usize,
    /// A number of a parameter.
    parameter: usize,
}

impl Trial {
    fn random(seed: u64) -> Trial {
        let mut draws = Draws(seed);
        let mut pick = |n: usize| draws.below(n);
        let (dp, tp, pp) = [(2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 3, 2), (2, 1, 3)][pick(6)];
        let layout = Layout {
            dp,
            tp,
            pp,
            schedule: NAMES[pick(NAMES.len())].into(),
            micro_batches: 1 + pick(3),
            recompute: [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always][pick(3)],
            sequence_parallel: pick(2) == 1,
            ..Layout::default()
        };
        let model = if pick(2) == 0 { gpt(2, 6) } else { llama(3, 6, 2) };
        let micro_batches = layout.micro_batches;
        let case = Case { zero: pick(4) as u8, ..Case::new(model, layout) };
        Trial {
            seed,
            how: [How::Error, How::Panic, How::Vanish][pick(3)],
            phase: [Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Updated][pick(4)],
            rank: pick(case.ranks()),
            step: pick(2) as u64,
            after: pick(micro_batches),
            parameter: pick(1000),
            case,
        }
    }

    /// One rank's steps.
    fn run(&self, rank: &Rank) -> Result<()> {
        let gone = Arc::new(AtomicBool::new(false));
        let quiet: Comm = Arc::new(Quiet { comm: rank.comm().clone(), gone: Arc::clone(&gone) });
        let mut run = Run::new(&self.case, &quiet, rank.device(), Update::AdamW)?;
        let fault = (rank.rank() == self.rank).then(|| Fault::new(self.clone(), &run, gone));
        let _hooks = fault.as_ref().map(|fault| fault.lay_in_wait(&mut run));
        for step in 0..2 {
            let _context = context(step);
            let here = |phase| fault.iter().try_for_each(|fault| fault.pass(phase));
            fault.iter().for_each(|fault| fault.due.store(step == self.step, Ordering::Relaxed));
            run.pass(step)?;
            run.share.grad_norm()?;
            here(Phase::Optimizer)?;
            run.optimizer.step()?;
            here(Phase::Updated)?;
            run.share.updated()?;
        }
        Ok(rank.comm().barrier()?)
    }

    /// Panics unless all ranks have ended soon, with an error that names the rank at fault.
    fn judge(&self) {
        let (said, begin) = (Mutex::new(vec![String::new(); self.case.ranks()]), Instant::now());
        let outcome = Threads::new(self.case.ranks()).timeout(Duration::from_secs(60)).run(|rank| {
            let outcome = self.run(&rank);
            said.lock().unwrap()[rank.rank()] =
                outcome.as_ref().map_or_else(Error::to_string, |()| "ok".into());
            match outcome {
                Err(_) if self.how == How::Vanish && rank.rank() == self.rank => Ok(()),
                outcome => outcome,
            }
        });
        assert!(begin.elapsed() < Duration::from_secs(30), "{self:?} took {:?}", begin.elapsed());
        let launcher = outcome.err().unwrap_or_else(|| panic!("{self:?}: all is well")).to_string();
        let named = format!("rank {}", self.rank);
        let cause = match self.how {
            How::Error => "a fault of trial",
            How::Panic => "panicked",
            How::Vanish => "has ended without arriving",
        };
        let said = said.into_inner().unwrap();
        let others = said.iter().enumerate().filter(|(rank, _)| *rank != self.rank).map(|(_, said)| said);
        for said in others.chain([&launcher]) {
            assert!(said.contains(&named) && said.contains(cause), "{self:?}: {said}");
        }
    }
}

/// What goes wrong on the one rank.
struct Fault {
    trial: Trial,
    /// Whether this is the step.
    due: AtomicBool,
    left: AtomicUsize,
    gone: Arc<AtomicBool>,
}

impl Fault {
    fn new(mut trial: Trial, run: &Run, gone: Arc<AtomicBool>) -> Arc<Fault> {
        // Stages without blocks have none.
        if trial.phase == Phase::Backward && run.model.parameters().is_empty() {
            trial.phase = Phase::Forward;
        }
        // Only these come several times a step.
        let repeats = matches!(trial.phase, Phase::Forward | Phase::Backward);
        let left = AtomicUsize::new(if repeats { trial.after } else { 0 });
        Arc::new(Fault { due: AtomicBool::new(false), left, gone, trial })
    }

    fn lay_in_wait(self: &Arc<Fault>, run: &mut Run) -> Vec<autograd::HookHandle> {
        run.model = Arc::new(Faulty { part: run.model.clone(), fault: Arc::clone(self) });
        let parameters = run.model.parameters();
        let hook = |leaf: &Leaf| {
            let fault = Arc::clone(self);
            leaf.on_accumulate(move |_| fault.pass(Phase::Backward))
        };
        let parameter = parameters.get(self.trial.parameter % parameters.len().max(1));
        parameter.iter().flat_map(|p| p.leaves()).map(hook).collect()
    }

    /// This rank comes to a place where it may go wrong.
    fn pass(&self, phase: Phase) -> autograd::Result<()> {
        let here = self.trial.phase == phase && self.due.load(Ordering::Relaxed);
        if !here || self.left.fetch_sub(1, Ordering::Relaxed) != 0 {
            return Ok(());
        }
        let text = format!("a fault of trial {}", self.trial.seed);
        assert!(self.trial.how != How::Panic, "{text}");
        self.gone.store(self.trial.how == How::Vanish, Ordering::Relaxed);
        Err(autograd::Error::Custom(text))
    }
}

/// Stages that go wrong in a forward pass.
struct Faulty {
    part: Arc<dyn hybrid::StagedModel>,
    fault: Arc<Fault>,
}

impl hybrid::StagedModel for Faulty {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        self.fault.pass(Phase::Forward)?;
        self.part.run(stage, input, batch, scale)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        self.part.stream(batch)
    }
}

phalanx_nn::parameters!(Faulty { part = "" });

/// A communicator of a rank that, once it is gone, no longer says so.
#[derive(Debug)]
struct Quiet {
    comm: Comm,
    gone: Arc<AtomicBool>,
}

impl Communicator for Quiet {
    fn rank(&self) -> usize {
        self.comm.rank()
    }
    fn ranks(&self) -> &[usize] {
        self.comm.ranks()
    }
    fn start(&self, call: Call) -> Pending {
        self.comm.start(call)
    }
    fn run(&self, call: Call) -> comm::Result<()> {
        self.comm.run(call)
    }
    fn group(&self, ranks: &[usize]) -> comm::Result<Comm> {
        Ok(Arc::new(Quiet { comm: self.comm.group(ranks)?, gone: Arc::clone(&self.gone) }))
    }
    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
    fn fail(&self, cause: &str) {
        if !self.gone.load(Ordering::Relaxed) {
            self.comm.fail(cause);
        }
    }
    fn failure(&self) -> Option<comm::Error> {
        self.comm.failure()
    }
}

/// `PHALANX_FUZZ_TRIALS` from `PHALANX_FUZZ_SEED` on, or some.
#[test]
fn a_fault_anywhere_in_a_step_over_all_axes_ends_all_ranks_with_its_name() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let first = number("PHALANX_FUZZ_SEED").unwrap_or(0);
    let count = number("PHALANX_FUZZ_TRIALS").unwrap_or(if cfg!(debug_assertions) { 20 } else { 100 });
    (first..first + count).map(Trial::random).for_each(|trial| trial.judge());
}

/// Ranks that divide experts wait for each other in every mixture, forward and backward.
#[test]
fn a_fault_between_exchanges_of_tokens_ends_all_ranks_with_its_name() {
    let hows = [How::Error, How::Panic, How::Vanish];
    for (how, phase) in hows.into_iter().flat_map(|how| [(how, Phase::Forward), (how, Phase::Backward)]) {
        for (dp, tp, pp) in [(2, 1, 1), (2, 1, 2), (4, 1, 1)] {
            let layout = Layout { dp, tp, pp, ep: 2, micro_batches: 2, ..Layout::default() };
            let case = Case::new(mixture(Family::Mixtral, 2), layout);
            let rank = case.ranks() - 1;
            Trial { seed: 0, case, how, phase, rank, step: 1, after: 1, parameter: 5 }.judge();
        }
    }
}
