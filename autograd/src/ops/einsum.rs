//! Einstein summation: `y[output] = sum of the operands' products over all labels that are not in the output`.
//!
//! Composed of diagonals, sums, views and products, whose derivatives it has. Operands are taken from left to right. Two
//! of them meet in one batched matrix product: labels of both that live on are its batch, labels of both that end here
//! are summed by it, and the labels of one are its rows or columns. Where nothing is summed it is a product by elements.
//! A label that only one operand has, and that ends, is summed before.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use phalanx_tensor::{Dims, Error};

use crate::{Result, Var};

impl Var {
    /// The sum of products that `equation` describes, as in `"bij,bjk->bik"`: a letter for each dimension of each
    /// operand, `...` for any number of broadcast dimensions, and the result's letters. A letter repeated in an operand
    /// takes its diagonal; a letter not in the result is summed over; without `->` the result has the ellipsis and
    /// then, in alphabetical order, the letters that occur once. Sizes of 1 stretch.
    ///
    /// # Errors
    /// If the equation makes no sense or does not fit the operands, or their dtypes or devices differ.
    pub fn einsum<V: Borrow<Var>>(equation: &str, operands: &[V]) -> Result<Var> {
        let ranks: Vec<usize> = operands.iter().map(|v| v.borrow().rank()).collect();
        let wrong = |why: String| Error::invalid("einsum", format!("the equation \"{equation}\": {why}"));
        let Equation { operands: labels, output } = Equation::parse(equation, &ranks).map_err(wrong)?;
        let mut terms = Vec::new();
        for (var, labels) in operands.iter().zip(labels) {
            terms.push(Term { var: var.borrow().clone(), labels }.diagonals().map_err(wrong)??);
        }
        let sizes = sizes(&terms).map_err(wrong)?;
        let terms =
            terms.into_iter().map(|term| term.without_stretched(&sizes)).collect::<Result<Vec<_>>>()?;
        let mut later: Vec<Vec<Label>> = terms.iter().map(|term| term.labels.clone()).collect();
        let mut terms = terms.into_iter();
        let mut all = terms.next().ok_or_else(|| wrong("there are no operands".into()))?;
        later[0].clear();
        for (i, term) in terms.enumerate() {
            later[i + 1].clear();
            let lives = |label: &Label| output.contains(label) || later.iter().flatten().any(|l| l == label);
            all = all.times(term, lives)?;
        }
        let all = all.summed(|label| output.contains(label))?;
        Ok(all.in_order(&output)?.var)
    }
}

/// A value whose dimensions have labels.
struct Term {
    var: Var,
    labels: Vec<Label>,
}

/// The size of each label: 1 only if all its dimensions are 1.
fn sizes(terms: &[Term]) -> std::result::Result<BTreeMap<Label, usize>, String> {
    let mut sizes = BTreeMap::new();
    for term in terms {
        for (&label, &size) in term.labels.iter().zip(term.var.shape()) {
            let known = sizes.entry(label).or_insert(size);
            if *known == 1 {
                *known = size;
            } else if size != 1 && size != *known {
                return Err(format!("{label} has sizes {known} and {size}"));
            }
        }
    }
    Ok(sizes)
}

impl Term {
    /// A label named twice becomes the diagonal of its dimensions.
    fn diagonals(mut self) -> std::result::Result<Result<Term>, String> {
        let twice = |labels: &[Label]| {
            (0..labels.len()).find_map(|i| Some((labels[..i].iter().position(|l| *l == labels[i])?, i)))
        };
        while let Some((a, b)) = twice(&self.labels) {
            let (rows, cols) = (self.var.shape()[a], self.var.shape()[b]);
            if rows != cols {
                return Err(format!("{} has sizes {rows} and {cols} in one operand", self.labels[a]));
            }
            self.var = match self.var.diagonal(0, a, b) {
                Ok(var) => var,
                Err(error) => return Ok(Err(error)),
            };
            let label = self.labels.remove(b);
            self.labels.remove(a);
            self.labels.push(label);
        }
        Ok(Ok(self))
    }

    /// Without dimensions of size 1 whose label is larger elsewhere: the others' sizes stand for them.
    fn without_stretched(self, sizes: &BTreeMap<Label, usize>) -> Result<Term> {
        let kept = |&d: &usize| self.var.shape()[d] != 1 || sizes[&self.labels[d]] == 1;
        let dims: Vec<usize> = (0..self.labels.len()).filter(kept).collect();
        let shape: Dims = dims.iter().map(|&d| self.var.shape()[d]).collect();
        let labels = dims.iter().map(|&d| self.labels[d]).collect();
        Ok(Term { var: self.var.reshape_to(&shape)?, labels })
    }

