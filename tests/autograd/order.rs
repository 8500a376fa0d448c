//! Order in backward: forks and joins, and the two halves of a split pass.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_autograd::{
    Function, Leaf, Result, Var, backward_inputs, checkpoint, fork, join, no_grad, phony,
};
use phalanx_tensor::{Device, Tensor};

use crate::support::{
    Journal, Misbehave, Note, backwards, grad_bits, leaf, leaf_on, numbers, parameter, tensor,
};

#[test]
fn a_phony_has_no_elements_and_is_cached_per_device_and_need() {
    for device in [Device::Cpu(0), Device::Cpu(1), Device::Meta(0)] {
        for needs in [false, true] {
            let (a, b) = (phony(device, needs).unwrap(), phony(device, needs).unwrap());
            assert_eq!((a.numel(), a.device(), a.requires_grad()), (0, device, needs));
            assert!(a.tensor().shares_storage(b.tensor()));
            assert!(!a.tensor().shares_storage(phony(device, !needs).unwrap().tensor()));
        }
    }
}

#[test]
fn fork_and_join_order_backward() {
    let journal = Journal::default();
    let (a, b) = (leaf(&[1.0]), leaf(&[2.0]));
    let b = Note::new("2", &journal).on(&b).unwrap();
    let a = Note::new("1", &journal).on(&a).unwrap();
    let (_, phony) = fork(&a).unwrap();
    let joined = join(&b, &phony).unwrap();
    let joined = Note::new("3", &journal).on(&joined).unwrap();
    joined.backward().unwrap();
    assert_eq!(backwards(&journal), ["3", "1", "2"]);
}

#[test]
fn a_value_that_only_the_phony_uses_still_runs_with_zeros() {
    let journal = Journal::default();
    let (a, b) = (leaf(&[1.0]), leaf(&[2.0]));
    let (_, phony) = fork(&Note::new("1", &journal).on(&a).unwrap()).unwrap();
    let out = Note::new("2", &journal).on(&join(&b, &phony).unwrap()).unwrap();
    out.backward().unwrap();
    assert_eq!(backwards(&journal), ["2", "1"]);
    assert_eq!(a.grad().unwrap().to_vec::<f64>().unwrap(), [0.0]);
}

/// Two devices, hence two workers: nothing but the join keeps `1` from running while `2` waits for it.
fn order_on_two_devices(tie: bool) -> Vec<String> {
    let journal: Journal = Arc::new(Mutex::default());
    let (cpu0, cpu1) = (Device::Cpu(20), Device::Cpu(21));
    let (a, mut b) = (leaf_on(&[1.0], cpu0), leaf_on(&[2.0], cpu1));
    let (a, phony) = fork(&Note::new("1", &journal).on(&a).unwrap()).unwrap();
    if tie {
        b = join(&b, &phony).unwrap();
    }
    // Tied, it waits in vain.
    let patience = if tie { Duration::from_millis(60) } else { Duration::from_secs(20) };
    let b = Note { patience, after: "1", ..Note::new("2", &journal) }.on(&b).unwrap();
    a.add(&b.to_device(cpu0).unwrap()).unwrap().backward().unwrap();
    backwards(&journal)
}

#[test]
fn a_join_holds_up_the_other_devices_worker() {
    assert_eq!(order_on_two_devices(false), ["1", "2"]);
    assert_eq!(order_on_two_devices(true), ["2", "1"]);
}

#[test]
fn nothing_is_recorded_where_nothing_needs_a_gradient() {
    let constant = Var::new(tensor(&[1.0], Device::CPU));
    let (same, phony) = fork(&constant).unwrap();
    assert!(
        !same.requires_grad() && !phony.requires_grad() && same.tensor().shares_storage(constant.tensor())
    );
    let x = leaf(&[1.0]).tanh().unwrap();
    {
        let _plain = no_grad();
        let (same, phony) = fork(&x).unwrap();
        assert_eq!((same.op(), phony.op()), (Some("tanh"), None));
        assert_eq!(join(&same, &phony).unwrap().op(), Some("tanh"));
    }
    let (forked, phony) = fork(&x).unwrap();
    assert_eq!((forked.op(), phony.op()), (Some("fork"), Some("fork")));
    assert_eq!(join(&forked, &phony).unwrap().op(), Some("join"));
    assert_eq!(join(&x, &same).unwrap().op(), Some("join"), "x requires a gradient");
}

