//! Products under PyTorch's names, each of which takes one form only: of vectors, matrices and batches of them, and what is
//! made of such. Composed of `matmul`, `mul` and `sum`.
//!
//! bf16 and f16: `addmm` and `baddbmm` round the product to the dtype, add the other operand in f32, and round the sum once.

use phalanx_tensor::{DType, Dims, Error};

use super::composed::{composed, floats, named, same};
use crate::{Result, Var};

impl Var {
    /// The sum of the products of two vectors' elements, without dimensions.
    ///
    /// # Errors
    /// If they are no two vectors of one size, or dtypes or devices differ.
    pub fn dot(&self, other: &Var) -> Result<Var> {
        let fits = self.rank() == 1 && self.shape() == other.shape();
        shapes("dot", fits, &[self, other], "two vectors of one size")?;
        contracted("dot", self, other, other)
    }

    /// A matrix `[n, m]` times a vector `[m]`: a vector `[n]`.
    ///
    /// # Errors
    /// If the shapes are others, or dtypes or devices differ.
    pub fn mv(&self, vector: &Var) -> Result<Var> {
        let fits = self.rank() == 2 && vector.rank() == 1 && self.shape()[1] == vector.shape()[0];
        shapes("mv", fits, &[self, vector], "[n, m] and [m]")?;
        contracted("mv", self, vector, vector)
    }

    /// Matrices [b, n, m] times [b, m, p], one by one: [b, n, p]. Nothing is broadcast ([`Var::matmul`] does).
    ///
    /// # Errors
    /// If the shapes are others, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn bmm(&self, other: &Var) -> Result<Var> {
        batches("bmm", &[self, other], self, other)?;
        floats("bmm", &[self, other])?;
        named("bmm", self.matmul(other))
    }

    /// `beta self + alpha a b` of matrices a [n, m] and b [m, p]; this broadcasts to [n, p], and is not looked at if `beta`
    /// is 0.
    ///
    /// # Errors
    /// If the shapes are others, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn addmm(&self, a: &Var, b: &Var, beta: f64, alpha: f64) -> Result<Var> {
        let fits = a.rank() == 2 && b.rank() == 2 && a.shape()[1] == b.shape()[0];
        shapes("addmm", fits, &[self, a, b], "[n, p], [n, m] and [m, p]")?;
        added("addmm", self, a, b, beta, alpha)
    }

    /// `beta self + alpha a b` of batches of matrices a [b, n, m] and b [b, m, p]; this broadcasts to [b, n, p], and is not
    /// looked at if `beta` is 0.
    ///
    /// # Errors
    /// If the shapes are others, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn baddbmm(&self, a: &Var, b: &Var, beta: f64, alpha: f64) -> Result<Var> {
        batches("baddbmm", &[self, a, b], a, b)?;
        added("baddbmm", self, a, b, beta, alpha)
    }

    /// Every element of a vector `[n]` times every one of another `[m]`: `[n, m]`.
    ///
    /// # Errors
    /// If they are no vectors, the dtype is bool, or dtypes or devices differ.
    pub fn outer(&self, other: &Var) -> Result<Var> {
        shapes("outer", self.rank() == 1 && other.rank() == 1, &[self, other], "two vectors")?;
        named("outer", self.unsqueeze(1)?.mul(&other.unsqueeze(0)?))
    }

    /// The Kronecker product: every element of this times all of `other`, whose blocks lie as this one's elements do. Of
    /// tensors of other than as many dimensions the one with fewer gets some in front.
    ///
    /// # Errors
    /// If the dtype is bool, or dtypes or devices differ.
    pub fn kron(&self, other: &Var) -> Result<Var> {
        let rank = self.rank().max(other.rank());
        let sizes = |x: &Var| -> Dims {
            std::iter::repeat_n(1, rank - x.rank()).chain(x.shape().iter().copied()).collect()
        };
        let (a, b) = (sizes(self), sizes(other));
        let outer: Dims = a.iter().flat_map(|&n| [n, 1]).collect();
        let inner: Dims = b.iter().flat_map(|&n| [1, n]).collect();
        let merged: Dims = a.iter().zip(&b).map(|(a, b)| a * b).collect();
        let product = named("kron", self.reshape_to(&outer)?.mul(&other.reshape_to(&inner)?))?;
        product.reshape_to(&merged)
    }

    /// The vector product along `dim`, of size 3, by default the first such of this; the others broadcast.
    ///
    /// # Errors
    /// If there is no such dimension, they have other than as many dimensions, the shapes do not broadcast, the dtype is bool,
    /// or dtypes or devices differ.
    pub fn cross(&self, other: &Var, dim: Option<isize>) -> Result<Var> {
        const NAME: &str = "cross";
        let found = match dim {
            Some(dim) => Some(phalanx_tensor::Dim::resolve(dim, self.rank(), NAME)?),
            None => self.shape().iter().position(|&n| n == 3),
        };
        let three = |x: &Var, d: usize| x.rank() == self.rank() && x.shape()[d] == 3;
        let Some(dim) = found.filter(|&d| three(self, d) && three(other, d)) else {
            let wanted = "as many dimensions, and size 3 along the one to multiply along";
            return Err(misfit(NAME, &[self, other], wanted));
        };
        let dims = [dim];
        same(NAME, &[self, other])?;
        let product = |a: &Var, b: &Var| {
            let ahead = a.roll(&[-1], &dims)?.mul(&b.roll(&[-2], &dims)?)?;
            ahead.sub(&a.roll(&[-2], &dims)?.mul(&b.roll(&[-1], &dims)?)?)
        };
        if self.dtype().is_float() {
            return composed(NAME, &[self, other], |v| product(&v[0], &v[1]));
        }
        named(NAME, product(self, other))
    }

    /// `y[.., o] = sum over i and j of self[.., i] weight[o, i, j] other[.., j] + bias[o]`: two inputs with the same leading
    /// dimensions.
    ///
    /// # Errors
    /// If the shapes do not fit, the dtype is no floating-point one, or dtypes or devices differ.
    pub fn bilinear(&self, other: &Var, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        const NAME: &str = "bilinear";
        let wanted = "[.., i], [.., j], a weight [o, i, j] and a bias [o]";
        let inputs: Vec<&Var> = [self, other, weight].into_iter().chain(bias).collect();
        let lead = self.rank().saturating_sub(1);
        let fits = self.rank() > 0
            && self.rank() == other.rank()
            && self.shape()[..lead] == other.shape()[..lead]
            && weight.rank() == 3
            && weight.shape()[1] == self.shape()[lead]
            && weight.shape()[2] == other.shape()[lead]
            && bias.is_none_or(|b| b.shape() == &weight.shape()[..1]);
        shapes(NAME, fits, &inputs, wanted)?;
        let n: usize = self.shape()[..lead].iter().product();
        let &[o, i, j] = weight.shape() else { return Ok(self.clone()) };
        let shape: Dims = self.shape()[..lead].iter().copied().chain([o]).collect();
        composed(NAME, &inputs, |v| {
            let by_first = v[2].permute(&[1, 0, 2])?.reshape_to(&[i, o * j])?;
            let halves = v[0].reshape_to(&[n, i])?.matmul(&by_first)?.reshape_to(&[n, o, j])?;
            let y = halves.mul(&v[1].reshape_to(&[n, 1, j])?)?.sum(&[2], false)?;
            let y = v.get(3).map_or(Ok(y.clone()), |bias| y.add(bias))?;
            y.reshape_to(&shape)
        })
    }

    /// The sum of a matrix's diagonal, without dimensions. Integers and bools are summed in i64.
    ///
    /// # Errors
    /// If there are other than two dimensions.
    pub fn trace(&self) -> Result<Var> {
        shapes("trace", self.rank() == 2, &[self], "a matrix")?;
        self.diagonal(0, 0, 1)?.sum_all()
    }
}