    /// Summed over all labels but those to keep.
    fn summed(self, keep: impl Fn(&Label) -> bool) -> Result<Term> {
        let dims: Vec<usize> = (0..self.labels.len()).filter(|&d| !keep(&self.labels[d])).collect();
        if dims.is_empty() {
            return Ok(self);
        }
        let labels = self.labels.into_iter().filter(|label| keep(label)).collect();
        Ok(Term { var: self.var.sum(&dims, false)?, labels })
    }

    /// With its dimensions in the order of `labels`, which are all of its own.
    fn in_order(self, labels: &[Label]) -> Result<Term> {
        let dims: Vec<usize> =
            labels.iter().filter_map(|label| self.labels.iter().position(|l| l == label)).collect();
        let in_order = dims.iter().enumerate().all(|(i, &d)| i == d);
        let var = if in_order { self.var } else { self.var.permute(&dims)? };
        Ok(Term { var, labels: labels.to_vec() })
    }

    /// The product with another, summed over the labels of both that do not live on.
    fn times(self, other: Term, lives: impl Fn(&Label) -> bool) -> Result<Term> {
        let left = self.summed_but(&other, &lives)?;
        let right = other.summed_but(&left, &lives)?;
        let of = |term: &Term, keep: &dyn Fn(&Label) -> bool| -> Vec<Label> {
            term.labels.iter().copied().filter(|label| keep(label)).collect()
        };
        let batch = of(&left, &|l| right.labels.contains(l) && lives(l));
        let inner = of(&left, &|l| right.labels.contains(l) && !lives(l));
        let rows = of(&left, &|l| !right.labels.contains(l));
        let cols = of(&right, &|l| !left.labels.contains(l));
        let sizes = |term: &Term, labels: &[Label]| -> Vec<usize> {
            let size = |label| term.labels.iter().position(|l| l == label).map(|d| term.var.shape()[d]);
            labels.iter().filter_map(size).collect()
        };
        let (b, m, n) = (sizes(&left, &batch), sizes(&left, &rows), sizes(&right, &cols));
        let k: Option<usize> = (!inner.is_empty()).then(|| sizes(&left, &inner).iter().product());
        let labels = [&batch[..], &rows, &cols].concat();
        let left = left.in_order(&[&batch[..], &rows, &inner].concat())?.var;
        let right = right.in_order(&[&batch[..], &inner, &cols].concat())?.var;
        let var = match k {
            Some(k) => {
                let left = left.reshape_to(&[&b[..], &[m.iter().product(), k]].concat())?;
                let right = right.reshape_to(&[&b[..], &[k, n.iter().product()]].concat())?;
                left.matmul(&right)?.reshape_to(&[b, m, n].concat())?
            }
            None => {
                let left = left.reshape_to(&[&b[..], &m, &vec![1; n.len()]].concat())?;
                left.mul(&right.reshape_to(&[&b[..], &vec![1; m.len()], &n].concat())?)?
            }
        };
        Ok(Term { var, labels })
    }

    /// Summed over labels that neither live on nor meet the other.
    fn summed_but(self, other: &Term, lives: &impl Fn(&Label) -> bool) -> Result<Term> {
        self.summed(|label| lives(label) || other.labels.contains(label))
    }
}

// What an einsum equation says: a label for each dimension of the operands and of the result.

/// The name of a dimension: a letter, or the i-th dimension of the ellipsis counted from its last. Letters come in
/// the order of ASCII, after the ellipsis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Ellipsis(usize),
    Letter(char),
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Ellipsis(i) => write!(f, "...[-{}]", i + 1),
            Label::Letter(c) => write!(f, "{c}"),
        }
    }
}

/// The labels of each operand's dimensions, and of the result's.
#[derive(Debug, PartialEq, Eq)]
struct Equation {
    operands: Vec<Vec<Label>>,
    output: Vec<Label>,
}

