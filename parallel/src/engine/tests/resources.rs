//! Values with a variable: random streams, scratch space.

use std::sync::{Arc, Mutex, Weak};

use phalanx_tensor::RngKey;

use super::*;
use crate::engine::Error;
use crate::engine::{Generator, Resource, Scratch};

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
