//! Random numbers: the CPU's own, whole and in shards.

use phalanx_kernels as k;
use phalanx_kernels::random::{bias_dropout_add, dropout, normal, truncated_normal, uniform};
use phalanx_tensor::{DType, Device, Dims, PhiloxStream, Result, RngKey, Tensor, Window};

use crate::case::{Case, FLOATS, launches, make, spread, tolerance};

fn stream(site: u64) -> PhiloxStream {
    RngKey { seed: 0x1234_5678_9abc, step: 3 }.site(site)
}

/// A shard's shape and window: whole ones, cut ones whose groups of four are blocks of the generator or are not.
fn windows() -> Vec<(Vec<usize>, Window)> {
    let cut = |shape: &[usize], global: &[usize], offset: &[usize]| {
        let window = Window { global: Dims::from_slice(global), offset: Dims::from_slice(offset) };
        (shape.to_vec(), window)
    };
    let whole = |shape: &[usize]| (shape.to_vec(), Window::whole(shape));
    vec![
        whole(&[]),
        whole(&[0]),
        whole(&[7]),
        whole(&[32]),
        whole(&[1037]),
        whole(&[5, 40]),
        cut(&[3, 16], &[9, 64], &[2, 16]),
        cut(&[3, 5], &[9, 61], &[2, 17]),
        cut(&[2, 3, 4], &[4, 5, 8], &[1, 2, 4]),
        cut(&[40], &[1 << 40], &[(5 << 34) + 3]),
    ]
}

pub fn cases() -> Vec<Case> {
    type Draw = fn(&[usize], &Window, PhiloxStream, [f64; 2], DType, Device) -> Result<Tensor>;
    const DRAWS: [(&str, Draw); 3] =
        [("uniform", uniform), ("normal", normal), ("truncated_normal", truncated_normal)];
    let mut all = Vec::new();
    for dtype in FLOATS {
        for (name, draw) in DRAWS {
            for (shape, window) in windows() {
                let case = format!("random {name} {dtype} {shape:?} of {:?}", window.global);
                let run = move |d| Ok(vec![draw(&shape, &window, stream(7), [0.5, 2.0], dtype, d)?]);
                let exact = if name == "uniform" { 0.0 } else { tolerance(dtype).max(1e-14) };
                all.push(Case::new(case, dtype, run).within(exact));
            }
        }
        for (shape, window) in windows() {
            let case = format!("random dropout {dtype} {shape:?} of {:?}", window.global);
            let run = move |d| {
                let x = make(&shape, dtype, d, spread(1, 0.5, 2.0));
                [0.0, 0.3, 0.9, 1.0].into_iter().map(|p| dropout(&x, p, stream(9), &window)).collect()
            };
            all.push(Case::new(case, dtype, run).within(0.0));
        }
        let wider = (dtype.size() == 2).then_some(DType::F32);
        for residual in [dtype].into_iter().chain(wider) {
            let case = |(shape, window)| bias_dropout_add_case([dtype, residual], shape, window);
            all.extend(windows().into_iter().map(case));
        }
        all.push(Case::new(format!("random dropout {dtype} of views"), dtype, move |d| {
            let x = make(&[12, 17], dtype, d, spread(1, 0.5, 2.0));
            let window = |t: &Tensor| Window::whole(t.shape());
            let views = [x.transpose(0, 1)?, x.narrow(0, 1, 8)?, k::cast(&x, dtype)?.narrow(1, 3, 8)?];
            views.iter().map(|v| dropout(v, 0.5, stream(9), &window(v))).collect()
        }));
    }
    all
}

/// Of x and a residual of these dtypes, with and without a bias, of every probability; of views too, if there are two dimensions. One launch
/// adds a branch to a stream.
fn bias_dropout_add_case([dtype, stream_dtype]: [DType; 2], shape: Vec<usize>, window: Window) -> Case {
    let case = format!("random bias_dropout_add {dtype} {stream_dtype} {shape:?} of {:?}", window.global);
    let run = move |d| {
        let x = make(&shape, dtype, d, spread(1, 0.5, 2.0));
        let residual = make(&shape, stream_dtype, d, spread(2, 0.5, 2.0));
        let bias = make(&shape[shape.len().saturating_sub(1)..], dtype, d, spread(3, 0.5, 2.0));
        let run = |x: &Tensor, bias, p| bias_dropout_add(x, bias, &residual, p, stream(9), &window);
        let some = i64::from(x.numel() > 0);
        let mut outputs = vec![launches(d, some, || run(&x, None, 0.0).map(drop))?];
        for p in [0.0, 0.3, 0.9, 1.0] {
            outputs.extend([run(&x, None, p)?, run(&x, Some(&bias), p)?]);
        }
        if let [rows, columns] = shape[..] {
            let turned = make(&[columns, rows], dtype, d, spread(4, 0.5, 2.0)).transpose(0, 1)?;
            outputs.push(run(&turned, Some(&bias), 0.3)?);
        }
        Ok(outputs)
    };
    Case::new(case, dtype, run).within(0.0)
}
