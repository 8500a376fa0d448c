//! What recomputation is for: values that are not kept.

use phalanx_autograd::{Var, checkpoint};
use phalanx_tensor::Device;

use crate::support::{leaf_on, numbers};

const WIDTH: usize = 1000;
const BYTES: usize = WIDTH * 8;

/// Four parts of ten steps each: bytes that the forward pass leaves behind, and the backward pass's peak beyond the
/// bytes before.
fn bytes(checkpointed: bool, device: Device) -> (usize, usize) {
    let x = leaf_on(&numbers(1, WIDTH), device);
    let ledger = device.ledger().unwrap();
    let before = ledger.total().now;
    let part = |v: &[Var]| (0..10).try_fold(v[0].clone(), |y, _| y.tanh());
    let y = (0..4)
        .fold(x.clone(), |y, _| if checkpointed { checkpoint(part, &[&y]) } else { part(&[y]) }.unwrap());
    let kept = ledger.total().now - before;
    let dy = Var::new(y.tensor().copy().unwrap());
    ledger.reset_peak();
    y.backward_with(dy).unwrap();
    let peak = ledger.total().peak - before;
    drop(y);
    assert_eq!(ledger.total().now - before, BYTES, "the gradient of x is left");
    (kept, peak)
}

#[test]
fn inner_values_are_not_kept() {
    let (kept, peak) = bytes(false, Device::Cpu(38));
    assert_eq!(kept, 40 * BYTES);
    assert!(peak <= 42 * BYTES);
    let (kept, peak) = bytes(true, Device::Cpu(39));
    assert_eq!(kept, 4 * BYTES, "one output a part");
    // Beside them: the root's gradient, the part's ten values and one that is being made.
    assert!(peak <= (4 + 1 + 10 + 1) * BYTES, "{}", peak / BYTES);
}

#[test]
fn the_ledger_of_a_meta_device_agrees() {
    assert_eq!(bytes(true, Device::Meta(38)), bytes(true, Device::Cpu(40)));
}
