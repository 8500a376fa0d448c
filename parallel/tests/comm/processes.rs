//! The suite, the fuzz and dead processes over TCP: ranks that share nothing but a port.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::Error;
use phalanx_parallel::launch::{Environment, Rank, environment};

use crate::faults::{Fault, Trial, first_seed, patiently, trials_over_wires};
use crate::port::free_port;
use crate::suite;

/// Runs `f` on ranks that meet over TCP, each on a thread in place of a process.
pub fn run<T: Send>(
    size: usize,
    timeout: Duration,
    f: impl Fn(Rank) -> Result<T, String> + Sync,
) -> Vec<Result<T, String>> {
    let port = free_port();
    let process = |rank| {
        let place = Environment::new().local(rank, size, port).timeout(timeout);
        place.run(&f).map_err(|e| e.to_string())
    };
    std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub const LONG: Duration = Duration::from_secs(20);

#[test]
fn every_number_of_processes_passes_the_suite() {
    for size in [1, 2, 3] {
        for outcome in run(size, LONG, |rank| suite::all(rank.comm(), rank.device())) {
            outcome.unwrap();
        }
    }
}

#[test]
fn random_programs_over_tcp() {
    let first = first_seed();
    for seed in first..first + trials_over_wires(20) {
        let trial = Trial::random(seed);
        patiently(trial.fault == Fault::Stall, Duration::from_secs(1), |timeout| {
            let start = Instant::now();
            let outcomes = run(trial.size, timeout, |rank| trial.run(rank.comm(), rank.device()));
            assert!(start.elapsed() < Duration::from_secs(30), "{trial:?} took {:?}", start.elapsed());
            outcomes.into_iter().try_for_each(|outcome| trial.judge(outcome))
        });
    }
}

#[test]
fn a_mismatch_is_an_error_on_every_process_that_names_both_sides() {
    let outcomes = run(3, LONG, |rank| {
        let text = |e: Error| e.to_string();
        match rank.rank() {
            2 => rank.comm().barrier().map_err(text),
            r => rank.comm().split(Some(r as u32), 0).map(drop).map_err(text),
        }
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err();
        assert!(text.contains("rank 0 all_gather of 3 x 2 i64 (call 0"), "{text}");
        assert!(text.contains("rank 2 barrier (call 0 of group [0, 1, 2])"), "{text}");
    }
}

/// What a process started by the tests below does: says that it has arrived, then waits for the others for ever.
#[test]
#[ignore = "a part of another test"]
fn child() {
    let outcome = environment(|rank: Rank| {
        rank.comm().barrier()?;
        println!("\nrank {} is there", rank.rank());
        if rank.rank() == 1 {
            std::thread::sleep(LONG);
        }
        rank.comm().barrier()
    });
    println!("\noutcome: {}", outcome.map_or_else(|e| e.to_string(), |()| "ok".into()));
}

fn start(rank: usize, size: usize, port: u16) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["processes::child", "--exact", "--ignored", "--nocapture"]);
    let variables =
        [("RANK", rank.to_string()), ("WORLD_SIZE", size.to_string()), ("MASTER_PORT", port.to_string())];
    command.envs(variables).env("MASTER_ADDR", "127.0.0.1").stdout(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn a_killed_process_ends_the_others_which_name_it() {
    let (size, port) = (3, free_port());
    let mut children: Vec<Child> = (0..size).map(|rank| start(rank, size, port)).collect();
    let mut outputs: Vec<_> = children.iter_mut().map(|c| BufReader::new(c.stdout.take().unwrap())).collect();
    for output in &mut outputs {
        let mut line = String::new();
        while !line.contains("is there") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "a process ended early");
        }
    }
    let killed = Instant::now();
    children[1].kill().unwrap();
    for (rank, output) in outputs.iter_mut().enumerate() {
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert!(rank == 1 || rest.contains("rank 1 is lost"), "{rest}");
        assert!(
            rank == 1 || rest.contains("barrier (call 1 of group [0, 1, 2])") || rest.contains("outcome"),
            "{rest}"
        );
    }
    assert!(killed.elapsed() < LONG / 2);
    children.iter_mut().for_each(|child| drop(child.wait()));
}
