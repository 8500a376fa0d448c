//! Plain tensor code in a scope: order by the tensors' guards, waits of the scope's thread, errors.

use std::error::Error as _;

use phalanx_tensor::Tensor;

use super::super::scope;
use super::*;

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap()
}

/// `to += from`, slowly, so that what is not ordered shows.
fn add(to: &mut Tensor, from: &Tensor) -> Result<(), crate::engine::Cause> {
    let read = from.read::<f32>("add")?;
    std::thread::yield_now();
    let mut write = to.write::<f32>("add")?;
    write.iter_mut().zip(read.iter()).for_each(|(to, from)| *to += from);
    Ok(())
}

#[test]
fn operations_run_in_an_order_that_their_tensors_allow() {
    for (name, engine) in engines() {
        let engine = Arc::new(engine);
        let [a, b, c] = [1., 2., 3.].map(|x| tensor(&[x; 5]));
        let sums = scope(&engine, |scope| {
            let operation = |name: &'static str, from: &Tensor, to: &Tensor| {
                let (from, mut to) = (from.clone(), to.clone());
                scope.operation(Op::new(name), move || {
                    // A tensor of this run, which no other operation has.
                    let copy = from.copy()?;
                    add(&mut to, &copy)
                })
            };
            let ops = [operation("b += a", &a, &b), operation("c += b", &b, &c), operation("a += c", &c, &a)];
            for n in 0..9 {
                scope.push(&ops[n % 3]).unwrap();
                if n % 4 == 3 {
                    // Plain code of this thread is in order too.
                    add(&mut a.clone(), &b).unwrap();
                }
            }
            [&a, &b, &c].map(|tensor| tensor.to_vec::<f32>().unwrap()[0])
        });
        let mut wanted = [1f32, 2., 3.];
        for n in 0..9 {
            let (from, to) = [(0, 1), (1, 2), (2, 0)][n % 3];
            wanted[to] += wanted[from];
            if n % 4 == 3 {
                wanted[0] += wanted[1];
            }
        }
        assert_eq!(sums.unwrap(), wanted, "{name}");
    }
}

#[test]
fn independent_operations_of_a_scope_run_at_the_same_time() {
    let engine = Arc::new(threaded(2));
    let tensors = [(); 2].map(|()| tensor(&[0.; 2]));
    let barrier = Arc::new(std::sync::Barrier::new(2));
    let outcome = scope(&engine, |scope| {
        let ops = tensors.clone().map(|mut tensor| {
            let (barrier, mut runs) = (barrier.clone(), 0);
            scope.operation(Op::new("meet"), move || {
                tensor.write::<f32>("meet")?[0] += 1.;
                runs += 1;
                if runs > 1 {
                    barrier.wait(); // passes only if both are running
                }
                Ok(())
            })
        });
        for _ in 0..3 {
            ops.iter().for_each(|op| scope.push(op).unwrap());
        }
    });
    outcome.unwrap();
    assert_eq!(tensors.map(|t| t.to_vec::<f32>().unwrap()[0]), [3.; 2]);
}

#[test]
fn a_failed_operation_is_an_error_of_the_read_that_follows() {
    for (name, engine) in engines() {
        let (engine, a) = (Arc::new(engine), tensor(&[1.; 2]));
        let fails_later = |a: &Tensor| {
            let (mut a, mut runs) = (a.clone(), 0);
            move || {
                a.write::<f32>("count")?[0] += 1.;
                runs += 1;
                if runs > 1 { Err("no more".into()) } else { Ok(()) }
            }
        };
        let outcome = scope(&engine, |scope| {
            let op = scope.operation(Op::new("count"), fails_later(&a));
            scope.push(&op).unwrap();
            scope.push(&op).unwrap();
            let error = a.to_vec::<f32>().unwrap_err().to_string();
            assert!(error.contains("engine: `count` failed: no more"), "{name}: {error}");
        });
        outcome.unwrap(); // it was returned
        let outcome = scope(&engine, |scope| {
            let op = scope.operation(Op::new("count"), fails_later(&a));
            (0..2).for_each(|_| scope.push(&op).unwrap());
        });
        assert_eq!(outcome.unwrap_err().source().map(|e| e.to_string()), Some("no more".into()), "{name}");
        let _ = engine.wait_for_all();
        let first =
            scope(&engine, |scope| scope.push(&scope.operation(Op::new("first"), || Err("at once".into()))));
        assert_eq!(message(first.unwrap()), "engine: `first` failed: at once", "{name}");
    }
}

#[test]
fn a_tensor_that_the_first_run_did_not_use_is_refused() {
    for (name, engine) in engines() {
        let (engine, a, b) = (Arc::new(engine), tensor(&[1.; 2]), tensor(&[1.; 3]));
        let (mut first, second, mut runs) = (a.clone(), b.clone(), 0);
        let outcome = scope(&engine, |scope| {
            let op = scope.operation(Op::new("strays"), move || {
                runs += 1;
                let copy = first.copy()?;
                add(&mut first, if runs == 1 { &copy } else { &second })
            });
            (0..2).for_each(|_| scope.push(&op).unwrap());
        });
        let error = message(outcome);
        assert!(
            error.contains("a tensor of shape [3] is read that the first run of `strays`"),
            "{name}: {error}"
        );
        let _ = engine.wait_for_all();
    }
}
