//! Poison: how far it goes, who hears of it, and when it ends.

use std::error::Error as _;

use super::*;
use crate::engine::Error;

fn message(outcome: crate::engine::Result<()>) -> String {
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
        // b holds what was never computed, and whoever waits for it must know.
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
