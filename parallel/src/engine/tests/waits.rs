//! Waiting, deleting, ending.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::engine::Error;

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
