//! Einstein summation: `y[output] = sum of the operands' products over all labels that are not in the output`.
//!
//! Composed of diagonals, sums, views and products, whose derivatives it has. Operands are taken from left to right. Two
//! of them meet in one batched matrix product: labels of both that live on are its batch, labels of both that end here
//! are summed by it, and the labels of one are its rows or columns. Where nothing is summed it is a product by elements.
//! A label that only one operand has, and that ends, is summed before.

mod equation;

use std::borrow::Borrow;
use std::collections::BTreeMap;

use phalanx_tensor::{Dims, Error};

use crate::{Result, Var};
use equation::{Equation, Label};

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

#[cfg(test)]
mod tests;
