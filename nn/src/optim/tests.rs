//! What the optimizer adds to the kernels: groups, state, masters.

use phalanx_tensor::{DType, Device, Tensor};

use super::*;

fn parameter(name: &str, dtype: DType, value: f64) -> Parameter {
    Parameter::new(name, kernels::full(&[3, 5], value, dtype, Device::CPU).unwrap()).unwrap()
}

fn with_grad(p: &Parameter, value: f64) {
    p.set_grad(Some(kernels::full(&[3, 5], value, p.dtype(), Device::CPU).unwrap()));
}

fn bits(entries: &[(String, Tensor)]) -> Vec<(String, Vec<u8>)> {
    entries.iter().map(|(name, t)| (name.clone(), t.to_bytes().unwrap())).collect()
}

#[test]
fn groups_have_rates_of_their_own_and_a_parameter_without_gradient_stays() {
    let (a, b, c) =
        (parameter("a", DType::F64, 1.0), parameter("b", DType::F64, 1.0), parameter("c", DType::F64, 1.0));
    let groups = vec![Group::new(vec![a.clone(), c.clone()], 0.5), Group::new(vec![b.clone()], 0.25)];
    let mut sgd = Sgd::default().init(groups).unwrap();
    with_grad(&a, 1.0);
    with_grad(&b, 1.0);
    sgd.step().unwrap();
    sgd.groups_mut()[0].lr = 0.0;
    sgd.step().unwrap();
    let first = |p: &Parameter| p.tensor().to_vec::<f64>().unwrap()[0];
    assert_eq!([first(&a), first(&b), first(&c)], [0.5, 0.5, 1.0]);
}

#[test]
fn restored_state_continues_bit_for_bit() {
    let run = |dtype: DType, resume_at: Option<usize>| {
        let p = parameter("w", dtype, 0.7);
        let groups = || vec![Group::new(vec![p.clone()], 0.01).with_weight_decay(0.1)];
        let mut adam = AdamW::default().init(groups()).unwrap();
        for step in 0..6 {
            if resume_at == Some(step) {
                let saved = adam.state_dict().unwrap();
                let saved: Vec<_> = saved.into_iter().map(|(n, t)| (n, t.copy().unwrap())).collect();
                adam = AdamW::default().init(groups()).unwrap();
                adam.load_state_dict(saved).unwrap();
            }
            with_grad(&p, 0.3 - step as f64 * 0.2);
            adam.step().unwrap();
        }
        (bits(&adam.state_dict().unwrap()), p.tensor().to_bytes().unwrap())
    };
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        assert!(run(dtype, None) == run(dtype, Some(3)), "{dtype}");
    }
}

#[test]
fn its_own_tensors_come_back_written_in_place() {
    let p = parameter("w", DType::F32, 0.7);
    let mut adam = Adam::default().init(vec![Group::new(vec![p], 0.01)]).unwrap();
    let mut own = adam.state_dict().unwrap();
    for (name, tensor) in &mut own {
        kernels::fill_(tensor, if name == "w.step" { 9.0 } else { 0.25 }).unwrap();
    }
    adam.load_state_dict(own.clone()).unwrap();
    assert_eq!(bits(&adam.state_dict().unwrap()), bits(&own));
}

#[test]
fn wrong_state_is_named() {
    let p = parameter("w", DType::F32, 0.7);
    let mut adam = Adam::default().init(vec![Group::new(vec![p.clone()], 0.01)]).unwrap();
    let mut saved = adam.state_dict().unwrap();
    saved.remove(1);
    saved.push(("w.extra".into(), p.tensor()));
    let message = adam.load_state_dict(saved).unwrap_err().to_string();
    assert!(message.contains("missing: w.exp_avg") && message.contains("unexpected: w.extra"), "{message}");
    let twice = vec![Group::new(vec![p.clone(), p], 0.01)];
    let refused = Sgd::default().init(twice).err().unwrap().to_string();
    assert!(refused.contains("\"w\" came twice"), "{refused}");
}

#[test]
fn small_updates_reach_a_bf16_parameter_through_its_master() {
    let p = parameter("w", DType::BF16, 1.0);
    let mut sgd = Sgd::default().init(vec![Group::new(vec![p.clone()], 1e-4)]).unwrap();
    for _ in 0..100 {
        with_grad(&p, 1.0);
        sgd.step().unwrap();
    }
    let got = kernels::cast(&p.tensor(), DType::F64).unwrap().to_vec::<f64>().unwrap()[0];
    assert!((got - 0.99).abs() < 0.004, "{got}");
}

#[test]
fn rates_that_are_negative_or_no_numbers_are_refused_when_made_and_at_the_step_that_would_use_them() {
    let p = parameter("w", DType::F64, 1.0);
    let made = |lr: f64| Sgd::default().init(vec![Group::new(vec![p.clone()], lr)]);
    for lr in [-1.0, f64::NAN] {
        let refused = made(lr).err().unwrap().to_string();
        assert!(refused.contains(&format!("got a learning rate of {lr}")), "{refused}");
    }
    let mut sgd = made(0.5).unwrap();
    with_grad(&p, 1.0);
    for lr in [-1.0, f64::NAN, f64::INFINITY] {
        sgd.set_lr(lr);
        assert!(
            sgd.step().unwrap_err().to_string().starts_with("optimizer, group 0: got a learning rate of")
        );
    }
    assert!(sgd.step_scaled(f64::NAN).unwrap_err().to_string().starts_with("step_scaled"));
    assert_eq!(p.tensor().to_vec::<f64>().unwrap(), [1.0; 15], "a refused step changes nothing");
}

#[test]
fn an_optimizer_of_nothing_is_refused_but_in_one_of_several_ranks() {
    let refused = Sgd::default().init(vec![Group::new(vec![], 0.1)]).err().unwrap().to_string();
    assert!(refused.contains("optimizer: got no parameters"), "{refused}");
    let rank = std::thread::spawn(|| {
        super::note_ranks(2);
        Sgd::default().init(vec![Group::new(vec![], 0.1)]).is_ok()
    });
    assert!(rank.join().unwrap());
}
