//! The engine over several devices: a worker each, the bits of one thread.

use phalanx_autograd::{Error, Function, Leaf, Result, Var};
use phalanx_tensor::Device;

use crate::support::{Misbehave, grad_bits, leaf, numbers, parameter};

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
