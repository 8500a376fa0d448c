//! NumPy's indexing, worked out by hand; derivatives; refusals.

use phalanx_tensor::{DType, Device};

use crate::Var;
use crate::ops::testing::check_twice;

fn ints(values: &[i64], shape: &[usize]) -> Var {
    Var::from_slice(values, shape, Device::CPU).unwrap()
}

fn counting(shape: &[usize]) -> Var {
    let all = Var::arange(0, shape.iter().product::<usize>() as i64, 1, DType::I64, Device::CPU).unwrap();
    all.reshape_to(shape).unwrap()
}

#[test]
fn places_are_numpys() {
    let x = counting(&[2, 3, 4]);
    let vec = |y: Var| (y.shape().to_vec(), y.to_vec::<i64>().unwrap());
    let (a, b) = (ints(&[1, -2], &[2, 1]), ints(&[0, -1], &[2]));
    assert_eq!(vec(x.index(&[&a]).unwrap()).0, [2, 1, 3, 4]);
    assert_eq!(vec(x.index(&[None, None, Some(&b)]).unwrap().narrow(1, 2, 1).unwrap()).1, [8, 11, 20, 23]);
    let neighbours = x.index(&[None, Some(&a), Some(&b)]).unwrap();
    assert_eq!(vec(neighbours), (vec![2, 2, 2], vec![4, 7, 4, 7, 16, 19, 16, 19]));
    let apart = x.index(&[Some(&a), None, Some(&b)]).unwrap();
    assert_eq!(vec(apart), (vec![2, 2, 3], vec![12, 16, 20, 15, 19, 23, 0, 4, 8, 3, 7, 11]));
    let mask = x.select(0, 0).unwrap().gt_scalar(8).unwrap();
    assert_eq!(vec(x.index(&[None, Some(&mask)]).unwrap()), (vec![2, 3], vec![9, 10, 11, 21, 22, 23]));
}

#[test]
fn the_last_value_for_a_place_stays_and_repeats_add_up() {
    let x = counting(&[3, 2]);
    let rows = ints(&[2, 0, 2], &[3]);
    let values = ints(&[10, 11, 20, 21, 30, 31], &[3, 2]);
    let put = |accumulate| x.index_put(&[&rows], &values, accumulate).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(put(false), [20, 21, 2, 3, 30, 31]);
    assert_eq!(put(true), [20, 22, 2, 3, 44, 47]);
    let column = ints(&[-1], &[1]);
    let one = x.index_put(&[None, Some(&column)], &ints(&[7, 8, 9], &[3, 1]), false).unwrap();
    assert_eq!(one.to_vec::<i64>().unwrap(), [0, 7, 2, 8, 4, 9]);
    let mask = x.gt_scalar(3).unwrap();
    let filled = x.index_put(&[&mask], &ints(&[-1], &[1]), true).unwrap();
    assert_eq!(filled.to_vec::<i64>().unwrap(), [0, 1, 2, 3, 3, 4]);
    let flags = mask.index_put(&[&rows], &mask.narrow(0, 0, 1).unwrap(), true).unwrap();
    assert_eq!(flags.to_vec::<bool>().unwrap(), mask.to_vec::<bool>().unwrap());
}

#[test]
fn reading_and_writing_have_their_derivatives() {
    let (a, b) = (ints(&[1, -2, 1], &[3, 1]), ints(&[0, -1], &[2]));
    check_twice(&[&[2, 3, 4]], |v| v[0].tanh()?.index(&[Some(&a), None, Some(&b)]));
    check_twice(&[&[2, 3, 4]], |v| v[0].tanh()?.index(&[None, Some(&a)]));
    for accumulate in [false, true] {
        check_twice(&[&[2, 3, 4], &[3, 2, 1]], |v| {
            v[0].tanh()?.index_put(&[Some(&a), None, Some(&b)], &v[1].tanh()?, accumulate)
        });
        let mask = ints(&[1, 0, 1, 1], &[4]).to(DType::Bool).unwrap();
        check_twice(&[&[2, 4], &[2, 3]], |v| {
            v[0].tanh()?.index_put(&[None, Some(&mask)], &v[1].tanh()?, accumulate)
        });
        check_twice(&[&[2, 4], &[1]], |v| {
            v[0].tanh()?.index_put(&[None, Some(&mask)], &v[1].tanh()?, accumulate)
        });
    }
}

#[test]
fn wrong_indices_are_errors_that_name_the_index_and_the_size() {
    let x = counting(&[2, 3]);
    let says = |error: crate::Error, what: &str| assert!(error.to_string().contains(what), "{error}");
    for bad in [3, -4, i64::MIN, i64::MAX] {
        let index = ints(&[0, bad], &[2]);
        says(x.index(&[None, Some(&index)]).unwrap_err(), &format!("index: index {bad} (item 1)"));
        let error = x.index_put(&[None, Some(&index)], &x.narrow(1, 0, 2).unwrap(), false).unwrap_err();
        says(error, "dimension 1 of size 3");
    }
    let one = ints(&[0], &[1]);
    says(x.index(&[&one, &one, &one]).unwrap_err(), "3 dimensions");
    says(x.index(&[&x.gt_scalar(1).unwrap(), &one]).unwrap_err(), "3 dimensions");
    says(x.index(&[&one.to(DType::F32).unwrap()]).unwrap_err(), "i64 or i32");
    says(x.index(&[&one.gt_scalar(0).unwrap()]).unwrap_err(), "mask of shape [1]");
    says(x.index::<Option<&Var>>(&[None]).unwrap_err(), "no index tensor");
    says(x.index(&[&ints(&[0, 1], &[2]), &ints(&[0, 1, 0], &[3])]).unwrap_err(), "index");
    says(x.index_put(&[&one], &one.to(DType::F32).unwrap(), false).unwrap_err(), "values");
    says(x.index_put(&[&one], &ints(&[0, 1], &[2]), false).unwrap_err(), "index_put");
}
