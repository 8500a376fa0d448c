//! Derivatives of normalisations against differences, and their bits against those of the operations that they join.

use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::ops::testing::check_twice;
use crate::{ContextMode, Leaf, Options, Result, Var, backward, backward_inputs, grad};

#[test]
fn first_and_second_derivatives_of_layer_norm_hold() {
    check_twice(&[&[3, 5], &[5], &[5]], |v| v[0].layer_norm(&[5], Some(&v[1]), Some(&v[2]), 1e-2));
    check_twice(&[&[3, 2, 3], &[2, 3]], |v| v[0].layer_norm(&[2, 3], None, Some(&v[1]), 1e-2));
}

#[test]
fn first_and_second_derivatives_of_rms_norm_hold() {
    check_twice(&[&[3, 5], &[5]], |v| v[0].rms_norm(&[5], Some(&v[1]), 1e-2));
    check_twice(&[&[3, 2, 3]], |v| v[0].rms_norm(&[2, 3], None, 1e-2));
}

#[test]
fn first_and_second_derivatives_of_add_layer_norm_hold() {
    for width in [1, 7, 33] {
        let (x, w) = (&[2, width][..], &[width][..]);
        check_twice(&[x, x, w, w], |v| v[0].add_layer_norm(&v[1], w, Some(&v[2]), Some(&v[3]), 1e-2));
    }
    check_twice(&[&[1, 129], &[1, 129]], |v| v[0].add_layer_norm(&v[1], &[129], None, None, 1e-2));
    check_twice(&[&[0, 5], &[0, 5], &[5]], |v| v[0].add_layer_norm(&v[1], &[5], Some(&v[2]), None, 1e-2));
    check_twice(&[&[2, 3, 2], &[2, 2, 3], &[2, 3]], |v| {
        v[0].transpose(1, 2)?.add_layer_norm(&v[1], &[2, 3], None, Some(&v[2]), 1e-2)
    });
}

#[test]
fn either_result_may_be_left_unused_and_either_summand_constant() {
    let (x, w): (&[usize], &[usize]) = (&[3, 5], &[5]);
    let run = |x: &Var, r: &Var, w: &Var| x.add_layer_norm(r, &[5], Some(w), None, 1e-2);
    check_twice(&[x, x, w], |v| Ok(run(&v[0], &v[1], &v[2])?.0));
    check_twice(&[x, x, w], |v| Ok(run(&v[0], &v[1], &v[2])?.1));
    let [c, k] = [x, w].map(|shape| input(DType::F64, 7, shape).unwrap().detach());
    check_twice(&[x], |v| run(&v[0], &c, &k));
    check_twice(&[x, w], |v| run(&c, &v[0], &v[1]));
    check_twice(&[w], |v| run(&c, &c, &v[0]));
    check_twice(&[x], |v| run(&v[0], &v[0], &k));
}

#[test]
fn first_and_second_derivatives_of_a_stream_and_its_norm_hold() {
    for width in [1, 7, 33] {
        let (x, w) = (&[2, width][..], &[width][..]);
        check_twice(&[x, w, w], |v| v[0].pre_layer_norm(w, Some(&v[1]), Some(&v[2]), 1e-2, DType::F64));
        check_twice(&[x, w], |v| v[0].pre_rms_norm(w, Some(&v[1]), 1e-2, DType::F64));
    }
    check_twice(&[&[0, 5]], |v| v[0].pre_layer_norm(&[5], None, None, 1e-2, DType::F64));
    check_twice(&[&[3, 5]], |v| Ok(v[0].pre_layer_norm(&[5], None, None, 1e-2, DType::F64)?.0));
    check_twice(&[&[3, 5]], |v| Ok(v[0].pre_rms_norm(&[5], None, 1e-2, DType::F64)?.1));
}

/// A stream in f32 through a block's two norms and its last addition, with branches in bf16.
fn block(v: &[Var], fused: bool) -> Result<(Var, Var)> {
    let (w, b, shape, narrow) = (Some(&v[2]), Some(&v[3]), &[33][..], DType::BF16);
    let branch = |x: &Var| x.mul_scalar(0.7)?.exp();
    if fused {
        let (x, n) = v[0].pre_layer_norm(shape, w, b, 1e-2, narrow)?;
        let (x, n) = x.add_layer_norm(&branch(&n)?, shape, w, b, 1e-2)?;
        let (x, m) =
            branch(&n)?.bias_dropout_add(None, &x, 0.0, 0, None)?.pre_rms_norm(shape, w, 1e-2, narrow)?;
        let (x, y) = x.add_rms_norm(&branch(&m)?.mul(&v[1].to(narrow)?)?, shape, w, 1e-2)?;
        return Ok((x, y.to(DType::F32)?));
    }
    let x = &v[0];
    let n = x.layer_norm(shape, w, b, 1e-2)?.to(narrow)?;
    let x = x.add(&branch(&n)?.to(DType::F32)?)?;
    let n = x.layer_norm(shape, w, b, 1e-2)?.to(narrow)?;
    let x = x.add(&branch(&n)?.to(DType::F32)?)?;
    let m = x.rms_norm(shape, w, 1e-2)?.to(narrow)?;
    let x = x.add(&branch(&m)?.mul(&v[1].to(narrow)?)?.to(DType::F32)?)?;
    let y = x.rms_norm(shape, w, 1e-2)?.to(narrow)?.to(DType::F32)?;
    Ok((x, y))
}