impl Equation {
    /// Reads `text` for operands of these ranks; the error says what is wrong.
    fn parse(text: &str, ranks: &[usize]) -> Result<Equation, String> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (inputs, output) = match text.split_once("->") {
            Some((inputs, output)) => (inputs, Some(output)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = inputs.split(',').collect();
        if terms.len() != ranks.len() {
            return Err(format!("it names {} operands, and {} came", terms.len(), ranks.len()));
        }
        let operand = |(term, &rank): (&&str, &usize)| {
            let (letters, _) = split(term)?;
            let labels = labels(term, rank.checked_sub(letters))?;
            let fits = labels.len() == rank;
            fits.then_some(labels).ok_or_else(|| format!("\"{term}\" does not name {rank} dimensions"))
        };
        let operands: Vec<Vec<Label>> =
            terms.iter().zip(ranks).map(operand).collect::<Result<_, String>>()?;
        let output = match output {
            Some(term) => explicit(term, &operands)?,
            None => implicit(&operands),
        };
        Ok(Equation { operands, output })
    }
}

/// How many letters a term has, and where its ellipsis is.
fn split(term: &str) -> Result<(usize, Option<usize>), String> {
    let at = term.find("...");
    let letters = term.replacen("...", "", 1);
    match letters.chars().find(|c| !c.is_ascii_alphabetic()) {
        Some(c) => Err(format!("\"{c}\" in \"{term}\" is no letter and no ellipsis of its own")),
        None => Ok((letters.len(), at)),
    }
}

/// A term's labels, with `covered` dimensions for an ellipsis (`None`: there are more letters than dimensions).
fn labels(term: &str, covered: Option<usize>) -> Result<Vec<Label>, String> {
    let (letters, at) = split(term)?;
    let covered = covered.ok_or_else(|| format!("\"{term}\" names more than the operand's dimensions"))?;
    let mut labels: Vec<Label> = term.chars().filter(|&c| c != '.').map(Label::Letter).collect();
    if let Some(at) = at {
        labels.splice(at.min(letters)..at.min(letters), (0..covered).rev().map(Label::Ellipsis));
    }
    Ok(labels)
}

/// How many dimensions the operands' ellipses cover at most.
fn ellipsis(operands: &[Vec<Label>]) -> usize {
    let covered = |label: &Label| if let Label::Ellipsis(i) = label { i + 1 } else { 0 };
    operands.iter().flatten().map(covered).max().unwrap_or(0)
}

fn explicit(term: &str, operands: &[Vec<Label>]) -> Result<Vec<Label>, String> {
    let output = labels(term, Some(ellipsis(operands)))?;
    for (i, label) in output.iter().enumerate() {
        if output[..i].contains(label) {
            return Err(format!("the result \"{term}\" names a dimension twice"));
        }
        if !operands.iter().flatten().any(|l| l == label) {
            return Err(format!("the result \"{term}\" names a dimension that no operand has"));
        }
    }
    Ok(output)
}

/// Without a result: the ellipsis, then every letter that occurs once.
fn implicit(operands: &[Vec<Label>]) -> Vec<Label> {
    let mut counts = BTreeMap::new();
    for &label in operands.iter().flatten() {
        if matches!(label, Label::Letter(_)) {
            *counts.entry(label).or_insert(0) += 1;
        }
    }
    let ellipsis = (0..ellipsis(operands)).rev().map(Label::Ellipsis);
    ellipsis.chain(counts.into_iter().filter(|c| c.1 == 1).map(|c| c.0)).collect()
}

#[cfg(test)]
mod tests {
    // Equations against the sum of products over all labels, and their derivatives.

    use phalanx_tensor::{Device, Tensor};

    use super::*;
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
            assert!(
                got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12),
                "{equation}: {got:?}, {want:?}"
            );
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

    fn shown(labels: &[Label]) -> String {
        labels.iter().map(|label| format!("{label} ")).collect()
    }

    fn parsed(text: &str, ranks: &[usize]) -> Result<String, String> {
        let equation = Equation::parse(text, ranks)?;
        let operands: Vec<String> = equation.operands.iter().map(|o| shown(o)).collect();
        Ok(format!("{}-> {}", operands.join(", "), shown(&equation.output)))
    }

    #[test]
    fn equations_are_read() {
        assert_eq!(parsed(" i j , jk -> i k", &[2, 2]).unwrap(), "i j , j k -> i k ");
        assert_eq!(parsed("ba", &[2]).unwrap(), "b a -> a b ");
        assert_eq!(parsed("bA,aA", &[2, 2]).unwrap(), "b A , a A -> a b ");
        assert_eq!(parsed("bA", &[2]).unwrap(), "b A -> A b ");
        assert_eq!(parsed("ii", &[2]).unwrap(), "i i -> ");
        let batched = "i ...[-2] ...[-1] j , ...[-1] j k -> ...[-2] ...[-1] i k ";
        assert_eq!(parsed("i...j,...jk", &[4, 3]).unwrap(), batched);
        assert_eq!(parsed("...,...->...", &[0, 1]).unwrap(), ", ...[-1] -> ...[-1] ");
        assert_eq!(parsed("i...->i", &[2]).unwrap(), "i ...[-1] -> i ");
        assert_eq!(parsed(",->", &[0, 0]).unwrap(), ", -> ");
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        for (text, ranks, why) in [
            ("ij,jk->ik", &[2][..], "2 operands, and 1 came"),
            ("ij", &[3], "does not name 3"),
            ("ijk", &[2], "more than"),
            ("i1", &[2], "no letter"),
            ("i..", &[2], "no letter"),
            ("......", &[2], "no letter"),
            ("ij->ii", &[2], "twice"),
            ("ij->ik", &[2], "no operand has"),
            ("ij->j->i", &[2], "no letter"),
        ] {
            let message = parsed(text, ranks).unwrap_err();
            assert!(message.contains(why), "{text}: {message}");
        }
    }
}
