//! Who runs when, and where.

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