#[test]
fn join_hands_on_the_need_of_a_gradient() {
    let (x, y) = (Var::new(tensor(&[1.0], Device::CPU)), leaf(&[1.0]));
    let (_, phony) = fork(&y).unwrap();
    assert!(join(&x, &phony).unwrap().requires_grad());
    assert!(!join(&x, &phalanx_autograd::phony(Device::CPU, false).unwrap()).unwrap().requires_grad());
}

#[test]
fn a_forked_graph_is_freed_after_backward() {
    let alive = Arc::new(());
    let journal: Journal = Journal::default();
    struct Hold(Note, #[expect(dead_code, reason = "held, to see when it goes")] Arc<()>);
    impl Function for Hold {
        fn name(&self) -> &'static str {
            "hold"
        }
        fn forward(
            &self,
            inputs: &[&phalanx_tensor::Tensor],
        ) -> phalanx_autograd::Result<Vec<phalanx_tensor::Tensor>> {
            self.0.forward(inputs)
        }
        fn backward(
            &self,
            cx: &phalanx_autograd::Cx<'_>,
            saved: &[phalanx_autograd::SavedVariable],
        ) -> phalanx_autograd::Result<phalanx_autograd::Grads> {
            self.0.backward(cx, saved)
        }
    }
    let tied = || {
        let hold = Hold(Note::new("1", &journal), alive.clone());
        let (x, phony) = fork(&hold.apply(&[&leaf(&[1.0])]).unwrap()[0]).unwrap();
        join(&x, &phony).unwrap()
    };
    let x = tied();
    x.backward().unwrap();
    assert_eq!(Arc::strong_count(&alive), 1, "what a node keeps is freed when it has run");
    drop(Misbehave(|| Ok(())).apply(&[&tied()]).unwrap());
    assert_eq!(Arc::strong_count(&alive), 1, "a graph goes with its last result");
}

// Backward in two halves: gradients of activations now, those of parameters later.

const WIDTH: usize = 1000;

/// Layers of a product with a parameter (used twice by every other layer) and some steps without parameters.
fn forward(x: &Var, parameters: &[Leaf], checkpointed: bool) -> Result<Var> {
    let layer = |x: &Var, w: &Leaf, twice: bool| {
        let y = x.mul(&w.var())?.tanh()?.tanh()?.tanh()?.tanh()?;
        if twice { y.add(&w.var().reshape_to(&[WIDTH])?) } else { Ok(y) }
    };
    let mut y = x.clone();
    for (i, w) in parameters.iter().enumerate() {
        let (w, twice) = (w.clone(), i % 2 == 0);
        y = if checkpointed {
            checkpoint(move |v| layer(&v[0], &w, twice), &[&y])?
        } else {
            layer(&y, &w, twice)?
        };
    }
    y.sum_all()
}

fn model(device: Device) -> (Var, Vec<Leaf>) {
    let parameters = (0..5).map(|i| parameter(&numbers(i, WIDTH), device)).collect();
    (leaf_on(&numbers(77, WIDTH), device), parameters)
}

#[test]
fn two_halves_give_the_bits_of_one() {
    for checkpointed in [false, true] {
        let bits = |split: bool| {
            let (x, parameters) = model(Device::CPU);
            for _ in 0..2 {
                let loss = forward(&x, &parameters, checkpointed).unwrap();
                if !split {
                    loss.backward().unwrap();
                    continue;
                }
                let before: Vec<_> = parameters.iter().map(|p| p.grad().map(|g| g.to_vec::<f64>())).collect();
                let work = backward_inputs(&[(loss, None)]).unwrap();
                assert_eq!(work.len(), 8, "a product a layer, and three sums");
                let now: Vec<_> = parameters.iter().map(|p| p.grad().map(|g| g.to_vec::<f64>())).collect();
                assert_eq!(format!("{now:?}"), format!("{before:?}"), "parameters are left for later");
                work.run().unwrap();
            }
            let x = x.as_leaf().unwrap();
            std::iter::once(&x).chain(&parameters).map(grad_bits).collect::<Vec<_>>()
        };
        assert_eq!(bits(true), bits(false), "checkpointed: {checkpointed}");
    }
}

