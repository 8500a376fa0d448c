//! Operations declared once, bulks of operations, and the profile of what ran.

use super::super::{Ending, OpEvent};
use super::*;

#[test]
fn a_declared_operation_runs_as_often_as_it_is_pushed() {
    for (name, engine) in engines() {
        let (sum, other) = (engine.resource(0u64), engine.resource(1u64));
        let (a, b) = (sum.clone(), other.clone());
        let (reads, mutates) = ([other.variable(), sum.variable()], [sum.variable()]);
        let op = Op::new("sum").reads(&reads).mutates(&mutates).priority(2);
        let add = engine.declare(op, move || {
            *a.write()? += *b.read()?;
            Ok(())
        });
        let (add, c) = (add.unwrap(), other.clone());
        let double =
            engine.declare_async(Op::new("double").mutates(&[other.variable()]), move |completion| {
                *c.write()? *= 2;
                std::thread::spawn(move || completion.complete(Ok(())));
                Ok(())
            });
        let double = double.unwrap();
        for _ in 0..10 {
            engine.push_operation(&add).unwrap();
            engine.push_operation(&add.with_priority(-1)).unwrap();
            engine.push_operation(&double).unwrap();
        }
        drop((add, double));
        engine.wait_for_all().unwrap();
        assert_eq!((*sum.read().unwrap(), *other.read().unwrap()), (2 * 1023, 1024), "{name}");
        assert_eq!((sum.variable().version(), other.variable().version()), (20, 10), "{name}");
    }
}

#[test]
fn a_declared_operation_fails_and_is_refused_as_others_are() {
    let (engine, other) = (threaded(1), threaded(1));
    let variable = engine.new_variable();
    let fails = engine.declare(Op::new("load").mutates(&[&variable]), || Err("no such file".into())).unwrap();
    engine.push_operation(&fails).unwrap();
    assert_eq!(message(engine.wait_for_var(&variable)), "engine: `load` failed: no such file");
    assert_eq!(message(other.push_operation(&fails)), "engine: `load` was declared by another engine");
    assert!(matches!(
        other.declare(Op::new("op").reads(&[&variable]), || Ok(())),
        Err(Error::Foreign { .. })
    ));
    engine.delete_variable(&variable, || ()).unwrap();
    assert!(matches!(engine.push_operation(&fails), Err(Error::Deleted { .. })));
    assert_eq!(message(engine.wait_for_all()), "ok");
}

#[test]
fn a_bulk_is_handed_over_when_it_is_full_or_its_lane_changes_or_its_thread_waits() {
    let engine = threaded(1);
    engine.start_profile();
    let variable = engine.new_variable();
    let push = |lane: Lane| engine.push(Op::new("op").mutates(&[&variable]).on(lane), || Ok(())).unwrap();
    {
        let _bulk = engine.bulk(4);
        (0..6).for_each(|_| push(Device::CPU.into())); // 4 and 2
        (0..3).for_each(|_| push(Lane::Priority)); // 3
        push(Device::CPU.into());
        engine.wait_for_var(&variable).unwrap(); // 1
        assert_eq!(variable.version(), 10);
        engine
            .push_async(Op::new("async").mutates(&[&variable]), |c| {
                c.complete(Ok(()));
                Ok(())
            })
            .unwrap();
        push(Device::CPU.into()); // 1
    }
    push(Device::CPU.into());
    engine.wait_for_all().unwrap();
    let names: Vec<String> = engine.take_profile().events.into_iter().map(|event| event.name).collect();
    let bulks = [4, 2, 3, 1].map(|count| format!("bulk of {count}"));
    let wanted = bulks.into_iter().chain(["async", "bulk of 1", "op"].map(String::from));
    assert_eq!(names, wanted.collect::<Vec<_>>());
}

