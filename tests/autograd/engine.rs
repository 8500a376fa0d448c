//! The engine: long chains, shared leaves, errors, panics, re-entry, what is freed when; on several devices the bits of
//! one.

use phalanx_autograd::{
    Cx, Error, Function, Grads, Leaf, Options, Result, SavedVariable, Var, backward, detect_anomaly, grad,
    grads1,
};
use phalanx_kernels as kernels;
use phalanx_tensor::{Device, Tensor};

use crate::support::{Misbehave, grad_bits, grad_of, leaf, leaf_on, numbers, parameter, tensor};

/// Runs `f` on a thread with a stack of 2 MiB.
fn on_small_stack(f: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(2 << 20).spawn(f).unwrap().join().unwrap();
}

const LONG: usize = 1_000_000;

#[test]
fn a_chain_of_a_million_operations_runs_and_drops_on_a_small_stack() {
    on_small_stack(|| {
        let x = leaf(&[1.0]);
        let chain = |n: usize| (0..n).fold(x.clone(), |y, _| y.add_scalar(1.0).unwrap());
        let y = chain(LONG);
        y.backward().unwrap();
        assert_eq!((y.item::<f64>().unwrap(), grad_of(&x)), (1.0 + LONG as f64, vec![1.0]));
        drop(y);
        drop(chain(LONG));
        let dx = grad(&[(chain(LONG), None)], &[&x], Options::default()).unwrap();
        assert_eq!(dx[0].as_ref().unwrap().item::<f64>().unwrap(), 1.0);
    });
}

/// The identity, which keeps its input as a value with a graph of its own.
struct Keep(#[expect(dead_code, reason = "kept, to be dropped")] Var);

impl Function for Keep {
    fn name(&self) -> &'static str {
        "keep"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, cx: &Cx<'_>, _: &[SavedVariable]) -> Result<Grads> {
        grads1(cx.dy().clone())
    }
}

#[test]
fn long_chains_through_saved_values_and_second_derivatives_drop_on_a_small_stack() {
    on_small_stack(|| {
        let x = leaf(&[1.0]);
        // The function's input is a constant: only what it keeps leads back.
        let hop = |y: Var| Keep(y).apply(&[&x]).unwrap().remove(0);
        drop((0..100_000).fold(x.clone(), |y, _| hop(y)));
        let y = (0..50_000).fold(x.clone(), |y, _| y.mul(&x).unwrap());
        let options = Options { create_graph: true, ..Options::default() };
        let dx = grad(&[(y.clone(), None)], &[&x], options).unwrap()[0].clone().unwrap();
        assert_eq!(dx.item::<f64>().unwrap(), 50_001.0);
        let ddx = grad(&[(dx, None)], &[&x], Options::default()).unwrap()[0].clone().unwrap();
        assert_eq!(ddx.item::<f64>().unwrap(), 50_001.0 * 50_000.0);
    });
}

#[test]
fn errors_say_what_was_wrong() {
    let x = leaf(&[1.0, 2.0]);
    assert!(matches!(x.detach().backward(), Err(Error::NoGraph)));
    assert!(matches!(x.tanh().unwrap().backward(), Err(Error::NotScalar { shape }) if shape == [2]));
    let wrong = Var::new(tensor(&[1.0], Device::CPU));
    let error = x.tanh().unwrap().backward_with(wrong).unwrap_err().to_string();
    assert_eq!(error, "tanh: got a gradient of [1] f64 on cpu:0, wanted [2] f64 on cpu:0");
    let y = x.tanh().unwrap().sum_all().unwrap();
    y.backward().unwrap();
    let error = y.backward().unwrap_err();
    assert!(matches!(error, Error::Freed { .. }), "{error}");
}

#[test]
fn a_retained_graph_runs_again_and_gives_the_same() {
    let x = leaf(&[0.3, -0.4]);
    let y = x.tanh().unwrap().sum_all().unwrap();
    backward(&[(y.clone(), None)], Options { retain_graph: true, ..Options::default() }).unwrap();
    let once = grad_of(&x);
    y.backward().unwrap();
    assert_eq!(grad_of(&x), once.iter().map(|g| g + g).collect::<Vec<_>>());
}

#[test]
fn roots_may_meet_and_lead_to_each_other() {
    let x = leaf(&[2.0]);
    let y = x.mul(&x).unwrap();
    let z = y.mul_scalar(3.0).unwrap();
    let two = Var::new(tensor(&[2.0], Device::CPU));
    backward(&[(y.clone(), None), (z.clone(), None), (y, Some(two)), (z, None)], Options::default()).unwrap();
    assert_eq!(grad_of(&x), [(1.0 + 3.0 + 2.0 + 3.0) * 4.0]);
}

#[test]
fn gradients_of_intermediate_values_leave_slots_alone() {
    let (x, unused) = (leaf(&[2.0]), leaf(&[1.0]));
    let y = x.mul(&x).unwrap();
    let z = y.mul(&y).unwrap();
    let got = grad(&[(z, None)], &[&y, &x, &unused], Options::default()).unwrap();
    assert_eq!(got[0].as_ref().unwrap().item::<f64>().unwrap(), 8.0);
    assert_eq!(got[1].as_ref().unwrap().item::<f64>().unwrap(), 32.0);
    assert!(got[2].is_none() && x.grad().is_none());
}