#[test]
fn the_first_half_frees_what_only_it_needs() {
    let device = Device::Cpu(36);
    let (x, parameters) = model(device);
    let loss = forward(&x, &parameters, false).unwrap();
    let now = || device.ledger().unwrap().total().now;
    let start = now();
    let work = backward_inputs(&[(loss, None)]).unwrap();
    // Of a layer's four tanh, all but the last are freed, or all and what is left is the sum. The products' and the
    // sums' gradients have come, and that of x.
    assert!(now() + 8 * WIDTH * 8 <= start, "freed {}", start as isize - now() as isize);
    drop(work);
}

#[test]
fn gradients_of_parameters_do_not_add_to_the_peak_of_the_first_half() {
    const ROWS: usize = 8;
    let peaks = |split: bool| {
        let device = Device::Cpu(if split { 37 } else { 41 });
        let wide = |seed| Tensor::from_slice(&numbers(seed, ROWS * WIDTH), &[ROWS, WIDTH], device).unwrap();
        let parameters: Vec<Leaf> = (0..5).map(|i| Leaf::new(wide(i), true).unwrap()).collect();
        let x = leaf_on(&numbers(9, WIDTH), device);
        let layer = |y: Var, w: &Leaf| y.mul(&w.var())?.sum(&[0], false)?.tanh();
        let loss = parameters.iter().try_fold(x.clone(), layer).unwrap().sum_all().unwrap();
        let ledger = device.ledger().unwrap();
        ledger.reset_peak();
        let start = ledger.total().now;
        let peak = || (ledger.total().peak - start) / (WIDTH * 8);
        if !split {
            loss.backward().unwrap();
            return (peak(), peak());
        }
        let work = backward_inputs(&[(loss, None)]).unwrap();
        let first = peak();
        work.run().unwrap();
        (first, peak())
    };
    let ((first, both), (joint, _)) = (peaks(true), peaks(false));
    // Five gradients of eight rows are left of either.
    assert!(2 * first < joint && both < joint, "halves {first} and {both}, joint {joint} vectors");
}

#[test]
fn hooks_of_views_of_parameters_run_in_the_second_half() {
    let journal = Journal::default();
    let w = parameter(&numbers(1, 4), Device::CPU);
    let view = w.var().reshape_to(&[2, 2]).unwrap();
    let hook = journal.clone();
    view.on_grad(move |_| {
        hook.lock().unwrap().push("view:backward".into());
        Ok(None)
    });
    let x = leaf_on(&[1.0, 2.0], Device::CPU);
    let noted = Note::new("x", &journal).on(&x).unwrap();
    let work = backward_inputs(&[(noted.mul(&view).unwrap().sum_all().unwrap(), None)]).unwrap();
    assert_eq!(backwards(&journal), ["x"]);
    assert!(!work.is_empty());
    work.run().unwrap();
    assert_eq!(backwards(&journal), ["x", "view"]);
    assert!(w.grad().is_some());
}

#[test]
fn weights_may_be_gone_when_the_second_half_runs() {
    let grads = |gone: bool| {
        let x = leaf_on(&numbers(3, 2 * 4 * 6), Device::CPU).reshape(&[2, 4, 6]).unwrap();
        let sizes = [6, 6, 6, 4, 4, 36, 6, 6, 6, 6];
        let w: Vec<Leaf> = (0..).zip(sizes).map(|(i, n)| parameter(&numbers(i, n), Device::CPU)).collect();
        let y = x.layer_norm(&[6], Some(&w[0].var()), Some(&w[1].var()), 1e-5).unwrap();
        let y = y.rms_norm(&[6], Some(&w[2].var()), 1e-5).unwrap();
        let (sum, y) = x.add_layer_norm(&y, &[6], Some(&w[7].var()), Some(&w[8].var()), 1e-5).unwrap();
        let y = sum.add_rms_norm(&y, &[6], Some(&w[9].var()), 1e-5).unwrap().1;
        let y = y.group_norm(2, Some(&w[3].var()), Some(&w[4].var()), 1e-5).unwrap();
        let y = y.linear(&w[5].var().reshape(&[6, 6]).unwrap(), Some(&w[6].var())).unwrap();
        let work = backward_inputs(&[(y.tanh().unwrap().sum_all().unwrap(), None)]).unwrap();
        if gone {
            let nothing = Tensor::empty(&[0], w[0].tensor().dtype(), Device::CPU).unwrap();
            w.iter().for_each(|w| w.set_tensor(nothing.clone()).unwrap());
        }
        work.run().unwrap();
        w.iter().map(grad_bits).collect::<Vec<_>>()
    };
    assert_eq!(grads(true), grads(false));
}
