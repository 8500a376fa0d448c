//! The engine against plain loops, and against everything that can go wrong: poison, waits, ends, resources.

mod completion;
mod declared;
mod order;
mod programs;
mod scope;

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use phalanx_tensor::{Device, RngKey};

use super::{
    Completion, Engine, EngineConfig, Error, ErrorClearing, Executor, Generator, Lane, Op, Policy,
    ReadyOrder, Resource, Scratch, Task, Variable,
};

/// Long enough for anything that ends at all.
const LONG: Duration = Duration::from_secs(60);

/// Engines of every kind; threaded ones have this many threads in each of three lanes.
fn engines() -> Vec<(String, Engine)> {
    let policies = [
        ("serial", Policy::Serial),
        ("pooled", Policy::Threaded(EngineConfig::pooled(3))),
        ("fifo", Policy::Threaded(lanes(2).ready_order(ReadyOrder::Fifo))),
        ("custom", Policy::Custom(Box::new(Threads::new(2)))),
    ];
    let policies = policies.map(|(name, policy)| (name.to_string(), Engine::new(policy).unwrap()));
    let threaded = [1, 2, 8].map(|threads| (format!("{threads} threads"), threaded(threads)));
    policies.into_iter().chain(threaded).collect()
}

/// A policy of a program's own: threads that take tasks from a channel, the latest first.
struct Threads(Arc<(Mutex<Vec<Task>>, std::sync::Condvar)>);

impl Threads {
    fn new(threads: usize) -> Threads {
        let shared: Arc<(Mutex<Vec<Task>>, std::sync::Condvar)> = Arc::default();
        for _ in 0..threads {
            let weak = Arc::downgrade(&shared);
            std::thread::spawn(move || {
                while let Some(shared) = weak.upgrade() {
                    let tasks = shared.0.lock().unwrap();
                    let waited =
                        shared.1.wait_timeout_while(tasks, Duration::from_millis(1), |t| t.is_empty());
                    let task = waited.unwrap().0.pop();
                    task.into_iter().for_each(Task::run);
                }
            });
        }
        Threads(shared)
    }
}

impl Executor for Threads {
    fn execute(&self, task: Task) {
        self.0.0.lock().unwrap().push(task);
        self.0.1.notify_one();
    }
}

fn threaded(threads: usize) -> Engine {
    Engine::threaded(&lanes(threads)).unwrap()
}

fn lanes(threads: usize) -> EngineConfig {
    let config = EngineConfig::new().lane(Device::CPU, threads).lane(Device::Cpu(1), threads);
    config.lane(Lane::Priority, threads)
}

/// A threaded engine of one lane with one thread, which is held up until the sender sends or is dropped.
fn held_up() -> (Engine, Sender<()>) {
    let engine = Engine::threaded(&EngineConfig::new().lane(Device::CPU, 1)).unwrap();
    let (release, held): (_, Receiver<()>) = channel();
    let (started, running) = channel();
    let hold = move || {
        started.send(())?;
        let _ = held.recv();
        Ok(())
    };
    engine.push(Op::new("hold"), hold).unwrap();
    running.recv_timeout(LONG).unwrap();
    (engine, release)
}

/// Pushes an operation that mutates a variable and fails.
fn fail(engine: &Engine, name: &'static str, variable: &Variable) {
    engine.push(Op::new(name).mutates(&[variable]), move || Err(format!("{name} said no").into())).unwrap();
}

fn message(outcome: super::Result<()>) -> String {
    outcome.map_or_else(|error| error.to_string(), |()| "ok".into())
}

#[test]
fn the_root_cause_reaches_all_it_spoiled_and_nothing_else() {
    for (name, engine) in engines() {
        let [a, b, c, clean] = [(); 4].map(|()| engine.new_variable());
        fail(&engine, "load", &a);
        for (from, to) in [(&a, &b), (&b, &c)] {
            engine.push(Op::new("copy").reads(&[from]).mutates(&[to]), || panic!("it must not run")).unwrap();
        }
        engine.push(Op::new("other").mutates(&[&clean]), || Ok(())).unwrap();
        engine.wait_for_var(&clean).unwrap();
        let failed = engine.wait_for_var(&c).unwrap_err();
        assert_eq!(failed.to_string(), "engine: `load` failed: load said no", "{name}");
        assert_eq!(failed.source().map(ToString::to_string).as_deref(), Some("load said no"));
        assert_eq!([&a, &b, &c].map(Variable::version), [1, 0, 0], "what was skipped is no write");
    }
}