#[test]
fn two_threads_may_run_backward_over_shared_leaves() {
    let x = leaf(&numbers(1, 64).iter().map(|v| (v * 8.0).round()).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    x.mul_scalar(3.0).unwrap().sum_all().unwrap().backward().unwrap();
                }
            });
        }
    });
    assert_eq!(grad_of(&x), [1200.0; 64]);
}

#[test]
fn two_threads_may_run_one_retained_graph() {
    let x = leaf(&[2.0; 8]);
    let y = x.mul(&x).unwrap().mul_scalar(0.25).unwrap().sum_all().unwrap();
    let retain = Options { retain_graph: true, ..Options::default() };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..100).for_each(|_| backward(&[(y.clone(), None)], retain).unwrap()));
        }
    });
    assert_eq!(grad_of(&x), [200.0; 8]);
}

/// Bytes in use on a device of the test's own.
fn bytes(device: Device) -> usize {
    device.ledger().unwrap().total().now
}

#[test]
fn a_panic_in_backward_is_an_error_and_leaves_nothing_behind() {
    let device = Device::Cpu(30);
    let before = bytes(device);
    for (misbehave, wanted) in [
        (Misbehave(|| panic!("on purpose")), "misbehave: panicked in backward: on purpose"),
        (Misbehave(|| Err(Error::Custom("refused".into()))), "backward of misbehave: refused"),
    ] {
        let x = leaf_on(&numbers(2, 100), device).tanh().unwrap();
        let y = misbehave.apply(&[&x]).unwrap()[0].tanh().unwrap().sum_all().unwrap();
        assert_eq!(y.backward().unwrap_err().to_string(), wanted);
        drop((x, y));
        assert_eq!(bytes(device), before);
    }
    let x = leaf_on(&[1.0], device);
    let y = x.tanh().unwrap();
    y.on_grad(|_| panic!("in a hook")).unwrap();
    assert_eq!(y.backward().unwrap_err().to_string(), "tanh: panicked in backward: in a hook");
    x.tanh().unwrap().backward().unwrap();
}

/// `x²`, whose backward runs a pass of its own.
struct Reentrant;

impl Function for Reentrant {
    fn name(&self) -> &'static str {
        "reentrant"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![kernels::mul(inputs[0], inputs[0])?])
    }

    fn save(&self, ctx: &phalanx_autograd::SaveContext<'_>) -> Result<Vec<SavedVariable>> {
        Ok(vec![ctx.input(0)?])
    }

    fn backward(&self, cx: &Cx<'_>, saved: &[SavedVariable]) -> Result<Grads> {
        let x = Var::leaf(cx.get(&saved[0])?.into_tensor())?;
        let _recorded = phalanx_autograd::enable_grad();
        let far = Device::Cpu(if x.device() == Device::CPU { 1 } else { 0 });
        let y = x.to_device(far)?.mul(&x.to_device(far)?)?;
        y.backward_with(cx.dy().to_device(far)?)?;
        grads1(x.grad().ok_or(Error::NoGraph)?)
    }
}

#[test]
fn backward_inside_backward_runs_on_the_spot() {
    for far in [Device::CPU, Device::Cpu(1)] {
        let x = leaf(&[3.0]);
        let y = Reentrant.apply(&[&x.to_device(far).unwrap()]).unwrap().remove(0);
        y.to_device(Device::CPU).unwrap().backward().unwrap();
        assert_eq!(grad_of(&x), [6.0]);
    }
}

#[test]
fn saved_values_are_freed_as_each_node_finishes_and_the_graph_with_its_results() {
    let device = Device::Cpu(31);
    let before = bytes(device);
    let x = leaf_on(&numbers(3, 1000), device);
    let held = bytes(device);
    let forward = || (0..10).fold(x.clone(), |y, _| y.tanh().unwrap());
    let y = forward();
    assert_eq!(bytes(device) - held, 10 * 8000);
    drop(y);
    assert_eq!(bytes(device), held);
    let y = forward();
    let dy = Var::new(y.tensor().copy().unwrap());
    device.ledger().unwrap().reset_peak();
    let start = bytes(device);
    y.backward_with(dy).unwrap();
    // Ten outputs, the last one held here; each step makes a gradient before it frees an output and the older one.
    assert!(device.ledger().unwrap().total().peak <= start + 2 * 8000, "freed as it goes");
    // Left: x, its gradient, y.
    assert_eq!(bytes(device) - held, 2 * 8000);
    drop((x, y));
    assert_eq!(bytes(device), before);
}

