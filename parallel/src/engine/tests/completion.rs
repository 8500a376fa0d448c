//! Operations that complete by callback: order, failures, waits, the end of the engine.

use std::sync::atomic::AtomicBool;

use super::*;

/// Calls an operation's completion from a thread of its own, after `before`.
fn later(before: impl FnOnce() + Send + 'static, completion: Completion) {
    std::thread::spawn(move || {
        before();
        completion.complete(Ok(()));
    });
}

#[test]
fn an_operation_ends_when_its_completion_comes_and_its_worker_goes_on() {
    for (name, engine) in engines().into_iter().filter(|(name, _)| name != "serial") {
        let [a, b] = [(); 2].map(|()| engine.new_variable());
        let completions = Arc::new(Mutex::new(Vec::new()));
        let keep = completions.clone();
        let start = move |completion| {
            keep.lock().unwrap().push(completion);
            Ok(())
        };
        engine.push_async(Op::new("copy").mutates(&[&a]), start).unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let after = ran.clone();
        let use_copy = move || {
            after.store(true, Ordering::SeqCst);
            Ok(())
        };
        engine.push(Op::new("use").reads(&[&a]), use_copy).unwrap();
        // The threads are free: other operations run, all of them.
        engine.push(Op::new("other").mutates(&[&b]), || Ok(())).unwrap();
        engine.wait_for_var(&b).unwrap();
        while completions.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!((a.version(), ran.load(Ordering::SeqCst)), (0, false), "{name}: it has not ended");
        completions.lock().unwrap().pop().unwrap().complete(Ok(()));
        engine.wait_for_all().unwrap();
        assert_eq!((a.version(), ran.load(Ordering::SeqCst)), (1, true), "{name}");
    }
}

#[test]
fn a_completion_that_comes_early_waits_for_the_closure() {
    for (name, engine) in engines() {
        let value = engine.resource(0);
        let (writer, reader, variable) = (value.clone(), value.clone(), value.variable().clone());
        let start = move |completion: Completion| {
            let mut held = writer.write()?;
            completion.complete(Ok(()));
            std::thread::sleep(Duration::from_millis(5));
            *held = 7; // the reader would find the value in use
            Ok(())
        };
        engine.push_async(Op::new("copy").mutates(&[&variable]), start).unwrap();
        let read = move || {
            assert_eq!(*reader.read()?, 7);
            Ok(())
        };
        engine.push(Op::new("read").reads(&[&variable]), read).unwrap();
        assert_eq!(message(engine.wait_for_all()), "ok", "{name}");
    }
}

#[test]
fn whatever_goes_wrong_with_an_operation_or_its_completion_is_its_failure() {
    type Start = fn(Completion) -> Result<(), crate::engine::Cause>;
    let cases: [(&str, Start); 6] = [
        ("failed: the stream is lost", |completion| {
            std::thread::spawn(move || completion.complete(Err("the stream is lost".into())));
            Ok(())
        }),
        ("failed: no such file", |completion| {
            later(|| (), completion);
            Err("no such file".into())
        }),
        ("failed: no such file", |_| Err("no such file".into())),
        ("failed: its completion was dropped before it was called", |completion| {
            drop(completion);
            Ok(())
        }),
        ("panicked: oh", |_| std::panic::resume_unwind(Box::new("oh"))),
        ("panicked: oh", |completion| {
            later(|| (), completion);
            std::panic::resume_unwind(Box::new("oh"))
        }),
    ];
    for (name, engine) in engines() {
        for (wanted, start) in cases {
            let [a, b] = [(); 2].map(|()| engine.new_variable());
            engine.push_async(Op::new("copy").mutates(&[&a]), start).unwrap();
            engine.push_async(Op::new("skipped").reads(&[&a]).mutates(&[&b]), |_| panic!("it ran")).unwrap();
            let said = message(engine.wait_for_var(&b));
            assert_eq!(said, format!("engine: `copy` {wanted}"), "{name}");
            assert_eq!([&a, &b].map(Variable::version), [1, 0]);
            assert_ne!(message(engine.wait_for_all()), "ok");
        }
    }
}

#[test]
fn the_end_of_an_engine_waits_for_completions() {
    for (name, engine) in engines() {
        let (variable, done) = (engine.new_variable(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..20 {
            let done = done.clone();
            let start = move |completion| {
                let work = move || {
                    std::thread::sleep(Duration::from_micros(200));
                    done.fetch_add(1, Ordering::SeqCst);
                };
                later(work, completion);
                Ok(())
            };
            engine.push_async(Op::new("copy").mutates(&[&variable]), start).unwrap();
        }
        drop(engine);
        assert_eq!(done.load(Ordering::SeqCst), 20, "{name}");
    }
}

#[test]
fn a_task_that_its_executor_drops_fails() {
    struct Drops;
    impl Executor for Drops {
        fn execute(&self, task: Task) {
            assert_eq!((task.name(), task.priority(), task.lane()), ("op", 3, Some(Lane::Priority)));
            drop(task);
        }
    }
    let engine = Engine::new(Policy::Custom(Box::new(Drops))).unwrap();
    let variable = engine.new_variable();
    engine.push(Op::new("op").mutates(&[&variable]).priority(3).on(Lane::Priority), || Ok(())).unwrap();
    let said = message(engine.wait_for_var(&variable));
    assert_eq!(said, "engine: `op` failed: its executor dropped it before it ran");
}

#[test]
fn with_mxnets_rule_a_wait_heals_all_that_its_failure_poisoned() {
    for (name, engine) in engines() {
        let engine = engine.with_error_clearing(ErrorClearing::Failure);
        let [a, b, c] = [(); 3].map(|()| engine.new_variable());
        fail(&engine, "load", &a);
        engine.push(Op::new("copy").reads(&[&a]).mutates(&[&b]), || Ok(())).unwrap();
        fail(&engine, "other", &c);
        // a and b share one failure, which the first wait throws; c has another.
        assert_eq!(message(engine.wait_to_read(&b)), "engine: `load` failed: load said no", "{name}");
        assert_eq!(message(engine.wait_for_var(&a)), "ok", "{name}");
        assert_eq!(message(engine.wait_for_var(&c)), "engine: `other` failed: other said no", "{name}");
        assert_eq!(message(engine.wait_for_all()), "ok", "{name}");
    }
}
