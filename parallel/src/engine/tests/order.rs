//! Which operation runs when and on which lane; random workloads, which every engine runs as a plain loop does, in
//! values, versions and root causes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use phalanx_tensor::Context;

use super::*;

#[test]
fn priorities_are_honoured_and_equals_run_in_the_order_of_pushes() {
    let (engine, release) = held_up();
    let ran = Arc::new(Mutex::new(Vec::new()));
    let mut expected = Vec::new();
    for n in 0..200 {
        let (priority, ran) = (n * 7 % 10 - 5, ran.clone());
        let variable = engine.new_variable();
        let work = move || {
            ran.lock().unwrap().push((-priority, n));
            Ok(())
        };
        engine.push(Op::new("op").mutates(&[&variable]).priority(priority), work).unwrap();
        expected.push((-priority, n));
    }
    drop(release);
    engine.wait_for_all().unwrap();
    expected.sort();
    assert_eq!(*ran.lock().unwrap(), expected);
}

#[test]
fn what_an_operation_makes_ready_is_overtaken_by_higher_priorities() {
    let (engine, release) = held_up();
    let (a, b) = (engine.new_variable(), engine.new_variable());
    let ran = Arc::new(Mutex::new(String::new()));
    for (name, variable, priority) in [('1', &a, 1), ('2', &a, 0), ('x', &b, 0), ('3', &a, 2)] {
        let ran = ran.clone();
        let work = move || {
            ran.lock().unwrap().push(name);
            Ok(())
        };
        engine.push(Op::new(name.to_string()).mutates(&[variable]).priority(priority), work).unwrap();
    }
    drop(release);
    engine.wait_for_all().unwrap();
    assert_eq!(*ran.lock().unwrap(), "1x23"); // 3 waits for 2, which became ready after x
}

#[test]
fn reads_run_together_and_writes_alone() {
    let engine = threaded(4);
    let (variable, writing) = (engine.new_variable(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..100 {
        let inside = writing.clone();
        let write = move || {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
            Ok(())
        };
        engine.push(Op::new("write").mutates(&[&variable]), write).unwrap();
        let barrier = Arc::new(Barrier::new(4));
        for _ in 0..4 {
            let (barrier, writing) = (barrier.clone(), writing.clone());
            let read = move || {
                barrier.wait(); // passes only if all four are running
                assert_eq!(writing.load(Ordering::SeqCst), 0);
                Ok(())
            };
            engine.push(Op::new("read").reads(&[&variable]), read).unwrap();
        }
    }
    engine.wait_for_all().unwrap();
    assert_eq!(variable.version(), 100);
}

#[test]
fn threads_that_push_on_the_same_variables_do_not_wait_for_each_other_in_a_circle() {
    for (_, engine) in engines() {
        let variables: Vec<_> = (0..4).map(|_| engine.new_variable()).collect();
        let ran = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let (engine, variables, ran) = (&engine, &variables, &ran);
                scope.spawn(move || {
                    for n in 0..2000 {
                        let (a, b) = (&variables[(thread + n) % 4], &variables[(thread * n + 3) % 4]);
                        let ran = ran.clone();
                        let work = move || {
                            ran.fetch_add(1, Ordering::Relaxed);
                            Ok(())
                        };
                        engine.push(Op::new("both").reads(&[b, a]).mutates(&[a, b]), work).unwrap();
                    }
                });
            }
        });
        engine.wait_for_all().unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 8000);
    }
}

#[test]
fn operations_push_operations_that_run_after_them() {
    for (name, engine) in engines() {
        let engine = Arc::new(engine);
        let log = engine.resource(String::new());
        let (inner, outer_log, variable) = (engine.clone(), log.clone(), log.variable().clone());
        let outer = move || {
            let inner_log = outer_log.clone();
            let nested = move || {
                inner_log.write()?.push_str("nested");
                Ok(())
            };
            inner.push(Op::new("nested").mutates(&[outer_log.variable()]), nested)?;
            outer_log.write()?.push_str("outer ");
            Ok(())
        };
        engine.push(Op::new("outer").mutates(&[&variable]), outer).unwrap();
        engine.wait_for_all().unwrap();
        assert_eq!(*log.read().unwrap(), "outer nested", "{name}");
    }
}

