//! Phonies, fork and join: order in backward and nothing else.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_autograd::{Function, Var, fork, join, no_grad, phony};
use phalanx_tensor::Device;

use crate::support::{Journal, Misbehave, Note, backwards, leaf, leaf_on, tensor};

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
            saved: &[phalanx_autograd::Saved],
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