#[test]
fn a_variable_is_healed_by_the_wait_that_reports_it_and_by_no_other() {
    for (name, engine) in engines() {
        let [a, b] = [(); 2].map(|()| engine.new_variable());
        fail(&engine, "load", &a);
        engine.push(Op::new("copy").reads(&[&a]).mutates(&[&b]), || Ok(())).unwrap();
        assert_ne!(message(engine.wait_for_var(&a)), "ok", "{name}");
        assert_eq!(message(engine.wait_for_var(&a)), "ok", "{name}");
        engine.push(Op::new("use a").mutates(&[&a]), || Ok(())).unwrap();
        assert_eq!(message(engine.wait_for_var(&a)), "ok", "{name}");
        // b holds what was never computed, and a thread that waits for it must learn that.
        assert_ne!(message(engine.wait_to_read(&b)), "ok", "{name}");
        assert_eq!(message(engine.wait_for_all()), "ok", "{name}: all of it was reported");
    }
}

#[test]
fn wait_for_all_reports_the_first_failure_once_and_heals_all() {
    for (name, engine) in engines() {
        let [a, b, c] = [(); 3].map(|()| engine.new_variable());
        engine.push(Op::new("nothing"), || Ok(())).unwrap();
        fail(&engine, "first", &a);
        fail(&engine, "second", &b);
        engine.push(Op::new("both").reads(&[&b, &a]).mutates(&[&c]), || Ok(())).unwrap();
        assert_eq!(message(engine.wait_for_all()), "engine: `first` failed: first said no", "{name}");
        assert_eq!(message(engine.wait_for_all()), "ok", "{name}");
        for variable in [&a, &b, &c] {
            engine.push(Op::new("again").mutates(&[variable]), || Ok(())).unwrap();
            assert_eq!(message(engine.wait_for_var(variable)), "ok", "{name}");
        }
        fail(&engine, "third", &c);
        assert_eq!(message(engine.wait_for_all()), "engine: `third` failed: third said no", "{name}");
    }
}

#[test]
fn of_two_poisons_the_one_pushed_first_is_the_root_cause() {
    for (name, engine) in engines() {
        for turn in [true, false] {
            let [a, b, c] = [(); 3].map(|()| engine.new_variable());
            fail(&engine, "first", if turn { &a } else { &b });
            fail(&engine, "second", if turn { &b } else { &a });
            engine.push(Op::new("both").reads(&[&a, &b]).mutates(&[&c]), || Ok(())).unwrap();
            assert!(message(engine.wait_for_var(&c)).contains("`first`"), "{name}");
            assert_ne!(message(engine.wait_for_all()), "ok");
        }
    }
}

#[test]
fn a_panic_is_a_failure_with_its_message() {
    for (name, engine) in engines() {
        let variable = engine.new_variable();
        let text = || std::panic::resume_unwind(Box::new("so much"));
        engine.push(Op::new("text").mutates(&[&variable]), text).unwrap();
        let formatted = || std::panic::resume_unwind(Box::new(format!("and {}", "more")));
        engine.push(Op::new("formatted"), formatted).unwrap();
        assert_eq!(message(engine.wait_for_var(&variable)), "engine: `text` panicked: so much", "{name}");
        assert_eq!(message(engine.wait_for_all()), "engine: `formatted` panicked: and more", "{name}");
    }
}

#[test]
fn an_operation_that_only_reads_fails_for_the_wait_for_all() {
    for (name, engine) in engines() {
        let variable = engine.new_variable();
        for _ in 0..100 {
            engine.push(Op::new("check").reads(&[&variable]), || Err("not finite".into())).unwrap();
        }
        assert_eq!(message(engine.wait_for_var(&variable)), "ok", "{name}: reading spoils nothing");
        assert_eq!(message(engine.wait_for_all()), "engine: `check` failed: not finite", "{name}");
        assert_eq!(message(engine.wait_for_all()), "ok", "{name}");
    }
}

#[test]
fn a_poisoned_variable_is_freed_all_the_same_and_its_failure_is_heard() {
    for (name, engine) in engines() {
        let (variable, (freed, seen)) = (engine.new_variable(), channel());
        fail(&engine, "load", &variable);
        engine.delete_variable(&variable, move || freed.send(()).unwrap()).unwrap();
        seen.recv_timeout(LONG).unwrap();
        assert_eq!(message(engine.wait_for_all()), "engine: `load` failed: load said no", "{name}");
    }
}