/// An error that lists the shapes unless they fit.
fn shapes(name: &'static str, fits: bool, inputs: &[&Var], wanted: &str) -> Result<()> {
    if fits { Ok(()) } else { Err(misfit(name, inputs, wanted)) }
}

fn misfit(name: &'static str, inputs: &[&Var], wanted: &str) -> crate::Error {
    let got: Vec<String> = inputs.iter().map(|x| format!("{:?}", x.shape())).collect();
    Error::shape(name, got.join(", "), wanted).into()
}

fn batches(name: &'static str, inputs: &[&Var], a: &Var, b: &Var) -> Result<()> {
    let fits = a.rank() == 3 && b.rank() == 3 && (a.shape()[0], a.shape()[2]) == (b.shape()[0], b.shape()[1]);
    shapes(
        name,
        fits,
        inputs,
        "batches of matrices [b, n, m] and [b, m, p], and what broadcasts to [b, n, p]",
    )
}

/// `matrix` (or a vector) times a vector; of integers by products and sums, in their dtype.
fn contracted(name: &'static str, matrix: &Var, vector: &Var, row: &Var) -> Result<Var> {
    same(name, &[matrix, vector])?;
    match matrix.dtype() {
        dtype if dtype.is_float() => named(name, matrix.matmul(vector)),
        DType::Bool => Err(Error::dtype(name, DType::Bool, "a number dtype").into()),
        dtype => named(name, matrix.mul(row)?.sum(&[-1], false)?.to(dtype)),
    }
}

fn added(name: &'static str, x: &Var, a: &Var, b: &Var, beta: f64, alpha: f64) -> Result<Var> {
    floats(name, &[x, a, b])?;
    let product = named(name, a.matmul(b))?;
    if phalanx_tensor::broadcast_shapes(name, x.shape(), product.shape())?[..] != *product.shape() {
        let got = format!("{:?} to add to {:?}", x.shape(), product.shape());
        return Err(Error::shape(name, got, "a shape that broadcasts to the product's").into());
    }
    composed(name, &[&product, x], |v| {
        let scaled = if alpha == 1.0 { v[0].clone() } else { v[0].mul_scalar(alpha)? };
        match beta {
            0.0 => Ok(scaled),
            1.0 => scaled.add(&v[1]),
            beta => scaled.add(&v[1].mul_scalar(beta)?),
        }
    })
}
