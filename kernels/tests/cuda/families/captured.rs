//! Work that is captured once and launched again gives what running it again gives.

use phalanx_kernels::optim::{Adam, Item, Numbers, Slice, Step, adamw_};
use phalanx_kernels::{copy_, embedding_backward_accumulate_, linear, matmul_accumulate_};
use phalanx_tensor::cuda::Graph;
use phalanx_tensor::{DType, Device, Result, Tensor};

use crate::case::{Case, make, spread};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        all.push(Case::new(format!("captured products and indices {dtype}"), dtype, move |d| sums(dtype, d)));
        all.push(Case::new(format!("captured steps of adamw {dtype}"), dtype, move |d| steps(dtype, d)));
    }
    all
}

/// Runs `work` three times; on a GPU the last two are launches of a capture, before each of which `prepare` is called.
fn thrice(
    d: Device,
    mut prepare: impl FnMut(u64) -> Result<()>,
    mut work: impl FnMut(u64) -> Result<()>,
) -> Result<()> {
    prepare(1)?;
    work(1)?;
    let mut graph = d.is_cuda().then(|| Graph::capture(d, || work(50))).transpose()?;
    for t in 2..=3 {
        prepare(t)?;
        match &mut graph {
            Some(graph) => graph.launch(t)?,
            None => work(t)?,
        }
    }
    Ok(())
}

fn sums(dtype: DType, d: Device) -> Result<Vec<Tensor>> {
    let x = make(&[33, 16], dtype, d, spread(1, -1.0, 1.0));
    let (w, b) = (make(&[8, 16], dtype, d, spread(2, -1.0, 1.0)), make(&[8], dtype, d, spread(3, -1.0, 1.0)));
    let index = make(&[33], DType::I64, d, |i| (i * i % 5) as f64);
    let [mut dw, mut table] = [[8, 16], [5, 8]].map(|shape| make(&shape, dtype, d, |_| 0.0));
    thrice(
        d,
        |_| Ok(()),
        |_| {
            let y = linear(&x, &w, Some(&b))?;
            matmul_accumulate_(&mut dw, &y.transpose(0, 1)?, &x)?;
            assert!(embedding_backward_accumulate_(&mut table, &y, &index, None)?);
            Ok(())
        },
    )?;
    Ok(vec![dw, table])
}

fn steps(dtype: DType, d: Device) -> Result<Vec<Tensor>> {
    let mut param = make(&[70], dtype, d, spread(1, -1.0, 1.0));
    let grad = make(&[70], dtype, d, spread(2, -1.0, 1.0));
    let factor = make(&[], DType::F32, d, |_| 0.5);
    let mut state = vec![Tensor::zeros(&[70], DType::F32, d)?, Tensor::zeros(&[70], DType::F32, d)?];
    let rule =
        |step| Adam { lr: 0.1 / step as f64, beta1: 0.9, beta2: 0.99, eps: 1e-3, weight_decay: 0.1, step };
    let mut asked = Vec::new();
    adamw_(Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut asked) }, rule(1))?;
    let numbers = Tensor::zeros(&[asked.len()], DType::F64, d)?;
    let prepare = |t| {
        let mut asked = Vec::new();
        adamw_(Step { items: Vec::new(), factor: None, numbers: Numbers::Ask(&mut asked) }, rule(t))?;
        let told = Tensor::from_slice(&asked, &[asked.len()], Device::CPU)?;
        copy_(&mut numbers.clone(), &told.to_device(d, false)?)
    };
    thrice(d, prepare, |t| {
        let slice = Slice { param: &mut param, master: None, grad: &grad, scale: 1.0 };
        let numbers = if d.is_cuda() { Numbers::OnDevice(&numbers) } else { Numbers::Given };
        let items = vec![Item { slice, state: &mut state }];
        adamw_(Step { items, factor: Some(&factor), numbers }, rule(t))
    })?;
    Ok([param].into_iter().chain(state).collect())
}
