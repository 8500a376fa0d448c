//! Sites, pieces, slots, and the owner of a parameter.

use phalanx_autograd::{CrossEntropy, Gelu};
use phalanx_tensor::{Dims, Window};

use super::*;

fn values(t: &Tensor) -> Vec<f32> {
    t.to_vec().unwrap()
}

#[test]
fn site_chains_are_added_in_the_order_of_the_sites() {
    let w = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
    let w = Parameter::new("w", w).unwrap().with_sites(2).unwrap();
    // Used at the second site first.
    let y = w.site(1).mul_scalar(3.0).unwrap().add(&w.site(0).mul_scalar(10.0).unwrap()).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    assert_eq!(values(w.leaves()[0].grad().unwrap().tensor()), [10.0; 2]);
    assert_eq!(values(w.leaves()[1].grad().unwrap().tensor()), [3.0; 2]);
    assert_eq!(values(&w.grad().unwrap().unwrap()), [13.0; 2]);
    assert_eq!(values(w.leaves()[0].grad().unwrap().tensor()), [10.0; 2], "grad() changes nothing");
    assert_eq!(values(&w.finish_grad().unwrap().unwrap()), [13.0; 2]);
    assert!(w.leaves()[1].grad().is_none());
    assert_eq!(values(&w.take_grad().unwrap().unwrap()), [13.0; 2]);
    assert!(w.grad().unwrap().is_none());
}

#[test]
fn all_sites_hold_the_tensor_that_is_set_and_a_frozen_one_records_nothing() {
    let w = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
    let w = Parameter::new("w", w).unwrap().with_sites(2).unwrap();
    w.set_tensor(Tensor::from_slice(&[5f32, 6.0], &[2], Device::CPU).unwrap()).unwrap();
    assert_eq!(values(w.site(1).tensor()), [5.0, 6.0]);
    w.load(&Tensor::from_slice(&[7f64, 8.0], &[2], Device::CPU).unwrap()).unwrap();
    assert_eq!(values(w.site(1).tensor()), [7.0, 8.0]);
    w.freeze();
    assert!(!w.site(0).requires_grad() && !w.is_trained());
    w.unfreeze();
    assert!(w.site(0).requires_grad());
}

#[test]
fn a_piece_knows_its_part_of_the_whole_and_its_range_there() {
    let window = Window { global: Dims::from_slice(&[4, 3]), offset: Dims::from_slice(&[2, 0]) };
    let part = Shard { window, extent: Dims::from_slice(&[2, 3]) };
    let rows = Tensor::from_slice(&[0f32; 6], &[2, 3], Device::CPU).unwrap();
    let w = Parameter::shard("w", rows.clone(), part.clone()).unwrap();
    assert_eq!((w.part(), w.range()), (&part, 0..6));
    let piece = w.piece(rows.with_shape(&[6]).unwrap().narrow(0, 2, 3).unwrap(), 2..5).unwrap();
    assert_eq!((piece.part(), piece.range(), piece.is_matrix()), (&part, 2..5, true));
    let refused = w.piece(rows.with_shape(&[6]).unwrap(), 1..7).err().unwrap().to_string();
    assert!(refused.contains("w: got [6] for elements 1..7"), "{refused}");
}

/// Refuses one usage, and counts uses.
struct Wrapper(Usage, AtomicU8);