#[test]
fn operations_of_a_bulk_fail_by_themselves() {
    for (name, engine) in engines() {
        let [a, b, c, d] = [(); 4].map(|()| engine.new_variable());
        let bulk = engine.bulk(10);
        engine.push(Op::new("fine").mutates(&[&a]), || Ok(())).unwrap();
        fail(&engine, "first", &b);
        fail(&engine, "second", &c);
        engine
            .push(Op::new("skipped").reads(&[&c, &b]).mutates(&[&d]), || panic!("it must not run"))
            .unwrap();
        engine.push(Op::new("fine").mutates(&[&a]), || Ok(())).unwrap();
        drop(bulk);
        assert_eq!(message(engine.wait_for_var(&a)), "ok", "{name}");
        assert_eq!(message(engine.wait_for_var(&d)), "engine: `first` failed: first said no", "{name}");
        assert_eq!(message(engine.wait_for_var(&c)), "engine: `second` failed: second said no", "{name}");
        assert_eq!([&a, &b, &c, &d].map(Variable::version), [2, 1, 1, 0], "{name}");
        engine.delete_variable(&a, || ()).unwrap();
        let _bulk = engine.bulk(10);
        assert!(matches!(engine.push(Op::new("late").reads(&[&a]), || Ok(())), Err(Error::Deleted { .. })));
        assert_eq!(message(engine.wait_for_all()), "engine: `first` failed: first said no", "{name}");
    }
}

#[test]
fn a_profile_has_names_lanes_order_dependencies_and_endings() {
    for (name, engine) in engines() {
        engine.push(Op::new("before"), || Ok(())).unwrap();
        engine.wait_for_all().unwrap();
        engine.start_profile();
        let [a, b] = [(); 2].map(|()| engine.new_variable());
        engine.push(Op::new("write").mutates(&[&a]).on(Device::Cpu(1)), || Ok(())).unwrap();
        engine.push(Op::new("read 1").reads(&[&a]), || Ok(())).unwrap();
        engine.push(Op::new("read 2").reads(&[&a]).mutates(&[&b]), || Ok(())).unwrap();
        fail(&engine, "rewrite", &a);
        engine.push_async(Op::new("skipped").reads(&[&a, &b]), |_| Ok(())).unwrap();
        let _ = engine.wait_for_all();
        let profile = engine.take_profile();
        let number = profile.events[0].number;
        let summary = |event: &OpEvent| {
            let depends_on: Vec<u64> = event.depends_on.iter().map(|other| other - number).collect();
            (event.name.clone(), depends_on, event.ending)
        };
        let wanted = [
            ("write", vec![], Ending::Done),
            ("read 1", vec![0], Ending::Done),
            ("read 2", vec![0], Ending::Done),
            ("rewrite", vec![1, 2], Ending::Failed),
            ("skipped", vec![2, 3], Ending::Skipped),
        ];
        let wanted = wanted.map(|(name, depends_on, ending)| (name.to_string(), depends_on, ending));
        assert_eq!(profile.events.iter().map(summary).collect::<Vec<_>>(), wanted, "{name}");
        assert_eq!(profile.events[0].lane, Some(Lane::Device(Device::Cpu(1))));
        for event in &profile.events {
            let ends = event.depends_on.iter().map(|other| profile.events[(other - number) as usize].end);
            assert!(
                event.begin < event.end && ends.max() < Some(event.begin).max(Some(1)),
                "{name}: {event:?}"
            );
        }
        let trace = profile.to_chrome_trace();
        let rows = trace.as_array().unwrap();
        let count = |phase: &str| rows.iter().filter(|row| row["ph"] == phase).count();
        assert_eq!([count("X"), count("M"), count("s"), count("f")], [5, 2, 6, 6], "{name}");
        assert!(engine.take_profile().events.is_empty(), "{name}: the recording has ended");
    }
}

#[test]
fn operations_overlap_if_one_begins_before_the_other_ends() {
    let engine = threaded(2);
    engine.start_profile();
    let barrier = Arc::new(std::sync::Barrier::new(2));
    for name in ["left", "right"] {
        let barrier = barrier.clone();
        let meet = move || {
            barrier.wait(); // passes only if both are under way
            Ok(())
        };
        engine.push(Op::new(name), meet).unwrap();
    }
    engine.wait_for_all().unwrap();
    engine.push(Op::new("after"), || Ok(())).unwrap();
    engine.wait_for_all().unwrap();
    let profile = engine.take_profile();
    let [left, right, after] = &profile.events[..] else { panic!("{profile:?}") };
    assert!(left.overlaps(right) && right.overlaps(left));
    assert!(!left.overlaps(after) && !after.overlaps(right));
    let (beside, total) = profile.overlap("left", "right");
    assert!(beside > Duration::ZERO && beside <= total);
}
