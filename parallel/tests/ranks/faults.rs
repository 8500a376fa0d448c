//! One rank goes wrong in one action; all must end, and say where and why.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_nn::Parameters;
use phalanx_nn::autograd::{self, Var};
use phalanx_parallel::comm::{self, Call, Comm, Communicator, Pending, Traffic};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::pipeline::ranks::{Pipeline, Spec, Stages};
use phalanx_parallel::pipeline::schedule::{Action, Kind, Schedule, one_f_one_b, with_transfers, zb_h1};
use phalanx_parallel::{Error, Result};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::{Work, config};

/// What goes wrong, where.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub action: Action,
    pub how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    Error,
    Panic,
    /// The process dies.
    Kill,
}

impl Fault {
    pub fn strike(&self) -> autograd::Error {
        assert!(self.how != How::Panic, "the layer is broken");
        if self.how == How::Kill {
            let me = std::process::id().to_string();
            Command::new("kill").args(["-9", &me]).status().unwrap();
        }
        autograd::Error::Custom("the layer is broken".into())
    }
}

/// Work that goes wrong in computing.
pub struct Faulty<W> {
    pub work: W,
    pub fault: Fault,
}

impl<W: Stages> Stages for Faulty<W> {
    fn input_spec(&self, stage: usize, micro_batch: usize) -> Option<Spec> {
        self.work.input_spec(stage, micro_batch)
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let fault = self.fault;
        let here = (fault.action.stage, fault.action.micro_batch) == (stage, micro_batch);
        if here && fault.action.kind == Kind::Forward {
            return Err(fault.strike().into());
        }
        let output = self.work.forward(stage, micro_batch, input)?;
        if here && matches!(fault.action.kind, Kind::Backward | Kind::Input) {
            output.on_grad(move |_| Err(fault.strike()));
        }
        Ok(output)
    }
}

/// A communicator that goes wrong in one of its sends or receives.
#[derive(Debug)]
pub struct Broken {
    comm: Comm,
    fault: Fault,
    kind: comm::Kind,
    /// Calls of that kind that are still to go well.
    left: AtomicUsize,
}

impl Broken {
    /// One that goes wrong in the fault's transfer, if it is one of this rank's list, whose transfers are a call each.
    pub fn over(comm: &Comm, list: &[Action], fault: Fault) -> Comm {
        let kind = |action: &Action| match action.kind {
            Kind::SendForward | Kind::SendBackward => comm::Kind::Send,
            Kind::RecvForward | Kind::RecvBackward => comm::Kind::Receive,
            // There is none.
            _ => comm::Kind::Scatter,
        };
        let (calls, kind_of) =
            (list.iter().take_while(|action| **action != fault.action), kind(&fault.action));
        let left = AtomicUsize::new(calls.filter(|action| kind(action) == kind_of).count());
        Arc::new(Broken { comm: comm.clone(), fault, kind: kind_of, left })
    }

    fn check(&self, call: &Call) -> comm::Result<()> {
        let counts = call.kind() == self.kind;
        if counts && self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            let cause = self.fault.strike().to_string();
            return Err(comm::Error::Failed { rank: self.rank(), cause });
        }
        Ok(())
    }
}

impl Communicator for Broken {
    fn rank(&self) -> usize {
        self.comm.rank()
    }
    fn ranks(&self) -> &[usize] {
        self.comm.ranks()
    }
    fn start(&self, call: Call) -> Pending {
        match self.check(&call) {
            Ok(()) => self.comm.start(call),
            // A call that fails: to a rank that there is not.
            Err(_) => self
                .comm
                .start(Call::send(Tensor::zeros(&[1], DType::F32, Device::CPU).unwrap(), self.size())),
        }
    }
    fn run(&self, call: Call) -> comm::Result<()> {
        self.check(&call)?;
        self.comm.run(call)
    }
    fn group(&self, ranks: &[usize]) -> comm::Result<Comm> {
        self.comm.group(ranks)
    }
    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
    fn fail(&self, cause: &str) {
        self.comm.fail(cause);
    }
    fn failure(&self) -> Option<comm::Error> {
        self.comm.failure()
    }
}