#[test]
fn failures_of_one_thread_are_kept_for_the_waits_of_another() {
    let engine = threaded(2);
    let variable = engine.new_variable();
    fail(&engine, "load", &variable);
    std::thread::scope(|scope| {
        let waits = [(); 4].map(|()| scope.spawn(|| engine.wait_for_var(&variable)));
        let failed = waits.map(|wait| wait.join().unwrap()).iter().filter(|o| o.is_err()).count();
        assert_eq!(failed, 1, "the first wait in the variable's queue reports it, once");
    });
    assert!(matches!(engine.wait_for_all(), Ok(()) | Err(Error::Failed { .. })));
}

#[test]
fn wait_for_var_waits_for_readers_and_wait_to_read_does_not() {
    let engine = Arc::new(threaded(2));
    let variable = engine.new_variable();
    let (release, held) = channel::<()>();
    let read = move || {
        let _ = held.recv();
        Ok(())
    };
    engine.push(Op::new("write").mutates(&[&variable]), || Ok(())).unwrap();
    engine.push(Op::new("slow read").reads(&[&variable]), read).unwrap();
    engine.wait_to_read(&variable).unwrap(); // the read is still running
    let (done, waited) = channel();
    let (other, same) = (engine.clone(), variable.clone());
    let waiter = std::thread::spawn(move || {
        other.wait_for_var(&same).unwrap();
        done.send(()).unwrap();
    });
    assert!(waited.recv_timeout(Duration::from_millis(50)).is_err(), "it did not wait for the reader");
    drop(release);
    waited.recv_timeout(LONG).unwrap();
    waiter.join().unwrap();
    assert_eq!(variable.version(), 1, "a wait is no write");
}

#[test]
fn waiting_for_one_variable_does_not_wait_for_others() {
    let (engine, release) = held_up(); // its only worker is busy
    let (idle, busy) = (engine.new_variable(), engine.new_variable());
    engine.push(Op::new("later").mutates(&[&busy]), || Ok(())).unwrap();
    engine.wait_for_var(&idle).unwrap();
    assert_eq!(busy.version(), 0);
    drop(release);
    engine.wait_for_var(&busy).unwrap();
    assert_eq!(busy.version(), 1);
}

#[test]
fn a_deleted_variable_is_freed_after_its_last_use_and_not_used_again() {
    for (name, engine) in engines() {
        let (variable, count) = (engine.new_variable(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..20 {
            let count = count.clone();
            let read = move || {
                std::thread::yield_now();
                count.fetch_add(1, Ordering::SeqCst);
                Ok(())
            };
            engine.push(Op::new("read").reads(&[&variable]), read).unwrap();
        }
        let (freed, seen) = channel();
        let at_end = count.clone();
        engine
            .delete_variable(&variable, move || freed.send(at_end.load(Ordering::SeqCst)).unwrap())
            .unwrap();
        let late = engine.push(Op::new("late").reads(&[&variable]), || Ok(()));
        assert!(matches!(late, Err(Error::Deleted { op, .. }) if op == "late"), "{name}");
        assert!(matches!(engine.wait_for_var(&variable), Err(Error::Deleted { .. })), "{name}");
        assert_eq!(seen.recv_timeout(LONG), Ok(20), "{name}: freed before its last use");
        engine.wait_for_all().unwrap();
    }
}

#[test]
fn a_wait_inside_an_operation_is_an_error_and_not_a_hang() {
    for (_, engine) in engines() {
        let engine = Arc::new(engine);
        let variable = engine.new_variable();
        let (inner, same) = (engine.clone(), variable.clone());
        let work = move || {
            assert!(matches!(inner.wait_for_all(), Err(Error::WaitInside { .. })));
            Ok(inner.wait_for_var(&same)?)
        };
        engine.push(Op::new("waits").mutates(&[&variable]), work).unwrap();
        let message = engine.wait_for_all().unwrap_err().to_string();
        assert!(message.contains("`waits` failed") && message.contains("wait_for_var"), "{message}");
    }
}

#[test]
fn dropping_an_engine_runs_all_that_was_pushed() {
    for threads in [1, 8] {
        let (engine, count) = (threaded(threads), Arc::new(AtomicUsize::new(0)));
        let variable = engine.new_variable();
        for _ in 0..1000 {
            let count = count.clone();
            let work = move || {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            engine.push(Op::new("op").mutates(&[&variable]), work).unwrap();
        }
        drop(engine);
        assert_eq!(count.load(Ordering::Relaxed), 1000);
    }
}

#[test]
fn an_engine_dropped_by_its_own_operation_runs_the_rest() {
    let engine = Arc::new(threaded(1));
    let (variable, (done, ended)) = (engine.new_variable(), channel());
    let (release, held) = channel::<()>();
    let last = engine.clone();
    let hold = move || {
        let _ = held.recv();
        drop(last);
        Ok(())
    };
    engine.push(Op::new("holds the engine").mutates(&[&variable]), hold).unwrap();
    let after = move || Ok(done.send(())?);
    engine.push(Op::new("after").reads(&[&variable]).on(Lane::Priority), after).unwrap();
    drop(engine);
    drop(release);
    ended.recv_timeout(LONG).unwrap();
}

#[test]
fn many_threads_wait_at_once() {
    let engine = threaded(2);
    let variable = engine.new_variable();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..500 {
                    engine.push(Op::new("op").mutates(&[&variable]), || Ok(())).unwrap();
                    if n % 2 == 0 { engine.wait_for_all() } else { engine.wait_for_var(&variable) }.unwrap();
                }
            });
        }
    });
    assert_eq!(variable.version(), 2000);
}

