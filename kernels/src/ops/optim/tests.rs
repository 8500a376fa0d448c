//! Every update against its formula in f64, element by element, over dtypes, sizes and views.

use phalanx_tensor::{DType, Device, Tensor};

use super::*;
use crate::testing::{FLOATS, assert_close, floats, make, values};

type Twin = fn(f64, f64, &mut [f64], u64) -> f64;
type Update = fn(Step<'_>, u64) -> Result<()>;

const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-3, weight_decay: 0.1, step: 0 };

fn adam_twin(p: f64, g: f64, s: &mut [f64], t: u64) -> f64 {
    s[0] = 0.9 * s[0] + 0.1 * g;
    s[1] = 0.99 * s[1] + 0.01 * g * g;
    let (m, v) = (s[0] / (1.0 - 0.9f64.powi(t as i32)), s[1] / (1.0 - 0.99f64.powi(t as i32)));
    p - 0.01 * m / (v.sqrt() + 1e-3)
}

/// Name, state tensors, the kernel, the formula.
fn rules() -> Vec<(&'static str, usize, Update, Twin)> {
    vec![
        (
            "adam",
            2,
            |items, step| adam_(items, Adam { step, ..ADAM }),
            |p, g, s, t| adam_twin(p, g + 0.1 * p, s, t),
        ),
        (
            "adamw",
            2,
            |items, step| adamw_(items, Adam { step, ..ADAM }),
            |p, g, s, t| adam_twin(p * (1.0 - 0.001), g, s, t),
        ),
        (
            "sgd",
            1,
            |items, step| {
                let rest =
                    Sgd { lr: 0.1, momentum: 0.8, dampening: 0.1, nesterov: true, weight_decay: 0.1, step };
                sgd_(items, rest)
            },
            |p, g, s, t| {
                let g = g + 0.1 * p;
                s[0] = if t == 1 { g } else { 0.8 * s[0] + 0.9 * g };
                p - 0.1 * (g + 0.8 * s[0])
            },
        ),
        (
            "rmsprop",
            3,
            |items, _| {
                let rest = Rmsprop {
                    lr: 0.01,
                    alpha: 0.9,
                    eps: 0.1,
                    weight_decay: 0.1,
                    momentum: 0.5,
                    centered: true,
                };
                rmsprop_(items, rest)
            },
            |p, g, s, _| {
                let g = g + 0.1 * p;
                s[0] = 0.9 * s[0] + 0.1 * g * g;
                s[1] = 0.9 * s[1] + 0.1 * g;
                s[2] = 0.5 * s[2] + g / ((s[0] - s[1] * s[1]).sqrt() + 0.1);
                p - 0.01 * s[2]
            },
        ),
        (
            "adagrad",
            1,
            |items, step| {
                adagrad_(items, Adagrad { lr: 0.1, lr_decay: 0.1, eps: 0.01, weight_decay: 0.1, step })
            },
            |p, g, s, t| {
                let g = g + 0.1 * p;
                s[0] += g * g;
                p - 0.1 / (1.0 + (t - 1) as f64 * 0.1) * g / (s[0].sqrt() + 0.01)
            },
        ),
        (
            "lion",
            1,
            |items, _| lion_(items, Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }),
            |p, g, s, _| {
                let direction = 0.9 * s[0] + 0.1 * g;
                s[0] = 0.99 * s[0] + 0.01 * g;
                let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                p - 0.01 * (0.1 * p + sign)
            },
        ),
        (
            "adadelta",
            2,
            |items, _| adadelta_(items, Adadelta { lr: 0.5, rho: 0.9, eps: 0.01, weight_decay: 0.1 }),
            |p, g, s, _| {
                let g = g + 0.1 * p;
                s[0] = 0.9 * s[0] + 0.1 * g * g;
                let delta = (s[1] + 0.01).sqrt() / (s[0] + 0.01).sqrt() * g;
                s[1] = 0.9 * s[1] + 0.1 * delta * delta;
                p - 0.5 * delta
            },
        ),
        (
            "lamb",
            2,
            |items, step| lamb_direction_(items, Adam { step, ..ADAM }),
            |p, g, s, t| 100.0 * (p - adam_twin(p, g, s, t)) + 0.1 * p,
        ),
        (
            "adamax",
            2,
            |items, step| adamax_(items, Adam { step, ..ADAM }),
            |p, g, s, t| {
                let g = g + 0.1 * p;
                s[0] = 0.9 * s[0] + 0.1 * g;
                s[1] = (0.99 * s[1]).max(g.abs() + 1e-3);
                p - 0.01 / (1.0 - 0.9f64.powi(t as i32)) * s[0] / s[1]
            },
        ),
    ]
}

