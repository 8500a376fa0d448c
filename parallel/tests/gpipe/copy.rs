//! Values and gradients cross from device to device.

use phalanx_parallel::pipeline::gpipe::{Batch, Checkpoint, GPipeConfig};
use phalanx_tensor::{DType, Device};

use crate::kit::*;

fn identity() -> Box<dyn phalanx_parallel::pipeline::gpipe::Layer> {
    apply(Ok)
}

#[test]
fn values_and_gradients_of_every_layout_and_dtype_arrive() {
    let own = devices(2);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        // Columns of a larger tensor: rows do not lie one after the other.
        let x = leaf(1, &[6, 7], own[0]).to(dtype).unwrap();
        let model = each(vec![identity(), identity()], &own, GPipeConfig::new(3));
        let part = x.split_sizes(&[3, 4], 1).unwrap().remove(1);
        let y = model.run(&part).and_then(Batch::one).unwrap();
        assert_eq!((y.device(), y.dtype(), y.shape()), (own[1], dtype, &[6, 4][..]));
        let values = |v: &phalanx_nn::autograd::Var| v.to(DType::F64).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(values(&y), values(&part));
        let c = constant(3, &[6, 4], own[1]).to(dtype).unwrap();
        x.retain_grad();
        y.mul(&c).unwrap().to(DType::F64).unwrap().sum_all().unwrap().backward().unwrap();
        let dx = values(&x.grad().unwrap());
        let wanted = values(&c);
        for row in 0..6 {
            assert_eq!(dx[row * 7..][..3], [0.0; 3]);
            assert_eq!(dx[row * 7 + 3..][..4], wanted[row * 4..][..4]);
        }
    }
}

#[test]
fn integers_and_bools_cross_without_gradients() {
    let own = devices(2);
    for mode in MODES {
        let model = each(vec![identity(), identity()], &own, GPipeConfig::new(2).with_checkpoint(mode));
        let x = leaf(1, &[3, 2], own[0]);
        let mask = x.to(DType::Bool).unwrap();
        let index = constant(2, &[3], own[0]).mul_scalar(10.0).unwrap().to(DType::I64).unwrap();
        let [y, mask2, index2] = model.run([x.clone(), mask.clone(), index.clone()]).unwrap().many().unwrap();
        assert_eq!(mask2.to_vec::<bool>().unwrap(), mask.to_vec::<bool>().unwrap());
        assert_eq!(index2.to_vec::<i64>().unwrap(), index.to_vec::<i64>().unwrap());
        assert_eq!([y.requires_grad(), mask2.requires_grad(), index2.requires_grad()], [true, false, false]);
        y.sum_all().unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [1.0; 6]);
    }
}

#[test]
fn what_needs_no_gradient_gets_none_behind_a_stage() {
    let own = devices(2);
    let model =
        each(vec![identity(), identity()], &own, GPipeConfig::new(2).with_checkpoint(Checkpoint::Never));
    let (x, mask) = (leaf(1, &[3, 2], own[0]), constant(2, &[3, 2], own[0]));
    let [y, mask] = model.run([x, mask]).unwrap().many().unwrap();
    assert!(y.requires_grad() && !mask.requires_grad());
}

#[test]
fn all_values_of_a_cell_are_waited_for() {
    let own = devices(3);
    for _ in 0..20 {
        let x = leaf(1, &[4, 5000], own[0]);
        let model = each(
            vec![
                apply(|b: Batch| {
                    let x = b.one()?;
                    Ok([x.mul_scalar(2.0)?, x.mul_scalar(3.0)?, x.mul_scalar(5.0)?].into())
                }),
                identity(),
                apply(|b: Batch| {
                    let [a, b, c] = b.many()?;
                    Ok(a.add(&b)?.add(&c)?.into())
                }),
            ],
            &own,
            GPipeConfig::new(2).with_checkpoint(Checkpoint::Never),
        );
        model.run(&x).and_then(Batch::one).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [10.0; 20000]);
    }
}

#[test]
fn memory_leaves_a_device_when_the_value_has_arrived_at_the_next() {
    let own = devices(2);
    let bytes = |device: Device| device.ledger().unwrap().total().now;
    let x = constant(1, &[2, 1000], own[0]);
    let before = bytes(own[0]);
    let model = each(
        vec![apply(|b| Ok(b.map(|x| x.mul_scalar(2.0))?)), identity()],
        &own,
        GPipeConfig::new(2).with_checkpoint(Checkpoint::Never),
    );
    let y = model.run(&x).unwrap();
    assert_eq!(bytes(own[0]), before, "products that no backward needs");
    drop(y);
    assert_eq!(bytes(own[1]), 0);
}

#[test]
fn anomaly_mode_sees_the_operations_of_every_device() {
    let own = devices(2);
    let _anomaly = phalanx_nn::autograd::detect_anomaly();
    let model = each(
        vec![apply(|b| Ok(b.map(|x| x.mul_scalar(0.0)?.sqrt()?.mul_scalar(0.0))?)), identity()],
        &own,
        GPipeConfig::new(2).with_checkpoint(Checkpoint::Never),
    );
    let y = model.run(leaf(1, &[2, 3], own[0])).and_then(Batch::one).unwrap();
    let message = y.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(message.contains("made a NaN") && message.contains("sqrt"), "{message}");
}