/// A step of a rank's pipeline, and a barrier after it.
pub fn step(schedule: &Schedule, fault: Option<Fault>, rank: &Rank) -> Result<()> {
    let mut work = Work::new(&config(3), schedule, rank.rank(), rank.device())?;
    // One in which shapes are known to all, so that a transfer is one call.
    work.step = 1;
    let faulty = fault.filter(|fault| schedule.placement[fault.action.stage] == rank.rank());
    let Some(fault) = faulty else {
        Pipeline::new(schedule, rank.comm().clone(), rank.device())?.train(&Arc::new(work))?;
        return Ok(rank.comm().barrier()?);
    };
    let broken = Broken::over(rank.comm(), &schedule.ranks[rank.rank()], fault);
    let weights = work.model.of(fault.action.stage)?.parameters();
    let left = AtomicUsize::new(fault.action.micro_batch);
    let _hook = weights[weights.len() - 1].leaves()[0].on_accumulate(move |_| {
        let due = fault.action.kind == Kind::Weight && left.fetch_sub(1, Ordering::Relaxed) == 0;
        if due { Err(fault.strike()) } else { Ok(()) }
    });
    Pipeline::new(schedule, broken, rank.device())?.train(&Arc::new(Faulty { work, fault }))?;
    Ok(rank.comm().barrier()?)
}

/// What each rank said in the end; nobody may take long.
pub fn run(schedule: &Schedule, f: impl Fn(&Rank) -> Result<()> + Sync) -> Vec<String> {
    let (heard, start) = (Mutex::new(vec![String::new(); schedule.ranks.len()]), Instant::now());
    let outcome = Threads::new(schedule.ranks.len()).timeout(Duration::from_secs(60)).run(|rank| {
        let outcome = f(&rank);
        heard.lock().unwrap()[rank.rank()] = outcome.as_ref().map_or_else(Error::to_string, |()| "ok".into());
        outcome
    });
    assert!(outcome.is_err() && start.elapsed() < Duration::from_secs(20), "took {:?}", start.elapsed());
    heard.into_inner().unwrap()
}

#[test]
fn a_fault_in_any_action_ends_all_ranks_with_its_cause_rank_and_action() {
    for schedule in [one_f_one_b(3, 2).unwrap(), zb_h1(3, 2).unwrap()] {
        let schedule = with_transfers(&schedule).unwrap();
        assert!(step_is_fine(&schedule));
        for (culprit, &action) in
            schedule.ranks.iter().enumerate().flat_map(|(rank, list)| list.iter().map(move |a| (rank, a)))
        {
            for how in [How::Error, How::Panic] {
                let fault = Fault { action, how };
                assert_named(run(&schedule, |rank| step(&schedule, Some(fault), rank)), culprit, fault);
            }
        }
    }
}

/// Panics unless every rank says what went wrong where.
pub fn assert_named(heard: Vec<String>, culprit: usize, Fault { action, how }: Fault) {
    let panics = how == How::Panic;
    let is_send = matches!(action.kind, Kind::SendForward | Kind::SendBackward);
    let cause = if is_send && !panics { "got rank 3" } else { "the layer is broken" };
    for (rank, text) in heard.into_iter().enumerate() {
        let place = match rank == culprit {
            true => format!("{action}: "),
            false => format!("rank {culprit} failed: {action}: "),
        };
        assert!(text.contains(&place) && text.contains(cause), "{action}, rank {rank}: {text}");
        assert!(!panics || text.contains("panicked"), "{action}, rank {rank}: {text}");
    }
}

fn step_is_fine(schedule: &Schedule) -> bool {
    Threads::new(schedule.ranks.len()).run(|rank| step(schedule, None, &rank)).is_ok()
}

#[test]
fn a_rank_that_vanishes_is_named_and_where_it_was_wanted() {
    let schedule = with_transfers(&one_f_one_b(3, 2).unwrap()).unwrap();
    for culprit in 0..3 {
        let heard =
            run(&schedule, |rank| if rank.rank() == culprit { Ok(()) } else { step(&schedule, None, rank) });
        for (rank, text) in heard.into_iter().enumerate().filter(|(rank, _)| *rank != culprit) {
            assert!(
                text.contains(&format!("rank {culprit} has ended without arriving")),
                "rank {rank}: {text}"
            );
            assert!(
                text.starts_with(&format!("{rank}RECV_")) || text.starts_with(&format!("{rank}SEND_")),
                "{text}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let schedule = one_f_one_b(3, 2).unwrap();
    let refused = |comm: Comm, schedule: &Schedule| {
        Pipeline::new(schedule, comm, Device::CPU).err().unwrap().to_string()
    };
    let error = refused(comm::meta(0, 2).unwrap(), &schedule);
    assert!(error.contains("got a schedule of 3 ranks for a group of 2"), "{error}");
    let mut late = schedule.clone();
    late.ranks[1].reverse();
    assert!(refused(comm::meta(0, 3).unwrap(), &late).contains("rank 1"), "{late:?}");
}
