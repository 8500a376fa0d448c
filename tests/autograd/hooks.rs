//! Hooks: on gradients, on nodes, after accumulation, on saved values; kept gradients.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use phalanx_autograd::{Error, Options, Result, SavedHooks, Slot, Var, backward, saved_hooks};
use phalanx_tensor::{Device, Tensor};

use crate::support::{DIRECT, grad_of, leaf, parameter, scale, tensor};

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
