//! Leaves: slots, buffers that others own, tensors that are replaced, values modified after they were saved. Hooks on
//! gradients, nodes, accumulation and saved values.

use std::any::Any;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use phalanx_autograd::{Error, Leaf, Options, Result, SavedHooks, Slot, Var, backward, saved_hooks};
use phalanx_kernels as kernels;
use phalanx_tensor::{Category, DType, Device, Tensor};

use crate::support::{DIRECT, grad_of, leaf, numbers, parameter, scale, tensor};

/// The error that backward of `loss` must end with: operation and value.
fn modified(loss: &Var) -> (&'static str, String) {
    match loss.backward() {
        Err(Error::Modified { op, value, .. }) => (op, value),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_leaf_modified_after_it_was_saved_is_named() {
    let (x, w) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
    let y = x.mul(&w).unwrap().sum_all().unwrap();
    kernels::fill_(&mut w.as_leaf().unwrap().tensor(), 0.0).unwrap();
    assert_eq!(modified(&y), ("mul", "input 1".into()));
    let y = x.add(&w).unwrap().sum_all().unwrap();
    kernels::fill_(&mut w.as_leaf().unwrap().tensor(), 1.0).unwrap();
    y.backward().unwrap();
}

#[test]
fn intermediate_inputs_and_outputs_modified_after_they_were_saved_are_named() {
    let x = leaf(&[1.0, 2.0]);
    let y = x.tanh().unwrap();
    let z = y.mul(&x).unwrap().sum_all().unwrap();
    kernels::fill_(&mut y.tensor().narrow(0, 0, 1).unwrap(), 0.0).unwrap();
    assert_eq!(modified(&z), ("mul", "input 0".into()));
    let y = x.tanh().unwrap();
    kernels::fill_(&mut y.tensor().clone(), 0.0).unwrap();
    assert_eq!(modified(&y.sum_all().unwrap()), ("tanh", "output 0".into()));
}

#[test]
fn the_first_gradient_is_stored_and_further_ones_added() {
    let w = parameter(&[1.0, 2.0], Device::CPU);
    let run = || w.var().mul_scalar(3.0).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(w.grad().is_none());
    run();
    run();
    assert_eq!(w.grad().unwrap().to_vec::<f64>().unwrap(), [6.0; 2]);
    assert_eq!(w.grad().unwrap().tensor().storage().category(), Category::Gradients);
    // A gradient handed out is not written to.
    let held = w.grad().unwrap();
    run();
    assert_eq!(
        (held.to_vec::<f64>().unwrap(), w.grad().unwrap().to_vec::<f64>().unwrap()),
        (vec![6.0; 2], vec![9.0; 2])
    );
    w.zero_grad().unwrap();
    assert!(w.grad().is_none());
}

#[test]
fn a_slot_does_not_alias_the_gradient_that_came() {
    let (a, b) = (parameter(&[1.0], Device::CPU), parameter(&[1.0], Device::CPU));
    let sum = || a.var().add(&b.var()).unwrap();
    sum().backward().unwrap();
    a.var().mul_scalar(5.0).unwrap().backward().unwrap();
    assert_eq!(
        (a.grad().unwrap().item::<f64>().unwrap(), b.grad().unwrap().item::<f64>().unwrap()),
        (6.0, 1.0)
    );
    let root = Var::new(tensor(&[1.0], Device::CPU));
    sum().backward_with(root.clone()).unwrap();
    sum().backward_with(root.clone()).unwrap();
    assert_eq!(root.item::<f64>().unwrap(), 1.0);
}

#[test]
fn narrow_models_gather_gradients_in_one_wide_buffer() {
    let shapes = [3usize, 5];
    let buffer = Tensor::zeros(&[8], DType::F32, Device::CPU).unwrap();
    let narrow =
        |seed: u64, n: usize| kernels::cast(&tensor(&numbers(seed, n), Device::CPU), DType::BF16).unwrap();
    let leaves: Vec<Leaf> =
        shapes.iter().zip([0, 1]).map(|(&n, s)| Leaf::new(narrow(s, n), true).unwrap()).collect();
    for (leaf, at) in leaves.iter().zip([0, 3]) {
        leaf.set_slot(Slot::Into(buffer.view_into(at, &[leaf.tensor().numel()]).unwrap())).unwrap();
    }
    // 2^-9 is lost next to 1 in bf16, not in f32.
    let step = |factor: f64| {
        for leaf in &leaves {
            leaf.var().mul_scalar(factor).unwrap().sum_all().unwrap().backward().unwrap();
        }
    };
    step(1.0);
    step(1.0 / 512.0);
    assert_eq!(buffer.to_vec::<f32>().unwrap(), [1.0 + 1.0 / 512.0; 8]);
    assert_eq!(leaves[1].grad().unwrap().dtype(), DType::F32);
    leaves[0].zero_grad().unwrap();
    assert_eq!(buffer.to_vec::<f32>().unwrap()[2..4], [0.0, 1.0 + 1.0 / 512.0]);
    let wide = Leaf::new(narrow(0, 3), true).unwrap();
    assert!(wide.set_slot(Slot::Owned(Some(DType::I64))).is_err());
    wide.set_slot(Slot::Owned(Some(DType::F32))).unwrap();
    wide.var().sum_all().unwrap().backward().unwrap();
    wide.var().mul_scalar(1.0 / 512.0).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(wide.grad().unwrap().to_vec::<f32>().unwrap(), [1.0 + 1.0 / 512.0; 3]);
}

#[test]
fn a_buffer_must_fit() {
    let w = parameter(&[1.0, 2.0], Device::CPU);
    for (shape, dtype, device) in
        [(3, DType::F64, Device::CPU), (2, DType::I64, Device::CPU), (2, DType::F64, Device::Cpu(1))]
    {
        let buffer = Tensor::zeros(&[shape], dtype, device).unwrap();
        assert!(matches!(w.set_slot(Slot::Into(buffer)), Err(Error::Gradient { op: "set_slot", .. })));
    }
    assert!(Leaf::new(Tensor::zeros(&[1], DType::I64, Device::CPU).unwrap(), true).is_err());
}

#[test]
fn storage_may_go_and_come_back_between_forward_and_backward() {
    let device = Device::Cpu(35);
    let values = numbers(7, 1000);
    let (x, w) = (crate::support::leaf_on(&numbers(8, 1000), device), parameter(&values, device));
    let now = || device.ledger().unwrap().total().now;
    let held = now();
    let loss = x.mul(&w.var()).unwrap().sum_all().unwrap();
    let recorded = now();
    w.set_tensor(Tensor::empty(&[0], DType::F64, device).unwrap()).unwrap();
    assert_eq!(recorded - now(), 8000, "the graph holds no reference to the storage");
    assert!(now() < held);
    w.set_tensor(tensor(&values, device)).unwrap();
    loss.backward().unwrap();
    assert_eq!(grad_of(&x), values);
    // Modified after it was put back, and before: both count.
    let loss = x.mul(&w.var()).unwrap().sum_all().unwrap();
    w.set_tensor(tensor(&values, device)).unwrap();
    kernels::fill_(&mut w.tensor(), 0.0).unwrap();
    w.set_tensor(tensor(&values, device)).unwrap();
    assert_eq!(modified(&loss), ("mul", "input 1".into()));
    assert!(w.set_tensor(tensor(&[1.0], device)).is_err());
}

#[test]
fn a_stashed_value_comes_back_with_its_version_and_no_other_is_taken_for_it() {
    let w = parameter(&[2.0, 3.0], Device::CPU);
    let x = leaf(&[5.0, 7.0]);
    let before = x.mul(&w.var()).unwrap().sum_all().unwrap();
    let old = w.stash();
    w.set_tensor(w.tensor().copy().unwrap()).unwrap();
    kernels::fill_(&mut w.tensor(), 4.0).unwrap();
    let (after, new) = (x.mul(&w.var()).unwrap().sum_all().unwrap(), w.stash());
    assert_eq!(modified(&before), ("mul", "input 1".into()), "the leaf holds the new value");
    w.restore(&old).unwrap();
    assert_eq!(modified(&after), ("mul", "input 1".into()), "the leaf holds the old value");
    let grad = |loss: &Var| {
        x.as_leaf().unwrap().zero_grad().unwrap();
        loss.backward().unwrap();
        grad_of(&x)
    };
    let before = x.mul(&w.var()).unwrap().sum_all().unwrap();
    w.restore(&new).unwrap();
    let after = x.mul(&w.var()).unwrap().sum_all().unwrap();
    w.restore(&old).unwrap();
    assert_eq!(grad(&before), [2.0, 3.0]);
    w.restore(&new).unwrap();
    assert_eq!(grad(&after), [4.0, 4.0]);
    // Written after it was stashed: found.
    let after = x.mul(&w.var()).unwrap().sum_all().unwrap();
    kernels::fill_(&mut w.tensor(), 1.0).unwrap();
    w.restore(&old).unwrap();
    w.restore(&new).unwrap();
    assert_eq!(modified(&after), ("mul", "input 1".into()));
    let other = parameter(&[1.0], Device::CPU);
    assert!(other.restore(&new).unwrap_err().to_string().contains("set_tensor"), "another leaf's");
}

// Hooks: on gradients, on nodes, after accumulation, on saved values; kept gradients.

#[test]
fn a_gradient_hook_replaces_until_it_is_removed() {
    let x = leaf(&[3.0]);
    let run = |hook: bool| {
        let y = x.mul_scalar(2.0).unwrap();
        let handle = y.on_grad(|g| Ok(Some(g.mul_scalar(10.0)?))).unwrap();
        if !hook {
            handle.remove();
            handle.remove();
        }
        y.mul(&y).unwrap().backward().unwrap();
        let got = grad_of(&x)[0];
        x.as_leaf().unwrap().set_grad(None);
        got
    };
    assert_eq!((run(true), run(false)), (240.0, 24.0));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = seen.clone();
    let handle = x
        .on_grad(move |g| {
            kept.lock().unwrap().push(g.item::<f64>()?);
            Ok(None)
        })
        .unwrap();
    run(false);
    handle.remove();
    run(false);
    assert_eq!(*seen.lock().unwrap(), [24.0], "a leaf's hook sees the whole gradient, once a pass");
    assert!(x.detach().on_grad(|_| Ok(None)).is_none());
}

#[test]
fn a_replacement_that_does_not_fit_and_a_refusal_are_errors() {
    let x = leaf(&[3.0]);
    let y = x.tanh().unwrap();
    y.on_grad(|_| Ok(Some(Var::new(tensor(&[1.0, 2.0], Device::CPU))))).unwrap();
    assert!(matches!(y.backward(), Err(Error::Gradient { op: "tanh", .. })));
    let y = x.tanh().unwrap();
    y.on_backward(|_, _| Err(Error::Custom("no".into()))).unwrap();
    assert!(matches!(y.backward(), Err(Error::Custom(why)) if why == "no"));
}

#[test]
fn a_node_hook_sees_gradients_of_outputs_and_inputs() {
    let (x, w) = (leaf(&[3.0]), leaf(&[5.0]));
    let y = x.mul(&w).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = seen.clone();
    y.on_backward(move |outputs, inputs| {
        let numbers = outputs.iter().chain(inputs).flatten().map(|g| g.item::<f64>());
        kept.lock().unwrap().extend(numbers.collect::<Result<Vec<_>>>()?);
        Ok(())
    })
    .unwrap();
    y.mul_scalar(2.0).unwrap().backward().unwrap();
    assert_eq!(*seen.lock().unwrap(), [2.0, 10.0, 6.0]);
}

#[test]
fn accumulation_hooks_run_once_after_the_sum_and_may_register_more() {
    let x = parameter(&[2.0], Device::CPU);
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let handle = x.on_accumulate(move |leaf| {
        let inner = count.clone();
        count.fetch_add(1, Relaxed);
        leaf.as_leaf().unwrap().on_accumulate(move |_| {
            inner.fetch_add(100, Relaxed);
            Ok(())
        });
        assert_eq!(leaf.grad().unwrap().item::<f64>()?, 6.0);
        Ok(())
    });
    let v = x.var();
    v.mul(&v).unwrap().add(&v.mul_scalar(2.0).unwrap()).unwrap().backward().unwrap();
    assert_eq!(runs.load(Relaxed), 1);
    handle.remove();
    x.set_grad(None);
    x.var().mul_scalar(6.0).unwrap().backward().unwrap();
    assert_eq!(runs.load(Relaxed), 101);
}

#[test]
fn hooks_of_a_leaf_see_gradients_that_go_into_a_buffer() {
    let buffer = Tensor::zeros(&[1], phalanx_tensor::DType::F64, Device::CPU).unwrap();
    let w = parameter(&[5.0], Device::CPU);
    w.set_slot(Slot::Into(buffer.clone())).unwrap();
    let x = leaf(&[3.0]);
    let before = DIRECT.get();
    let accumulated = Arc::new(AtomicUsize::new(0));
    let count = accumulated.clone();
    w.on_accumulate(move |_| {
        count.fetch_add(1, Relaxed);
        Ok(())
    });
    scale(&x, &w.var()).unwrap().backward().unwrap();
    assert_eq!((DIRECT.get() - before, accumulated.load(Relaxed)), (1, 1), "written by the operation itself");
    let hook = w.var().on_grad(|g| Ok(Some(g.mul_scalar(100.0)?))).unwrap();
    scale(&x, &w.var()).unwrap().backward().unwrap();
    hook.remove();
    assert_eq!((DIRECT.get() - before, accumulated.load(Relaxed)), (1, 2), "a hook wants to see it first");
    // Two contributions in one pass are summed first.
    let v = w.var();
    scale(&scale(&x, &v).unwrap(), &v).unwrap().backward().unwrap();
    assert_eq!(DIRECT.get() - before, 1);
    assert_eq!(buffer.to_vec::<f64>().unwrap(), [3.0 + 300.0 + 30.0]);
}

#[test]
fn retained_gradients_of_intermediate_values() {
    let x = leaf(&[3.0]);
    let y = x.mul(&x).unwrap();
    y.retain_grad();
    y.on_grad(|g| Ok(Some(g.mul_scalar(2.0)?))).unwrap();
    let z = y.mul_scalar(5.0).unwrap();
    backward(&[(z.clone(), None)], Options { retain_graph: true, ..Options::default() }).unwrap();
    assert_eq!(grad_of(&y), [10.0], "after the hooks");
    assert!(z.grad().is_none());
    y.retain_grad();
    assert_eq!(grad_of(&y), [10.0]);
}

/// Keeps saved values as text, and counts.
struct Text(AtomicUsize, AtomicUsize);

impl SavedHooks for Text {
    fn pack(&self, tensor: &Tensor) -> Result<Box<dyn Any + Send + Sync>> {
        self.0.fetch_add(1, Relaxed);
        let text: Vec<String> = tensor.to_vec::<f64>()?.iter().map(f64::to_string).collect();
        Ok(Box::new(text))
    }

    fn unpack(&self, packed: &(dyn Any + Send + Sync)) -> Result<Tensor> {
        self.1.fetch_add(1, Relaxed);
        let text = packed.downcast_ref::<Vec<String>>().unwrap();
        let values: Vec<f64> = text.iter().map(|t| t.parse().unwrap()).collect();
        Ok(tensor(&values, Device::CPU))
    }
}

#[test]
fn saved_values_are_packed_and_unpacked_leaves_are_not() {
    let text = Arc::new(Text(AtomicUsize::new(0), AtomicUsize::new(0)));
    let x = leaf(&[0.1, 0.7]);
    let forward = |x: &Var| x.tanh()?.mul(x)?.sum_all();
    forward(&x).unwrap().backward().unwrap();
    let wanted = grad_of(&x);
    x.as_leaf().unwrap().set_grad(None);
    let y = {
        let _hooks = saved_hooks(text.clone());
        forward(&x).unwrap()
    };
    assert_eq!(text.0.load(Relaxed), 2, "tanh's output, twice: for tanh and for mul; x is a leaf");
    y.backward().unwrap();
    assert_eq!((grad_of(&x), text.1.load(Relaxed)), (wanted, 2));
    forward(&x).unwrap();
    assert_eq!(text.0.load(Relaxed), 2, "the guard has ended");
}