#[test]
fn branches_in_bf16_have_the_bits_of_casts_of_their_own() {
    let [fused, apart] = [true, false].map(|fused| bits(DType::F32, |v| block(v, fused)).unwrap());
    assert_eq!(fused.len(), 6);
    assert_eq!(fused, apart);
}

#[test]
fn results_are_kept_where_rematerialization_is_off() {
    let device = Device::Meta(38);
    let kept = |on: Option<bool>| {
        let _mode = Context::with(|c| c.set_rematerialize(on));
        let of = |shape: &[usize]| Var::leaf(Tensor::zeros(shape, DType::F32, device).unwrap()).unwrap();
        let (x, w) = (of(&[32, 64]), of(&[8, 64]));
        let before = device.ledger().unwrap().total().now;
        let y = x.pre_layer_norm(&[64], None, None, 1e-5, DType::F32).unwrap().1.linear(&w, None).unwrap();
        let kept = device.ledger().unwrap().total().now - before;
        drop(y);
        kept
    };
    assert_eq!(kept(None), kept(Some(true)));
    assert_eq!(kept(Some(false)), kept(None) + 32 * 64 * 4);
    assert!(!Context::current().rematerializes(Device::Cuda(0)) && Context::current().rematerializes(device));
}

fn input(dtype: DType, seed: usize, shape: &[usize]) -> Result<Var> {
    let value = |at: usize| 2.0 * (at as f64 * 0.618 + seed as f64 * 0.37).fract() - 1.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Var::leaf(Var::from_slice(&values, shape, Device::CPU)?.to(dtype)?.tensor().clone())
}

/// The values and gradients of `f` of four inputs, as bits; the sum is used beside its norm.
fn bits(dtype: DType, f: impl Fn(&[Var]) -> Result<(Var, Var)>) -> Result<Vec<Vec<u64>>> {
    let of = |seed: usize, shape: &[usize]| input(dtype, seed, shape);
    let v = [of(0, &[9, 33])?, of(1, &[9, 33])?, of(2, &[33])?, of(3, &[33])?];
    let (sum, y) = f(&v)?;
    let z = sum.mul(&y.exp()?)?;
    let inputs: Vec<&Var> = v.iter().collect();
    let grads = grad(&[(z.sum_all()?, None)], &inputs, Options::default())?;
    let all = [sum, y].into_iter().chain(grads.into_iter().flatten());
    let bits = |v: Var| Ok(v.to(DType::F64)?.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect());
    all.map(bits).collect()
}

#[test]
fn a_split_backward_gives_the_same_bits_and_keeps_no_gradient_of_the_sum() {
    let device = Device::Cpu(37);
    let run = |split: bool, with_sum: bool| {
        let of = |seed: usize, shape: &[usize]| {
            input(DType::F64, seed, shape).unwrap().tensor().to_device(device, true).unwrap()
        };
        let [x, r] = [0, 1].map(|seed| Var::leaf(of(seed, &[9, 33])).unwrap());
        let w = Leaf::new(of(2, &[33]), true).unwrap();
        let (sum, y) = x.add_layer_norm(&r, &[33], Some(&w.var()), None, 1e-2).unwrap();
        let mut roots = vec![(y, Some(Var::new(of(3, &[9, 33]))))];
        if with_sum {
            roots.push((sum, Some(Var::new(of(4, &[9, 33])))));
        }
        if !split {
            backward(&roots, Options::default()).unwrap();
        }
        let work = split.then(|| backward_inputs(&roots).unwrap());
        drop(roots);
        let left = device.ledger().unwrap().total().now;
        work.into_iter().for_each(|work| work.run().unwrap());
        let grads = [x.grad(), r.grad(), w.grad()].map(|g| g.unwrap().to_vec::<f64>().unwrap());
        (grads, left)
    };
    let (joint, (halves, left)) = (run(false, true).0, run(true, true));
    assert_eq!(joint, halves);
    assert_eq!(left, run(true, false).1, "bytes between the halves");
}

#[test]
fn values_and_gradients_are_those_of_a_sum_and_its_norm() {
    for dtype in [DType::F32, DType::F64] {
        let fused = bits(dtype, |v| v[0].add_layer_norm(&v[1], &[33], Some(&v[2]), Some(&v[3]), 1e-2));
        let apart = bits(dtype, |v| {
            let sum = v[0].add(&v[1])?;
            let y = sum.layer_norm(&[33], Some(&v[2]), Some(&v[3]), 1e-2)?;
            Ok((sum, y))
        });
        let (fused, apart) = (fused.unwrap(), apart.unwrap());
        assert_eq!(fused.len(), 6);
        assert_eq!(fused, apart, "{dtype}");
    }
}

#[test]
fn first_and_second_derivatives_of_add_rms_norm_hold() {
    for width in [1, 7, 33] {
        let (x, w) = (&[2, width][..], &[width][..]);
        check_twice(&[x, x, w], |v| v[0].add_rms_norm(&v[1], w, Some(&v[2]), 1e-2));
    }
    check_twice(&[&[1, 129], &[1, 129]], |v| v[0].add_rms_norm(&v[1], &[129], None, 1e-2));
    check_twice(&[&[0, 5], &[0, 5], &[5]], |v| v[0].add_rms_norm(&v[1], &[5], Some(&v[2]), 1e-2));
    check_twice(&[&[2, 3, 2], &[2, 2, 3]], |v| {
        v[0].transpose(1, 2)?.add_rms_norm(&v[1], &[2, 3], None, 1e-2)
    });
}
