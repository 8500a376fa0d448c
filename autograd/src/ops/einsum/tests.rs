//! Equations against the sum of products over all labels, and their derivatives.

use std::collections::BTreeMap;

use phalanx_tensor::{Device, Tensor};

use crate::Var;
use crate::ops::testing::check_twice;

/// Equations without ellipsis, with a result, and the operands' shapes.
const CASES: &[(&str, &[&[usize]])] = &[
    ("ij,jk->ik", &[&[2, 3], &[3, 4]]),
    ("ij->ji", &[&[2, 3]]),
    ("ij,ij->", &[&[2, 3], &[2, 3]]),
    ("bhqd,bhkd->bhqk", &[&[2, 2, 3, 4], &[2, 2, 2, 4]]),
    ("bqhd,bkhd->bhqk", &[&[2, 3, 2, 4], &[2, 2, 2, 4]]),
    ("ii->i", &[&[3, 3]]),
    ("iij->j", &[&[3, 3, 2]]),
    ("iii->", &[&[2, 2, 2]]),
    ("i,j->ji", &[&[2], &[3]]),
    ("ij,ij->ij", &[&[2, 3], &[2, 3]]),
    ("ij,k->i", &[&[2, 3], &[4]]),
    ("abc,cd,de->abe", &[&[2, 2, 3], &[3, 2], &[2, 3]]),
    ("ab,bc,ca->", &[&[2, 3], &[3, 2], &[2, 2]]),
    ("ij,j,ik->jk", &[&[2, 3], &[3], &[2, 2]]),
    ("ik,jk->ij", &[&[2, 1], &[3, 4]]),
    ("bi,bi->b", &[&[1, 3], &[4, 1]]),
    (",i->i", &[&[], &[3]]),
    ("aij,bij->ab", &[&[2, 2, 3], &[3, 2, 3]]),
];

fn operand(i: usize, shape: &[usize]) -> Tensor {
    let value = |at: usize| ((at * 7 + i * 3) % 11) as f64 / 4.0 - 1.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_slice(&values, shape, Device::CPU).unwrap()
}

/// The sum over every assignment of indices to letters.
fn twin(equation: &str, operands: &[Tensor]) -> Vec<f64> {
    let (inputs, output) = equation.split_once("->").unwrap();
    let terms: Vec<&str> = inputs.split(',').collect();
    let mut sizes = BTreeMap::new();
    for (term, operand) in terms.iter().zip(operands) {
        for (c, &n) in term.chars().zip(operand.shape()) {
            let size = sizes.entry(c).or_insert(n);
            *size = n.max(*size);
        }
    }
    let letters: Vec<char> = sizes.keys().copied().collect();
    let flat = |term: &str, shape: &dyn Fn(char, usize) -> usize, index: &BTreeMap<char, usize>| {
        term.chars().enumerate().fold(0, |sum, (d, c)| {
            let size = shape(c, d);
            sum * size + index[&c].min(size - 1)
        })
    };
    let mut out = vec![0.0; output.chars().map(|c| sizes[&c]).product()];
    for mut at in 0..sizes.values().product::<usize>() {
        let mut index = BTreeMap::new();
        for c in &letters {
            index.insert(*c, at % sizes[c]);
            at /= sizes[c];
        }
        let factor = |(term, x): (&&str, &Tensor)| {
            x.to_vec::<f64>().unwrap()[flat(term, &|_, d| x.shape()[d], &index)]
        };
        let product: f64 = terms.iter().zip(operands).map(factor).product();
        out[flat(output, &|c, _| sizes[&c], &index)] += product;
    }
    out
}

#[test]
fn equals_the_sum_over_all_indices() {
    for (equation, shapes) in CASES {
        let operands: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| operand(i, s)).collect();
        let vars: Vec<Var> = operands.iter().cloned().map(Var::new).collect();
        let got = Var::einsum(equation, &vars).unwrap().to_vec::<f64>().unwrap();
        let want = twin(equation, &operands);
        assert_eq!(got.len(), want.len(), "{equation}");
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12), "{equation}: {got:?}, {want:?}");
    }
}

#[test]
fn first_and_second_derivatives_hold() {
    for (equation, shapes) in CASES {
        check_twice(shapes, |v| Var::einsum(equation, v));
    }
    check_twice(&[&[2, 1, 2, 3], &[2, 3, 2]], |v| Var::einsum("...ij,...jk->...ik", v));
}

#[test]
fn an_ellipsis_broadcasts_as_matmul_does() {
    let (a, b) = (Var::new(operand(0, &[2, 1, 2, 3])), Var::new(operand(1, &[4, 3, 2])));
    let product = a.matmul(&b).unwrap();
    for equation in ["...ij,...jk->...ik", "...ij,...jk"] {
        let got = Var::einsum(equation, &[&a, &b]).unwrap();
        assert_eq!(got.shape(), product.shape());
        assert_eq!(got.to_vec::<f64>().unwrap(), product.to_vec::<f64>().unwrap());
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let x = Var::new(operand(0, &[2, 3]));
    for (equation, count) in [("ij,ij->i", 1), ("ij,jk->ik", 2), ("ii->i", 1), ("i->i", 1)] {
        let message = Var::einsum(equation, &vec![&x; count]).unwrap_err().to_string();
        assert!(message.contains("einsum") && message.contains(equation), "{message}");
    }
}