#[test]
fn anomaly_mode_names_the_operation_and_where_it_was_recorded() {
    let _anomaly = detect_anomaly();
    let x = leaf(&[0.0]);
    let infinite = Var::new(tensor(&[f64::INFINITY], Device::CPU));
    let y = a_place_with_a_name(&x, &infinite);
    let Err(Error::Nan { op, recorded }) = y.mul_scalar(0.0).unwrap().backward() else {
        panic!("a NaN was made")
    };
    assert_eq!(op, "mul");
    assert!(
        recorded.trim_start().lines().next().is_some_and(|first| first.contains("a_place_with_a_name")),
        "{recorded}"
    );
    assert!(
        !["phalanx_autograd::", "std::", "core::"].iter().any(|other| recorded.contains(other)),
        "{recorded}"
    );
}

#[inline(never)]
fn a_place_with_a_name(x: &Var, y: &Var) -> Var {
    x.mul(y).unwrap()
}

#[test]
fn an_operation_without_derivative_refuses_to_be_recorded() {
    let x = leaf(&[1.0]);
    let none = |x: &Var| phalanx_autograd::record_none("round", &[x], x.tensor().clone());
    assert!(matches!(none(&x), Err(Error::NotDifferentiable { op: "round" })));
    assert!(none(&x.detach()).is_ok());
    let _plain = phalanx_autograd::no_grad();
    assert!(none(&x).is_ok());
}

#[test]
fn everything_crosses_threads() {
    fn crosses<T: Send + Sync>() {}
    crosses::<Var>();
    crosses::<phalanx_autograd::Leaf>();
    crosses::<Error>();
    crosses::<phalanx_autograd::Slot>();
    crosses::<phalanx_autograd::HookHandle>();
    crosses::<phalanx_autograd::WeightWork>();
    crosses::<phalanx_autograd::Recompute>();
    crosses::<SavedVariable>();
}

// The engine over several devices: a worker each, the bits of one thread.

const WIDTH: usize = 16;

/// A graph without a pattern: each operation takes two earlier values, wherever they are, and runs on a device that
/// `place` chooses. Values are used many times, so gradients meet everywhere.
fn tangle(leaves: &[Leaf], steps: usize, place: impl Fn(usize) -> Device) -> Result<Var> {
    let mut values: Vec<Var> = leaves.iter().map(Leaf::var).collect();
    let picks = numbers(99, 2 * steps);
    for (step, pick) in picks.chunks(2).enumerate() {
        let device = place(step);
        let take = |p: f64| {
            let i = ((p + 1.0) / 2.0 * values.len() as f64) as usize;
            values[i.min(values.len() - 1)].to_device(device)
        };
        let (a, b) = (take(pick[0])?, take(pick[1])?);
        values.push(if step % 3 == 0 { a.mul(&b)? } else { a.add(&b)?.tanh()? });
    }
    let last = values.last().unwrap().to_device(Device::CPU)?;
    let all = values.iter().try_fold(last, |sum, v| sum.add(&v.to_device(Device::CPU)?))?;
    all.sum_all()
}

fn gradients(place: impl Fn(usize) -> Device) -> Vec<Vec<u64>> {
    let leaves: Vec<Leaf> = (0..4).map(|i| parameter(&numbers(i, WIDTH), Device::CPU)).collect();
    for _ in 0..2 {
        tangle(&leaves, 120, &place).unwrap().backward().unwrap();
    }
    leaves.iter().map(grad_bits).collect()
}

#[test]
fn three_devices_give_the_bits_of_one() {
    let one = gradients(|_| Device::CPU);
    for _ in 0..5 {
        assert_eq!(gradients(|step| Device::Cpu((step % 3) as u16)), one);
    }
}

#[test]
fn an_error_or_panic_on_one_worker_ends_all() {
    let devices = [Device::Cpu(32), Device::Cpu(33), Device::Cpu(34)];
    let bytes = || devices.map(|d| d.ledger().unwrap().total().now);
    let before = bytes();
    for (misbehave, wanted) in [
        (Misbehave(|| panic!("on purpose")), "misbehave: panicked in backward: on purpose"),
        (Misbehave(|| Err(Error::Custom("refused".into()))), "backward of misbehave: refused"),
    ] {
        let x = leaf(&numbers(5, 1000));
        let stages = devices.map(|d| x.to_device(d).unwrap().tanh().unwrap());
        let bad = misbehave.apply(&[&stages[1]]).unwrap();
        let [a, _, c] = &stages;
        let a = (0..100).fold(a.clone(), |y, _| y.tanh().unwrap());
        let sum =
            [&a, c].iter().fold(bad[0].clone(), |s, v| s.add(&v.to_device(devices[1]).unwrap()).unwrap());
        let error = sum.sum_all().unwrap().backward().unwrap_err();
        assert_eq!(error.to_string(), wanted);
        drop((stages, bad, a, sum));
        assert_eq!(bytes(), before);
    }
}

#[test]
fn a_missing_copy_is_an_error() {
    let (x, y) = (leaf(&[1.0]), leaf(&[1.0]).to_device(Device::Cpu(1)).unwrap());
    assert!(x.add(&y).unwrap_err().to_string().contains("cpu:0 and cpu:1"));
}