#[test]
fn lanes_run_on_threads_of_their_own_in_the_context_of_the_push() {
    let engine = threaded(1);
    for (lane, name) in [
        (Lane::Device(Device::Cpu(1)), "engine: a pool of cpu:1"),
        (Lane::Priority, "engine: a priority lane"),
    ] {
        let _guard = Context::with(|context| context.batch_offset = 7);
        let work = move || {
            assert_eq!((std::thread::current().name(), Context::current().batch_offset), (Some(name), 7));
            Ok(())
        };
        engine.push(Op::new("where").on(lane), work).unwrap();
    }
    let outside = || {
        assert_eq!(Context::current().batch_offset, 0);
        Ok(())
    };
    engine.push(Op::new("first"), outside).unwrap();
    engine.wait_for_all().unwrap();
}

#[test]
fn workers_that_sleep_wake_up() {
    let engine = threaded(3);
    let ran = Arc::new(AtomicUsize::new(0));
    for _ in 0..50 {
        for lane in [Lane::Device(Device::CPU), Lane::Priority] {
            let ran = ran.clone();
            let work = move || {
                ran.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            engine.push(Op::new("op").on(lane), work).unwrap();
        }
        std::thread::sleep(Duration::from_micros(300)); // longer than they watch
    }
    engine.wait_for_all().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 100);
}

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

/// `alike`: all steps on one lane, as plain operations, which may be of one bulk.
fn push(engine: &Engine, resources: &[Resource<u64>], step: &Step, alike: bool) {
    let pick = |at: &[usize]| at.iter().map(|&v| resources[v].clone()).collect::<Vec<_>>();
    let (reads, mutates) = (pick(&step.reads), pick(&step.mutates));
    let variables = |of: &[usize]| of.iter().map(|&v| resources[v].variable()).collect::<Vec<_>>();
    let (read, mutated) = (variables(&step.reads), variables(&step.mutates));
    let lane = [Lane::Device(Device::CPU), Lane::Device(Device::Cpu(1)), Lane::Priority]
        [if alike { 0 } else { step.lane }];
    let op = Op::new(step.id.to_string()).reads(&read).mutates(&mutated).priority(if alike {
        0
    } else {
        step.priority
    });
    let op = op.on(lane);
    let (id, mut at, fails, panics) = (step.id, step.mutates.clone(), step.fails, step.panics);
    let mut work = move || -> Result<(), crate::engine::Cause> {
        let mut sum = 0u64;
        for value in &reads {
            sum = sum.wrapping_add(*value.read()?); // an error if another operation writes
        }
        let mut seen = Vec::new();
        for (v, value) in at.drain(..).zip(&mutates) {
            if !seen.contains(&v) {
                let mut value = value.write()?; // an error if another operation has it
                *value = mixed(id, sum, v, *value);
                seen.push(v);
            }
        }
        if panics {
            std::panic::resume_unwind(Box::new("it panics"));
        }
        if fails { Err("it fails".into()) } else { Ok(()) }
    };
    match step.id % 4 {
        _ if alike => engine.push(op, work),
        // Its completion comes from another thread.
        1 if !panics => engine.push_async(op, move |completion| Ok(completer().send((completion, work()))?)),
        2 => engine.push_async(op, move |completion| {
            work()?;
            completion.complete(Ok(()));
            Ok(())
        }),
        _ => engine.push(op, work),
    }
    .unwrap();
}

type Ended = (Completion, Result<(), crate::engine::Cause>);

/// A thread that calls completions.
fn completer() -> &'static Sender<Ended> {
    static COMPLETER: std::sync::LazyLock<Sender<Ended>> = std::sync::LazyLock::new(|| {
        let (send, receive) = channel::<Ended>();
        let complete =
            move || receive.into_iter().for_each(|(completion, outcome)| completion.complete(outcome));
        std::thread::spawn(complete);
        send
    });
    &COMPLETER
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
            let size = [0, 3, 20][round as usize % 3];
            let bulk = (size > 0).then(|| engine.bulk(size));
            for (n, (world, plain)) in (round * WORLDS..).zip(worlds.iter().zip(&mut plain)) {
                for step in workload(n) {
                    push(&engine, world, &step, size > 0);
                    plain.run(&step);
                }
            }
            if round % 2 == 0 {
                drop(bulk); // else the waits hand over what is left
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