#[test]
fn foreign_variables_and_unknown_lanes_are_refused() {
    let (engine, other) = (Engine::serial(), Engine::threaded(&EngineConfig::new()).unwrap());
    let variable = engine.new_variable();
    let foreign = other.push(Op::new("op").reads(&[&variable]), || Ok(()));
    assert!(matches!(foreign, Err(Error::Foreign { .. })));
    assert!(matches!(other.wait_for_var(&variable), Err(Error::Foreign { .. })));
    let lane = other.push(Op::new("copy").on(Lane::Priority), || Ok(())).unwrap_err().to_string();
    assert_eq!(lane, "engine: `copy` wants a priority lane, got an engine with a pool of cpu:0");
}

#[test]
fn draws_depend_on_the_order_of_pushes_and_not_on_threads() {
    let draw = |engine: &Engine| {
        let generator = engine.resource(Generator::new(RngKey { seed: 3, step: 0 }));
        let drawn = Arc::new(Mutex::new(vec![[0; 4]; 50]));
        for n in 0..50 {
            let (generator, drawn) = (generator.clone(), drawn.clone());
            let op = Op::new("draw").priority(n % 3);
            let variable = generator.variable().clone();
            let work = move || {
                drawn.lock().map_err(|e| e.to_string())?[n as usize] =
                    generator.write()?.stream().block(0, 0);
                Ok(())
            };
            engine.push(op.mutates(&[&variable]), work).unwrap();
        }
        engine.wait_for_all().unwrap();
        drawn.lock().unwrap().clone()
    };
    let expected = draw(&Engine::serial());
    assert!((1..50).all(|n| expected[n] != expected[n - 1]));
    for (name, engine) in engines() {
        assert_eq!(draw(&engine), expected, "{name}");
    }
}

#[test]
fn scratch_space_serves_one_operation_at_a_time() {
    let engine = threaded(8);
    let spaces: Vec<Resource<Scratch>> = (0..3).map(|_| engine.resource(Scratch::default())).collect();
    for n in 0..300usize {
        let space = spaces[n % 3].clone();
        let variable = space.variable().clone();
        let work = move || {
            let mut space = space.write()?;
            let bytes = space.bytes(1 + n % 100);
            bytes.fill(n as u8);
            std::thread::yield_now();
            assert!(bytes.len() == 1 + n % 100 && bytes.iter().all(|&byte| byte == n as u8));
            Ok(())
        };
        engine.push(Op::new("use").mutates(&[&variable]), work).unwrap();
    }
    engine.wait_for_all().unwrap();
}

#[test]
fn a_resource_is_freed_after_its_last_use() {
    let (engine, release) = held_up();
    let value = Arc::new(5);
    let (alive, resource): (Weak<_>, _) = (Arc::downgrade(&value), engine.resource(value));
    let (reader, variable) = (resource.clone(), resource.variable().clone());
    let read = move || {
        assert_eq!(**reader.read()?, 5);
        Ok(())
    };
    engine.push(Op::new("read").reads(&[&variable]), read).unwrap();
    resource.delete(&engine).unwrap();
    assert!(alive.upgrade().is_some(), "its reader has not run");
    drop(release);
    engine.wait_for_all().unwrap();
    assert!(alive.upgrade().is_none());
}

#[test]
fn a_resource_that_was_not_named_is_an_error_and_not_a_race() {
    let engine = threaded(1);
    let resource = engine.resource(0);
    let held = resource.write().unwrap();
    let other = resource.clone();
    let careless = move || {
        *other.write()? += 1;
        Ok(())
    };
    engine.push(Op::new("careless"), careless).unwrap();
    let failed = engine.wait_for_all().unwrap_err();
    assert!(matches!(&failed, Error::Failed { op, .. } if op == "careless"), "{failed}");
    assert!(failed.to_string().contains("in use"), "{failed}");
    drop(held);
}
