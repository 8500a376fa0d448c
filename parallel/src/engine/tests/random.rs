//! Random workloads: every engine equals a plain loop, in values, versions and root causes.

use super::*;
use crate::engine::Error;
use crate::engine::Resource;

const VARIABLES: usize = 100;
const WORKLOADS: u64 = 10_000;
/// Sets of variables; a workload has one of them, so that workloads overlap and one wait serves many.
const WORLDS: u64 = 50;

/// splitmix64.
fn hash(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// An operation of a workload: it mixes what it reads into what it mutates.
struct Step {
    id: u64,
    reads: Vec<usize>,
    mutates: Vec<usize>,
    priority: i32,
    lane: usize,
    fails: bool,
    panics: bool,
}

/// The steps of workload `n`: few variables or many, so that there are long chains and wide fans.
fn workload(n: u64) -> Vec<Step> {
    let mut state = hash(n);
    let mut draw = |below: u64| {
        state = hash(state);
        state % below
    };
    let variables = [3, 10, VARIABLES as u64][draw(3) as usize];
    let steps = draw(40);
    let step = |at: u64| {
        let (reads, mutates) = (draw(4), draw(3));
        let reads = (0..reads).map(|_| draw(variables) as usize).collect();
        let mutates = (0..mutates).map(|_| draw(variables) as usize).collect();
        let (fails, panics) = (draw(60) == 0, draw(1000) == 0);
        let (priority, lane) = (draw(5) as i32 - 2, draw(3) as usize);
        Step { id: n << 16 | at, reads, mutates, priority, lane, fails, panics }
    };
    (0..steps).map(step).collect()
}

/// The new value of `variable`, from what the step reads and its old value.
fn mixed(id: u64, sum: u64, variable: usize, old: u64) -> u64 {
    hash(id ^ hash(sum ^ hash(variable as u64 ^ old)))
}

/// What a plain loop makes of the workloads of one world.
struct Plain {
    values: Vec<u64>,
    versions: Vec<u64>,
    /// The step that poisoned a variable.
    poison: Vec<Option<u64>>,
    /// The steps that failed.
    failures: Vec<u64>,
}

impl Plain {
    fn new() -> Plain {
        let (values, versions) = (vec![0; VARIABLES], vec![0; VARIABLES]);
        Plain { values, versions, poison: vec![None; VARIABLES], failures: Vec::new() }
    }

    fn run(&mut self, step: &Step) {
        let used = step.reads.iter().chain(&step.mutates);
        let mut cause = used.filter_map(|&v| self.poison[v]).min();
        let mut mutates = step.mutates.clone();
        mutates.sort();
        mutates.dedup();
        if cause.is_none() {
            let sum = step.reads.iter().map(|&v| self.values[v]).fold(0, u64::wrapping_add);
            for &v in &mutates {
                self.values[v] = mixed(step.id, sum, v, self.values[v]);
                self.versions[v] += 1;
            }
            cause = (step.fails || step.panics).then_some(step.id);
            self.failures.extend(cause);
        }
        if let Some(cause) = cause {
            mutates.iter().for_each(|&v| self.poison[v] = Some(cause));
        }
    }
}

fn push(engine: &Engine, resources: &[Resource<u64>], step: &Step) {
    let pick = |at: &[usize]| at.iter().map(|&v| resources[v].clone()).collect::<Vec<_>>();
    let (reads, mutates) = (pick(&step.reads), pick(&step.mutates));
    let variables = |of: &[usize]| of.iter().map(|&v| resources[v].variable()).collect::<Vec<_>>();
    let (read, mutated) = (variables(&step.reads), variables(&step.mutates));
    let lane = [Lane::Device(Device::CPU), Lane::Device(Device::Cpu(1)), Lane::Priority][step.lane];
    let op = Op::new(step.id.to_string()).reads(&read).mutates(&mutated).priority(step.priority).on(lane);
    let (id, mut at, fails, panics) = (step.id, step.mutates.clone(), step.fails, step.panics);
    let work = move || {
        let mut sum = 0u64;
        for value in &reads {
            sum = sum.wrapping_add(*value.read()?); // an error if somebody writes
        }
        let mut seen = Vec::new();
        for (v, value) in at.drain(..).zip(&mutates) {
            if !seen.contains(&v) {
                let mut value = value.write()?; // an error if anybody has it
                *value = mixed(id, sum, v, *value);
                seen.push(v);
            }
        }
        if panics {
            std::panic::resume_unwind(Box::new("it panics"));
        }
        if fails { Err("it fails".into()) } else { Ok(()) }
    };
    engine.push(op, work).unwrap();
}

fn cause(outcome: crate::engine::Result<()>) -> Option<u64> {
    match outcome {
        Ok(()) => None,
        Err(Error::Failed { op, cause }) => {
            assert_eq!(cause.to_string(), "it fails");
            Some(op.parse().unwrap())
        }
        Err(Error::Panicked { op, message }) => {
            assert_eq!(message, "it panics");
            Some(op.parse().unwrap())
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn random_workloads_equal_a_plain_loop_on_every_engine() {
    for (name, engine) in engines() {
        let variables = |_| (0..VARIABLES).map(|_| engine.resource(0u64)).collect();
        let worlds: Vec<Vec<Resource<u64>>> = (0..WORLDS).map(variables).collect();
        let mut plain: Vec<Plain> = (0..WORLDS).map(|_| Plain::new()).collect();
        for round in 0..WORKLOADS / WORLDS {
            for (n, (world, plain)) in (round * WORLDS..).zip(worlds.iter().zip(&mut plain)) {
                for step in workload(n) {
                    push(&engine, world, &step);
                    plain.run(&step);
                }
            }
            check_waits(&engine, &worlds, &mut plain, round, &name);
            for (world, plain) in worlds.iter().zip(&plain) {
                let values: Vec<u64> = world.iter().map(|r| *r.read().unwrap()).collect();
                assert_eq!(values, plain.values, "{name}, round {round}");
                let versions: Vec<u64> = world.iter().map(|r| r.variable().version()).collect();
                assert_eq!(versions, plain.versions, "{name}, round {round}");
            }
        }
    }
}

/// Waits for one variable of each world, which heals it alone, and then for all.
fn check_waits(engine: &Engine, worlds: &[Vec<Resource<u64>>], plain: &mut [Plain], round: u64, name: &str) {
    let mut unheard = Vec::new();
    for (world, plain) in worlds.iter().zip(plain) {
        let one = (hash(round) % VARIABLES as u64) as usize;
        let waited = cause(engine.wait_for_var(world[one].variable()));
        assert_eq!(waited, plain.poison[one].take(), "{name}, round {round}: variable {one}");
        let failures = plain.failures.drain(..);
        unheard.extend(failures.filter(|f| Some(*f) != waited || plain.poison.contains(&Some(*f))));
        plain.poison.fill(None);
    }
    assert_eq!(cause(engine.wait_for_all()), unheard.first().copied(), "{name}, round {round}");
    engine.wait_for_all().unwrap();
}
