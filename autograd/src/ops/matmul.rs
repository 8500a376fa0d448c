//! Matrix products: `matmul`, and products of vectors, matrices and batches under PyTorch's names.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Error};

use super::frame::{composed, floats, named, same};
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads2, record};

/// `c = a b`, matrices in the last two dimensions, those before them broadcast; a one-dimensional `a` is a row, a
/// one-dimensional `b` a column, and that dimension is not in the result.
///
/// Derivative: `da = dc bᵀ`, `db = aᵀ dc`, each summed over the batch dimensions that were broadcast. Each operand is
/// saved for the other's gradient, if that is wanted. Transposes are views. Where `b` is one matrix for the whole
/// batch, `db` is a single product over all rows, in the order they lie.
impl Var {
    /// The matrix product with `other`, batched and broadcast.
    ///
    /// # Errors
    /// If the inner sizes differ, the others do not broadcast, a tensor has no dimensions, or dtypes or devices
    /// differ.
    pub fn matmul(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::matmul(self.tensor(), other.tensor())?;
        record("matmul", &[self, other], y, |s: &SaveContext<'_>| {
            let for_other = |i: usize| s.needs(1 - i).then(|| s.input(i)).transpose();
            let shapes = [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
            Ok(Matmul { shapes, operands: [for_other(0)?, for_other(1)?] })
        })
    }
}

struct Matmul {
    shapes: [Dims; 2],
    operands: [Option<SavedVariable>; 2],
}

impl Backward for Matmul {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        // All three as matrices: a row has its dimension in front, a column behind.
        let [mut a_shape, mut b_shape] = self.shapes.clone();
        let mut dy_shape = Dims::from_slice(cx.dy().shape());
        if b_shape.len() == 1 {
            b_shape.push(1);
            dy_shape.push(1);
        }
        if a_shape.len() == 1 {
            a_shape.insert(0, 1);
            dy_shape.insert(dy_shape.len() - 1, 1);
        }
        let dy = cx.dy().reshape_to(&dy_shape)?;
        let grad_a = |b: Var| {
            let b = b.reshape_to(&b_shape)?.transpose(-2, -1)?;
            dy.matmul(&b)?.sum_to(&a_shape)?.reshape_to(&self.shapes[0])
        };
        let grad_b = |a: Var| {
            let a = a.reshape_to(&a_shape)?;
            if b_shape.len() == 2 {
                return rows(&a)?.transpose(-2, -1)?.matmul(&rows(&dy)?)?.reshape_to(&self.shapes[1]);
            }
            a.transpose(-2, -1)?.matmul(&dy)?.sum_to(&b_shape)?.reshape_to(&self.shapes[1])
        };
        let other = |i: usize| self.operands[1 - i].as_ref().filter(|_| cx.needs(i));
        let da = other(0).map(|b| grad_a(cx.get(b)?)).transpose()?;
        let db = other(1).map(|a| grad_b(cx.get(a)?)).transpose()?;
        grads2(da, db)
    }
}

/// The rows of all matrices as one matrix.
pub(super) fn rows(x: &Var) -> Result<Var> {
    let (lead, width) = x.shape().split_at(x.rank() - 1);
    x.reshape_to(&[lead.iter().product(), width[0]])
}

/// Products under PyTorch's names, each of which takes one form only: of vectors, matrices and batches of them, and what is
/// made of such. Composed of `matmul`, `mul` and `sum`.
///
/// bf16 and f16: `addmm` and `baddbmm` round the product to the dtype, add the other operand in f32, and round the sum
/// once.
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
    /// If there is no such dimension, they have other than as many dimensions, the shapes do not broadcast, the dtype
    /// is bool, or dtypes or devices differ.
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

    /// `y[.., o] = sum over i and j of self[.., i] weight[o, i, j] other[.., j] + bias[o]`: two inputs with the same
    /// leading dimensions.
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

#[cfg(test)]
mod tests {
    use phalanx_kernels::Gelu;
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{Leaf, Slot, Var};

    #[test]
    fn first_and_second_derivatives_hold_for_every_pairing_of_ranks() {
        let pairs: [(&[usize], &[usize]); 8] = [
            (&[4], &[4]),
            (&[3, 4], &[4]),
            (&[4], &[4, 2]),
            (&[3, 4], &[4, 2]),
            (&[2, 3, 4], &[4, 2]),
            (&[3, 4], &[2, 4, 2]),
            (&[2, 1, 3, 2], &[3, 2, 2]),
            (&[2, 3, 4], &[4]),
        ];
        for (a, b) in pairs {
            check_twice(&[a, b], |v| v[0].matmul(&v[1]));
        }
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        for x in [&[4][..], &[3, 4], &[2, 3, 4]] {
            check_twice(&[x, &[5, 4], &[5]], |v| v[0].linear(&v[1], Some(&v[2])));
            check_twice(&[x, &[5, 4]], |v| v[0].linear(&v[1], None));
            for kind in [Gelu::Exact, Gelu::Tanh] {
                check_twice(&[x, &[5, 4], &[5], &[3, 5]], |v| {
                    v[0].linear_gelu(&v[1], Some(&v[2]), kind)?.linear(&v[3], None)
                });
            }
        }
    }

    #[test]
    fn a_gradient_written_into_a_buffer_has_the_bits_of_one_added_to_it() {
        let values: Vec<f32> = (0..12).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = Var::from_slice(&values, &[4, 3], Device::CPU).unwrap();
        let grad = |slot: Option<DType>| {
            let leaf =
                Leaf::new(Tensor::from_slice(&values[..6], &[2, 3], Device::CPU).unwrap(), true).unwrap();
            let start = Tensor::from_slice(&values[6..], &[2, 3], Device::CPU).unwrap();
            match slot {
                Some(dtype) => {
                    leaf.set_slot(Slot::Into(phalanx_kernels::cast(&start, dtype).unwrap())).unwrap()
                }
                None => leaf.set_grad(Some(Var::new(start))),
            }
            x.linear(&leaf.var(), None).unwrap().sum_all().unwrap().backward().unwrap();
            phalanx_kernels::cast(leaf.grad().unwrap().tensor(), DType::F64).unwrap().to_vec::<f64>().unwrap()
        };
        assert_eq!(grad(None), grad(Some(DType::F32)));
        let wide = grad(Some(DType::F64));
        assert!(grad(None).iter().zip(&wide).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
