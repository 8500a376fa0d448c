//! An error, panic or death of one rank in one action ends all ranks, and each says where and why; and pipelines over TCP.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_nn::Parameters;
use phalanx_nn::autograd::{self, Var};
use phalanx_nn::models::RecomputeMode;
use phalanx_parallel::comm::{self, Call, Comm, Communicator, Pending, Traffic};
use phalanx_parallel::launch::{Environment, Rank, Threads, environment};
use phalanx_parallel::pipeline::ranks::{Pipeline, Spec, Stages};
use phalanx_parallel::pipeline::schedule::{
    Action, ActionKind, Schedule, by_name, one_f_one_b, with_transfers, zb_h1,
};
use phalanx_parallel::{Error, Result};
use phalanx_tensor::{DType, Device, Tensor};

use crate::asynchronous;
use crate::kit::{Work, alone, assert_equal, config, train};
use crate::port::free_port;
use crate::twin::{Case, Scheme, simulated};

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
        if here && fault.action.kind == ActionKind::Forward {
            return Err(fault.strike().into());
        }
        let output = self.work.forward(stage, micro_batch, input)?;
        if here && matches!(fault.action.kind, ActionKind::Backward | ActionKind::Input) {
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
    kind: comm::CollectiveKind,
    /// Calls of that kind that are still to go well.
    left: AtomicUsize,
}

impl Broken {
    /// A communicator that fails in the fault's transfer, if this rank's list has it. Each transfer is one call.
    pub fn over(comm: &Comm, list: &[Action], fault: Fault) -> Comm {
        let kind = |action: &Action| match action.kind {
            ActionKind::SendForward | ActionKind::SendBackward => comm::CollectiveKind::Send,
            ActionKind::RecvForward | ActionKind::RecvBackward => comm::CollectiveKind::Receive,
            // There is none.
            _ => comm::CollectiveKind::Scatter,
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
        let due = fault.action.kind == ActionKind::Weight && left.fetch_sub(1, Ordering::Relaxed) == 0;
        if due { Err(fault.strike()) } else { Ok(()) }
    });
    Pipeline::new(schedule, broken, rank.device())?.train(&Arc::new(Faulty { work, fault }))?;
    Ok(rank.comm().barrier()?)
}

/// The error of each rank. No rank may take long.
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
    let is_send = matches!(action.kind, ActionKind::SendForward | ActionKind::SendBackward);
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

#[test]
fn over_tcp_the_bits_are_the_same() {
    let config = config(4);
    let wanted = alone(&config, 3);
    for name in ["1f1b", "zb-v"] {
        let (schedule, port) = (by_name(name, 3, 2, 3).unwrap(), free_port());
        let process = |rank: usize| {
            let place = Environment::new().local(rank, 3, port).timeout(Duration::from_secs(60));
            place.run(|rank: Rank| train(&config, &schedule, RecomputeMode::ExceptLast, &rank)).unwrap()
        };
        let ranks = std::thread::scope(|scope| {
            let process = &process;
            let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || process(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_equal(ranks, &wanted, name);
    }
}

#[test]
fn so_they_are_without_flushes() {
    let case = Case { tied: true, ..Case::new(Scheme::DoubleBuffered(3), 3, 9) };
    let port = free_port();
    let process = |rank: usize| {
        let place = Environment::new().local(rank, 3, port).timeout(Duration::from_secs(60));
        place.run(|rank: Rank| asynchronous::train(&case, RecomputeMode::ExceptLast, &rank)).unwrap()
    };
    let ranks = std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    asynchronous::assert_same(asynchronous::joined(ranks), &simulated(&case), "over TCP");
}

const SIZE: usize = 3;
/// Where a child finds the place of the action in which the middle rank dies.
const PLACE: &str = "PHALANX_TEST_PLACE";

fn schedule() -> Schedule {
    with_transfers(&one_f_one_b(SIZE, 2).unwrap()).unwrap()
}

/// What a process started by the test below does.
#[test]
#[ignore = "a part of another test"]
fn child() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let schedule = schedule();
    let action = schedule.ranks[1][place.parse::<usize>().unwrap()];
    let outcome = environment(|rank| step(&schedule, Some(Fault { action, how: How::Kill }), &rank));
    println!("\noutcome: {}", outcome.map_or_else(|e| e.to_string(), |()| "ok".into()));
}

fn start(rank: usize, port: u16, place: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["faults::child", "--exact", "--ignored", "--nocapture"]);
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", SIZE.to_string()),
        ("MASTER_PORT", port.to_string()),
        (PLACE, place.to_string()),
    ];
    command.envs(variables).env("MASTER_ADDR", "127.0.0.1").stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_process_that_dies_in_any_action_ends_the_others_which_name_it() {
    for place in 0..schedule().ranks[1].len() {
        let (port, begin) = (free_port(), Instant::now());
        let children: Vec<Child> = (0..SIZE).map(|rank| start(rank, port, place)).collect();
        for (rank, child) in children.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(rank == 1 || said.contains("rank 1 is lost"), "action {place}, rank {rank}: {said}");
            assert_eq!(output.status.success(), rank != 1, "action {place}, rank {rank}: {said}");
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "took {:?}", begin.elapsed());
    }
}

/// Work whose rank stops in one forward pass, until the others have given it up.
struct Hangs {
    work: Work,
    comm: Comm,
    at: (usize, usize),
}

impl Stages for Hangs {
    fn input_spec(&self, stage: usize, micro_batch: usize) -> Option<Spec> {
        self.work.input_spec(stage, micro_batch)
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        while self.at == (stage, micro_batch) && self.comm.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.work.forward(stage, micro_batch, input)
    }
}

#[test]
fn the_flight_recorder_names_the_action_in_which_a_pipeline_hangs() {
    let folder = std::env::temp_dir().join(format!("phalanx-flight-pipeline-{}", std::process::id()));
    let schedule = with_transfers(&one_f_one_b(3, 4).unwrap()).unwrap();
    let run = |rank: Rank| -> Result<()> {
        let comm = rank.comm().clone();
        comm.flight_recorder().unwrap().set_folder(&folder);
        let work = Work::new(&config(3), &schedule, rank.rank(), rank.device())?;
        let pipeline = Pipeline::new(&schedule, comm.clone(), rank.device())?;
        pipeline.train(&Arc::new(Hangs { work, comm, at: (1, 2) })).map(drop)
    };
    Threads::new(3).timeout(Duration::from_secs(5)).run(run).unwrap_err();
    let text = phalanx_parallel::flight::explain(&folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    for wanted in [
        "rank 2 -> rank 1: recv",
        "last common call: message ",
        "rank 1 waits for none: has not come; forward of micro-batch 2 at stage 1, under way for ",
    ] {
        assert!(text.contains(wanted), "wanted {wanted:?} in\n{text}");
    }
}
