//! Derivatives of derivatives: Hessian-vector products, n-th derivatives, a gradient penalty.

use phalanx::Var;
use phalanx::autograd::{CrossEntropy, Error, Options, Result, grad};
use phalanx::kernels::{ConvOptions, Gelu};

use super::Call;

/// The higher-order family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    match call.op {
        "hvp" => Some(hvp(call)),
        "nth_grad" => Some(nth_grad(call)),
        "grad_penalty" => Some(grad_penalty(call)),
        _ => None,
    }
}

/// The gradients of a scalar, themselves differentiable.
fn gradients(y: &Var, inputs: &[&Var]) -> Result<Vec<Var>> {
    let grads = grad(&[(y.clone(), None)], inputs, Options { create_graph: true, ..Options::default() })?;
    let zeros = |x: &Var| Ok(Var::new(x.tensor().zeros_like()?));
    grads.into_iter().zip(inputs).map(|(g, x)| g.map_or_else(|| zeros(x), Ok)).collect()
}

/// The value, its gradients, and the gradients of their product with the directions.
fn hvp(call: &Call<'_>) -> Result<Vec<Var>> {
    let value = scalar(call)?;
    let names: Vec<String> =
        call.names().into_iter().filter(|n| call.opt(&format!("dir.{n}")).is_some()).collect();
    let inputs: Vec<&Var> = names.iter().map(|n| call.var(n)).collect::<Result<_>>()?;
    let grads = gradients(&value, &inputs)?;
    let mut along: Option<Var> = None;
    for (name, g) in names.iter().zip(&grads) {
        let part = g.mul(call.var(&format!("dir.{name}"))?)?.sum_all()?;
        along = Some(along.map_or(Ok(part.clone()), |sum| sum.add(&part))?);
    }
    let along = along.ok_or_else(|| Error::Custom("hvp without a direction".into()))?;
    let hvps = if along.requires_grad() {
        gradients(&along, &inputs)?
    } else {
        inputs.iter().map(|x| Ok(Var::new(x.tensor().zeros_like()?))).collect::<Result<_>>()?
    };
    Ok([value].into_iter().chain(grads).chain(hvps).collect())
}

fn scalar(call: &Call<'_>) -> Result<Var> {
    let v = |name: &str| call.var(name);
    match call.attrs.str_or("fn", "") {
        "rosenbrock" => {
            let x = v("x")?;
            let n = x.shape()[0] - 1;
            let (head, tail) = (x.narrow(0, 0, n)?, x.narrow(0, 1, n)?);
            let valley = tail.sub(&head.square()?)?.square()?.mul_scalar(100.0)?;
            valley.add(&head.neg()?.add_scalar(1.0)?.square()?)?.sum_all()
        }
        "tanh_sq" => v("x")?.tanh()?.square()?.sum_all(),
        "mix" => {
            let (x, y) = (v("x")?, v("y")?);
            let right = x.exp()?.div(&y.square()?.add_scalar(1.0)?)?;
            x.mul(y)?.sin()?.add(&right)?.sum_all()
        }
        "logsumexp_quad" => {
            let x = v("x")?;
            let top = v("A")?.matmul(x)?.logsumexp(&[0], false)?;
            top.add(&x.square()?.sum_all()?.mul_scalar(0.5)?)
        }
        "mlp_mse" => {
            let hidden = v("x")?.linear(v("W1")?, Some(v("b1")?))?.gelu(Gelu::Exact)?;
            hidden.linear(v("W2")?, Some(v("b2")?))?.sub(v("t")?)?.square()?.mean_all()
        }
        "softmax_xent" => {
            v("x")?.linear(v("W")?, Some(v("b")?))?.cross_entropy(v("t")?, &CrossEntropy::default())
        }
        "layernorm_silu" => {
            let x = v("x")?;
            let width = x.shape()[x.rank() - 1];
            x.layer_norm(&[width], Some(v("w")?), Some(v("b")?), 1e-5)?.silu()?.square()?.sum_all()
        }
        "conv_tanh" => {
            let padding = ConvOptions { padding: [1, 1], ..Default::default() };
            v("x")?.conv2d(v("w")?, Some(v("b")?), &padding)?.tanh()?.square()?.sum_all()
        }
        "attention" => {
            let q = v("q")?;
            let scale = 1.0 / (q.shape()[q.rank() - 1] as f64).sqrt();
            let scores = q.matmul(&v("k")?.transpose(-1, -2)?)?.mul_scalar(scale)?;
            scores.softmax(-1)?.matmul(v("v")?)?.square()?.sum_all()
        }
        "norm_ratio" => {
            let squares = v("x")?.square()?;
            squares.sum_all()?.pow_scalar(1.5)?.div(&squares.mean_all()?.add_scalar(1.0)?)
        }
        "var_log" => v("x")?.var(&[-1], 1.0, false)?.add_scalar(1.0)?.log()?.sum_all(),
        other => Err(Error::Custom(format!("unknown function {other}"))),
    }
}

fn nth_grad(call: &Call<'_>) -> Result<Vec<Var>> {
    let x = call.var("x")?;
    let n = call.int("n")?;
    let mut all = vec![match call.attrs.str_or("fn", "") {
        "exp_sin" => x.sin()?.exp()?,
        "tanh" => x.tanh()?,
        "sigmoid" => x.sigmoid()?,
        "gelu" => x.gelu(Gelu::Exact)?,
        "softplus" => x.softplus(1.0, 20.0)?,
        "rsqrt" => x.square()?.add_scalar(1.0)?.rsqrt()?,
        "quintic" => x.pow_scalar(5.0)?,
        "log_cosh" => x.exp()?.add(&x.neg()?.exp()?)?.log()?,
        other => return Err(Error::Custom(format!("unknown function {other}"))),
    }];
    for _ in 0..n {
        let last = all[all.len() - 1].sum_all()?;
        all.extend(gradients(&last, &[x])?);
    }
    Ok(all)
}

fn grad_penalty(call: &Call<'_>) -> Result<Vec<Var>> {
    let (x, w, u) = (call.var("x")?, call.var("W")?, call.var("u")?);
    let y = x.matmul(w)?.tanh()?.matmul(u)?.sum_all()?;
    let g = gradients(&y, &[x])?.remove(0);
    let norms = g.square()?.sum(&[-1], false)?.add_scalar(1e-12)?.sqrt()?;
    let value = norms.add_scalar(-1.0)?.square()?.mean_all()?;
    let grads = gradients(&value, &[w, u])?;
    Ok([value].into_iter().chain(grads).collect())
}
