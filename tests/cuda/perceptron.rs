//! GPT-2's MLP on a GPU, `gelu(x W1ᵀ + b1) W2ᵀ + b2`: gelu, its slope and the biases' gradients are part of the products of halves.

use phalanx::autograd::{Options, backward, backward_inputs, checkpoint, grad};
use phalanx::kernels::{self, Gelu};
use phalanx::{DType, Device, Leaf, Tensor, Var};

type Result<T> = std::result::Result<T, String>;

const GPU: Device = Device::Cuda(0);

/// x, W1, b1, W2 and b2 as leaves, and the gradient of the result.
struct Perceptron {
    leaves: Vec<Leaf>,
    dy: Var,
    has_bias: bool,
}

/// Whether rows or columns lie side by side in x and the weights.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Rows,
    Columns,
}

impl Perceptron {
    fn new(
        [rows, inputs, inner]: [usize; 3],
        dtype: DType,
        device: Device,
        has_bias: bool,
        layout: Layout,
    ) -> phalanx::autograd::Result<Perceptron> {
        // All devices and dtypes have the same values, those of bf16.
        let tensor = |shape: &[usize], seed: usize, scale: f32| {
            let value = |i: usize| ((i * 37 + seed * 11) % 61) as f32 / 30.0 - 1.0;
            let values: Vec<f32> = (0..shape.iter().product()).map(|i| value(i) * scale).collect();
            let exact = kernels::cast(&Tensor::from_slice(&values, shape, Device::CPU)?, DType::BF16)?;
            kernels::cast(&exact, dtype)?.to_device(device, false)
        };
        let matrix = |shape: [usize; 2], seed, scale| match layout {
            Layout::Rows => tensor(&shape, seed, scale),
            Layout::Columns => tensor(&[shape[1], shape[0]], seed, scale)?.transpose(0, 1),
        };
        let x = matrix([rows, inputs], 1, 2.0)?;
        let (w1, b1) = (matrix([inner, inputs], 2, 0.5)?, tensor(&[inner], 3, 1.0)?);
        let (w2, b2) = (matrix([inputs, inner], 4, 0.5)?, tensor(&[inputs], 5, 1.0)?);
        let leaves = [x, w1, b1, w2, b2].into_iter().enumerate().map(|(i, t)| Leaf::new(t, i > 0));
        let leaves = leaves.collect::<phalanx::autograd::Result<_>>()?;
        Ok(Perceptron { leaves, dy: Var::new(tensor(&[rows, inputs], 6, 1.0)?), has_bias })
    }

    fn bias(&self, i: usize) -> Option<Var> {
        self.has_bias.then(|| self.leaves[i].var())
    }

    fn hidden(&self) -> phalanx::autograd::Result<Var> {
        self.leaves[0].var().linear_gelu(&self.leaves[1].var(), self.bias(2).as_ref(), Gelu::Tanh)
    }

    fn output(&self, hidden: &Var) -> phalanx::autograd::Result<Var> {
        hidden.linear(&self.leaves[3].var(), self.bias(4).as_ref())
    }

    fn backward(&self, y: Var) -> phalanx::autograd::Result<()> {
        backward(&[(y, Some(self.dy.clone()))], Options::default())
    }

    /// The gradients that there are.
    fn grads(&self) -> phalanx::autograd::Result<Vec<Vec<f64>>> {
        self.leaves.iter().filter_map(|leaf| leaf.grad()).map(|grad| numbers(&grad)).collect()
    }

    /// The result and the gradients of a plain pass.
    fn all(&self) -> phalanx::autograd::Result<Vec<Vec<f64>>> {
        let y = self.output(&self.hidden()?)?;
        let result = numbers(&y)?;
        self.backward(y)?;
        Ok([vec![result], self.grads()?].concat())
    }
}

fn numbers(x: &Var) -> phalanx::autograd::Result<Vec<f64>> {
    Ok(kernels::cast(x.tensor(), DType::F64)?.to_vec::<f64>()?)
}

/// Whether all values are within a share of the largest one.
fn close(what: &str, got: &[Vec<f64>], wanted: &[Vec<f64>], tolerance: f64) -> Result<()> {
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let most = wanted.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        let apart = got.iter().zip(wanted).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
        if got.len() != wanted.len() || apart.is_nan() || apart > tolerance * most {
            return Err(format!("{what}: value {i} is {apart:.2e} apart, of {most:.2e}"));
        }
    }
    if got.len() == wanted.len() { Ok(()) } else { Err(format!("{what}: {} values", got.len())) }
}

fn same(what: &str, got: &[Vec<f64>], wanted: &[Vec<f64>]) -> Result<()> {
    if got == wanted { Ok(()) } else { Err(format!("{what}: got {got:?}, wanted {wanted:?}")) }
}

fn said<T>(result: phalanx::autograd::Result<T>) -> Result<T> {
    result.map_err(|error| error.to_string())
}

const TOLERANCES: [(DType, f64); 4] =
    [(DType::BF16, 0.02), (DType::F16, 2.5e-3), (DType::F32, 1e-5), (DType::F64, 1e-12)];

/// Results and gradients are the CPU's in f64, to the dtype's rounding, where sizes are multiples of 8 and where not.
pub fn has_the_gradients_of_a_cpu() -> Result<()> {
    for sizes in [[6, 8, 32], [5, 16, 24], [5, 7, 9], [1, 8, 8], [3, 9, 16]] {
        for (has_bias, layout) in [(true, Layout::Rows), (false, Layout::Rows), (true, Layout::Columns)] {
            let run = |dtype, device| {
                said(Perceptron::new(sizes, dtype, device, has_bias, layout).and_then(|p| p.all()))
            };
            let wanted = run(DType::F64, Device::CPU)?;
            for (dtype, tolerance) in TOLERANCES {
                let what = format!("{sizes:?} {dtype}, bias {has_bias}, by rows {}", layout == Layout::Rows);
                close(&what, &run(dtype, GPU)?, &wanted, tolerance)?;
            }
        }
    }
    Ok(())
}

