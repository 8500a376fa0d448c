//! Pipelines over TCP: the same bits, and processes that die.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_nn::models::RecomputeMode;
use phalanx_parallel::launch::{Environment, Rank, environment};
use phalanx_parallel::pipeline::schedule::{Schedule, by_name, one_f_one_b, with_transfers};

use crate::asynchronous;
use crate::faults::{Fault, How, step};
use crate::kit::{alone, assert_equal, config, train};
use crate::port::free_port;
use crate::twin::{Case, Scheme, simulated};

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
    command.args(["processes::child", "--exact", "--ignored", "--nocapture"]);
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