impl ParameterOwner for Wrapper {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        (usage == self.0).then_some("is elsewhere")
    }
    fn observes_uses(&self) -> bool {
        true
    }
    fn before_use(&self, _: &Parameter) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn who_has_a_parameter_in_hand_hears_of_uses_and_refuses_them() {
    use crate::{Group, Rule, Sgd, grad_norm};
    let w = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
    let w = Parameter::new("w", w).unwrap();
    let mut optimizer = Sgd::default().init(vec![Group::new(vec![w.clone()], 0.1)]).unwrap();
    let all = |optimizer: &mut crate::Optimizer<Sgd>| {
        let made = Sgd::default().init(vec![Group::new(vec![w.clone()], 0.1)]).map(drop);
        let updates = [made, optimizer.step()];
        let rest =
            [grad_norm(std::slice::from_ref(&w)).map(drop), w.zero_grad(), w.set_grad_dtype(DType::F64)];
        updates.into_iter().chain(rest).map(|done| done.err().map(|e| e.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(all(&mut optimizer), [const { None }; 5]);
    for (usage, refused) in
        [(Usage::Update, &[0, 1][..]), (Usage::Norm, &[2]), (Usage::ZeroGrad, &[3]), (Usage::Gradients, &[4])]
    {
        let wrapper = Arc::new(Wrapper(usage, AtomicU8::new(0)));
        let owner: Arc<dyn ParameterOwner> = wrapper.clone();
        w.set_owner(owner.clone());
        for (i, told) in all(&mut optimizer).into_iter().enumerate() {
            assert_eq!(told.is_some(), refused.contains(&i), "{usage:?}: {told:?}");
            assert!(told.is_none_or(|told| told.ends_with("\"w\" is elsewhere")));
        }
        let (_, _) = (w.var(), w.tensor());
        assert_eq!(wrapper.1.load(Ordering::Relaxed), 1);
        assert!(w.owner().is_some() && w.is_trained());
        w.release_owner(&owner);
        assert!(w.owner().is_none());
        w.var();
        assert_eq!(wrapper.1.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_buffer_that_gradients_go_to_stays_when_the_gradient_is_replaced_or_taken() {
    let make = |x: f32| Tensor::from_slice(&[x, x], &[2], Device::CPU).unwrap();
    let w = Parameter::new("w", make(2.0)).unwrap();
    let buffer = make(5.0);
    w.leaves()[0].set_slot(Slot::Into(buffer.clone())).unwrap();
    let taken = w.take_grad().unwrap().unwrap();
    assert_eq!((values(&taken), values(&buffer)), (vec![5.0; 2], vec![0.0; 2]));
    w.set_grad(Some(make(3.0)));
    assert_eq!(values(&buffer), [3.0; 2]);
    w.var().sum_all().unwrap().backward().unwrap();
    assert_eq!(values(&buffer), [4.0; 2]);
    w.set_grad(None);
    assert_eq!((values(&buffer), w.leaves()[0].times_zeroed()), (vec![0.0; 2], 2));
}

#[test]
fn the_parameters_that_a_value_depends_on_are_found_once_each() {
    let make = |x: f32| Tensor::from_slice(&[x, x], &[2], Device::CPU).unwrap();
    let [a, b, frozen] = ["a", "b", "c"].map(|name| Parameter::new(name, make(2.0)).unwrap());
    frozen.freeze();
    let x = Var::leaf(make(1.0)).unwrap();
    let y = a.var().mul(&x).unwrap().mul(&a.var()).unwrap().add(&frozen.var()).unwrap();
    let found = y.mul(&b.var()).unwrap().parameter_leaves();
    let is_found = |p: &Parameter| found.iter().filter(|leaf| leaf.is(&p.leaves()[0])).count();
    assert_eq!([&a, &b, &frozen].map(is_found), [1, 1, 0]);
    assert!(frozen.var().parameter_leaves().is_empty());
    assert_eq!(a.var().parameter_leaves().len(), 1);
}

#[test]
fn backward_reads_what_a_frozen_parameter_holds_then() {
    let make = |x: f32| Tensor::from_slice(&[x], &[1], Device::CPU).unwrap();
    let w = Parameter::new("w", make(2.0)).unwrap();
    w.freeze();
    let x = Var::leaf(make(3.0)).unwrap();
    let y = x.mul(&w.var()).unwrap();
    w.set_tensor(make(5.0)).unwrap();
    y.backward().unwrap();
    assert_eq!(values(x.grad().unwrap().tensor()), [5.0]);
    assert!(w.grad().unwrap().is_none());
    let y = x.mul(&w.var()).unwrap();
    w.load(&make(7.0)).unwrap();
    assert!(y.backward().unwrap_err().to_string().contains("mul"), "modified");
}

#[test]
fn gradients_of_a_half_precision_parameter_can_be_kept_in_f32() {
    let w = kernels::full(&[2], 1.0, DType::BF16, Device::CPU).unwrap();
    let w = Parameter::new("w", w).unwrap();
    w.set_grad_dtype(DType::F32).unwrap();
    w.var().sum_all().unwrap().backward().unwrap();
    assert_eq!(values(&w.grad().unwrap().unwrap()), [1.0; 2]);
}

#[test]
fn a_packed_weight_gives_what_it_gave_and_its_values() {
    let make = |shape: &[usize], from: f64| {
        let values: Vec<f64> = (0..shape.iter().product()).map(|i| (from + i as f64 * 0.37).sin()).collect();
        Tensor::from_slice(&values, shape, Device::CPU).unwrap()
    };
    let (values, x) = (make(&[70, 9], 1.0), make(&[3, 9], 2.0));
    let of = |values: &Tensor| Parameter::new("w", values.copy().unwrap()).unwrap();
    let (weight, plain) = (of(&values).with_sites(2).unwrap().as_weight(), of(&values));
    let index = Var::from_slice(&[69i64, 0, 31], &[3], Device::CPU).unwrap();
    // Results and the gradient of x, where it is recorded.
    let results = |p: &Parameter, recorded: bool| {
        let leaf = Leaf::new(x.clone(), true).unwrap();
        let (x, w) = (if recorded { leaf.var() } else { leaf.constant() }, p.var());
        let loss = |most| x.linear_cross_entropy(&w, &index, &CrossEntropy::default(), most).unwrap();
        let bias = Some(Var::new(make(&[70], 0.25)));
        let [each, other] =
            x.linear_each(&[(w.clone(), bias), (w.clone(), None)]).unwrap().try_into().unwrap();
        let all = [
            each,
            other,
            x.linear(&w, None).unwrap(),
            x.linear(&w, Some(&Var::new(make(&[70], 0.5)))).unwrap(),
            x.linear_gelu(&w, None, Gelu::Exact).unwrap(),
            w.embedding(&index, None).unwrap(),
            loss(0),
            loss(1 << 20),
        ];
        let mut bits: Vec<Vec<f64>> = all.iter().map(|y| y.to_vec().unwrap()).collect();
        if recorded {
            all.iter()
                .try_for_each(|y| if y.requires_grad() { y.sum_all()?.backward() } else { Ok(()) })
                .unwrap();
            bits.push(leaf.grad().unwrap().to_vec().unwrap());
        }
        bits
    };
    plain.freeze();
    let wanted = [false, true].map(|recorded| results(&plain, recorded));
    assert!(!plain.pack().unwrap() && !plain.is_packed(), "not said to be a weight");
    assert!(weight.pack().unwrap() && weight.pack().unwrap() && weight.is_packed());
    weight.unfreeze();
    assert!(!weight.is_trained() && weight.tensor().shape() == [70, 9]);
    assert_eq!([false, true].map(|recorded| results(&weight, recorded)), wanted);
    assert_eq!(weight.values().unwrap().to_vec::<f64>().unwrap(), values.to_vec::<f64>().unwrap());
    assert_eq!(weight.held_in()[0].shape()[1], 9);
    let refused = weight.var().mul_scalar(2.0).unwrap_err().to_string();
    assert!(refused.contains("lies in panels") && refused.contains("Parameter::values"), "{refused}");
    // Other values, in panels and as a tensor.
    let others = make(&[70, 9], 5.0);
    weight.load(&others).unwrap();
    assert!(weight.is_packed());
    assert!(weight.load(&make(&[9, 70], 5.0)).is_err());
    assert_eq!(results(&weight, false), results(&of(&others), false));
    weight.set_tensor(values.copy().unwrap()).unwrap();
    assert!(!weight.is_packed());
    assert_eq!(results(&weight, false), wanted[0]);
    let owned = of(&values).as_weight();
    owned.set_owner(Arc::new(Wrapper(Usage::Norm, AtomicU8::new(0))));
    assert!(!owned.pack().unwrap() && owned.is_trained());
}

#[test]
fn packed_weights_take_the_memory_of_one_copy() {
    let device = Device::Cpu(829);
    let scope = crate::Scope::new(1, DType::F32, device);
    let init = |i: i32| scope.child(i.to_string()).parameter("weight", &[512, 256], crate::Init::ZEROS);
    let weights: Vec<Parameter> = (0..4).map(|i| init(i).unwrap().as_weight()).collect();
    let (ledger, one) = (device.ledger().unwrap(), 512 * 256 * size_of::<f32>());
    assert_eq!(ledger.total().now, 4 * one);
    ledger.reset_peak();
    pack_weights(&weights).unwrap();
    assert!(weights.iter().all(Parameter::is_packed));
    assert_eq!((ledger.total().now, ledger.total().peak), (4 * one, 5 * one));
    assert!(ledger.obtained().now <= 4 * one * 9 / 8, "{:?}", ledger.obtained());
}