/// Forward and backward are six launches for halves: a product each. A launch more fails here.
pub fn is_six_launches() -> Result<()> {
    // In f32 with gelu, its slope, and each bias's gradient.
    let wanted = [(DType::BF16, [2, 4]), (DType::F16, [2, 4]), (DType::F32, [3, 7])];
    for (dtype, wanted) in wanted {
        let mut counts = [0; 2];
        // Once before, to load kernels.
        for _ in 0..2 {
            let launches = || said(GPU.gpu().map(|gpu| gpu.launches()).map_err(Into::into));
            let p = said(Perceptron::new([6, 8, 32], dtype, GPU, true, Layout::Rows))?;
            let before = launches()?;
            let y = said(p.hidden().and_then(|hidden| p.output(&hidden)))?;
            let between = launches()?;
            said(p.backward(y))?;
            counts = [between - before, launches()? - between];
        }
        println!("cuda: an MLP in {dtype} is {counts:?} launches, forward and backward");
        if counts != wanted {
            return Err(format!("{dtype}: {counts:?} launches, wanted {wanted:?}"));
        }
    }
    Ok(())
}

/// A gradient goes past gelu only where nothing looks at it, and other consumers of gelu's result add theirs.
pub fn shows_the_gradients_that_are_asked_for() -> Result<()> {
    let new = |dtype, device| Perceptron::new([5, 16, 24], dtype, device, true, Layout::Rows);
    let run = |dtype, device| -> phalanx::autograd::Result<Vec<Vec<f64>>> {
        let mut all = Vec::new();
        // A gradient that is retained, one that a hook replaces, and one that the pass returns.
        let p = new(dtype, device)?;
        let hidden = p.hidden()?;
        hidden.retain_grad();
        p.backward(p.output(&hidden)?)?;
        all.extend(hidden.grad().map(|grad| numbers(&grad)).transpose()?);
        let p = new(dtype, device)?;
        let hidden = p.hidden()?;
        hidden.on_grad(|dy| Ok(Some(dy.mul_scalar(2.0)?)));
        p.backward(p.output(&hidden)?)?;
        all.extend(p.grads()?);
        let p = new(dtype, device)?;
        let (hidden, x) = (p.hidden()?, p.leaves[0].var());
        let y = p.output(&hidden)?;
        for made in
            grad(&[(y, Some(p.dy.clone()))], &[&hidden, &x], Options::default())?.into_iter().flatten()
        {
            all.push(numbers(&made)?);
        }
        // Two consumers, of which one is no product.
        let p = new(dtype, device)?;
        let hidden = p.hidden()?;
        let y = p.output(&hidden)?.add(&hidden.narrow(1, 0, 16)?)?;
        p.backward(y)?;
        all.extend(p.grads()?);
        Ok(all)
    };
    let wanted = said(run(DType::F64, Device::CPU))?;
    for (dtype, tolerance) in TOLERANCES {
        close(&dtype.to_string(), &said(run(dtype, GPU))?, &wanted, tolerance)?;
    }
    Ok(())
}

/// While the graph still exists, a backward pass has freed gelu's input, that of one consumer and of two.
pub fn frees_what_it_has_used() -> Result<()> {
    let run = |consumers: usize| -> phalanx::autograd::Result<usize> {
        let p = Perceptron::new([32, 16, 256], DType::BF16, GPU, true, Layout::Rows)?;
        let hidden = p.hidden()?;
        let y = p.output(&hidden)?;
        let y = if consumers == 2 { y.add(&p.output(&hidden)?)? } else { y };
        drop(hidden);
        p.backward(y.clone())?;
        let now = || Ok::<_, phalanx::autograd::Error>(GPU.ledger()?.total().now);
        let with_graph = now()?;
        drop(y);
        Ok(with_graph - now()?)
    };
    for consumers in [1, 2] {
        // The result, of 32 x 16; gelu's input is 16 times as large.
        let freed = said(run(consumers))?;
        if freed > 2 * 32 * 16 * 2 {
            return Err(format!("{consumers} consumers: {freed} bytes were freed with the graph"));
        }
    }
    Ok(())
}

/// Two passes through one graph, a pass that is computed again, and one whose weights' gradients come later have the same bits.
pub fn has_the_same_bits_however_it_is_run() -> Result<()> {
    let new = || Perceptron::new([5, 16, 24], DType::BF16, GPU, true, Layout::Rows);
    let run = |how: usize| -> phalanx::autograd::Result<Vec<Vec<f64>>> {
        let p = std::sync::Arc::new(new()?);
        let root = |y: Var| vec![(y, Some(p.dy.clone()))];
        match how {
            0 => p.backward(p.output(&p.hidden()?)?)?,
            1 => {
                let y = p.output(&p.hidden()?)?;
                backward(&root(y.clone()), Options { retain_graph: true, ..Options::default() })?;
                p.leaves.iter().try_for_each(|leaf| leaf.zero_grad())?;
                p.backward(y)?;
            }
            2 => {
                let again = p.clone();
                let y = checkpoint(move |_| again.output(&again.hidden()?), &[&p.leaves[0].var()])?;
                p.backward(y)?;
            }
            _ => {
                let y = p.output(&p.hidden()?)?;
                let work = backward_inputs(&root(y))?;
                work.run()?;
            }
        }
        p.grads()
    };
    let wanted = said(run(0))?;
    for how in 1..4 {
        same(&format!("way {how}"), &said(run(how))?, &wanted)?;
    }
    Ok(())
}