#[test]
fn updates_equal_their_formulas() {
    for (name, count, update, twin) in rules() {
        for dtype in FLOATS {
            for n in [0, 1, 7, 1025, 20_000] {
                let wide = optim_state_dtype(dtype);
                let buffer = make(&[n + 3], dtype, &floats(-2.0, 2.0));
                let mut param = buffer.narrow(0, 3, n).unwrap();
                let mut master = cast(&param, wide).unwrap().copy().unwrap();
                let keeps_master = dtype.size() == 2;
                let mut state: Vec<_> =
                    (0..count).map(|_| Tensor::zeros(&[n], wide, Device::CPU).unwrap()).collect();
                let (mut want, mut twins) = (values(&master), vec![vec![0.0; count]; n]);
                for t in 1..=3 {
                    let grad = make(&[n], dtype, &floats(-1.0, 1.5 - t as f64 * 0.3));
                    let slice = Slice {
                        param: &mut param,
                        master: keeps_master.then_some(&mut master),
                        grad: &grad,
                        scale: 0.5,
                    };
                    update(Step::new(vec![Item { slice, state: &mut state }]), t).unwrap();
                    for (i, g) in values(&grad).into_iter().enumerate() {
                        want[i] = twin(want[i], g * 0.5, &mut twins[i], t);
                    }
                }
                let exact = if keeps_master { &master } else { &param };
                let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
                for (&got, &want) in values(exact).iter().zip(&want) {
                    assert_close(got, want, tolerance);
                }
                let rounded = values(&cast(exact, dtype).unwrap());
                assert!(values(&param) == rounded, "{name} {dtype}: the parameter is not the rounded master");
            }
        }
    }
}

#[test]
fn a_wide_gradient_of_a_half_parameter_is_used_as_it_is() {
    let mut param = make(&[100], DType::BF16, &floats(-1.0, 1.0));
    let before = values(&param);
    let grad = make(&[100], DType::F32, &floats(-3.0, 3.0));
    let mut master = cast(&param, DType::F32).unwrap();
    let sgd = Sgd { lr: 1.0, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, step: 1 };
    let slice = Slice { param: &mut param, master: Some(&mut master), grad: &grad, scale: 1.0 };
    sgd_(Step::new(vec![Item { slice, state: &mut [] }]), sgd).unwrap();
    for ((got, p), g) in values(&master).into_iter().zip(before).zip(values(&grad)) {
        assert_eq!(got as f32, p as f32 - g as f32);
    }
}

#[test]
fn a_misfit_is_refused() {
    let mut param = make(&[4], DType::F32, &|_| 0.0);
    let grad = make(&[5], DType::F32, &|_| 0.0);
    let sgd = Sgd { lr: 1.0, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, step: 1 };
    let slice = Slice { param: &mut param, master: None, grad: &grad, scale: 1.0 };
    let error = sgd_(Step::new(vec![Item { slice, state: &mut [] }]), sgd);
    assert!(error.unwrap_err().to_string().contains("[5]"));
}

#[test]
fn a_factor_multiplies_all_gradients_and_numbers_are_told_without_an_update() {
    let lion = Lion { lr: 0.5, beta1: 0.5, beta2: 0.0, weight_decay: 0.0 };
    let sgd = Sgd { lr: 0.5, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, step: 1 };
    let (mut a, mut b) = (make(&[3], DType::F32, &|_| 1.0), make(&[2], DType::F64, &|_| 1.0));
    let (ga, gb) = (make(&[3], DType::F32, &|_| 4.0), make(&[2], DType::F64, &|_| 8.0));
    let factor = Tensor::from_slice(&[0.25f32], &[], Device::CPU).unwrap();
    let mut told = Vec::new();
    for ask in [true, false] {
        let items = [(&mut a, &ga), (&mut b, &gb)].map(|(param, grad)| Item {
            slice: Slice { param, master: None, grad, scale: 2.0 },
            state: &mut [],
        });
        let numbers = if ask { Numbers::Ask(&mut told) } else { Numbers::Given };
        sgd_(Step { items: items.into(), factor: Some(&factor), numbers }, sgd).unwrap();
    }
    assert_eq!((values(&a), values(&b)), (vec![0.0; 3], vec![-1.0; 2]));
    assert_eq!(told, [0.5, 2.0]);
    let step = Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut told) };
    lion_(step, lion).unwrap();
    assert_eq!((told.first(), told.last()), (Some(&0.5), Some(&1.0)));
}
