//! Tests: held against the formula in f64.

use phalanx_tensor::{DType, Device, Dims, RngKey, Tensor, Window};

use super::{
    Attention, AttentionDropout, attention_keep, scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
};
use crate::ops::in_place::copy_;
use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

/// One head in f64, straight from the formula: output and the gradients of q, k, v and scores.
struct Twin {
    y: Vec<f64>,
    grads: [Vec<f64>; 4],
}

fn twin(
    [q, k, v, dy]: [&[f64]; 4],
    [t, s, d, e]: [usize; 4],
    [bias, keep]: [&dyn Fn(usize, usize) -> f64; 2],
    scale: f64,
) -> Twin {
    let mut out = Twin { y: vec![0.0; t * e], grads: [t * d, s * d, s * e, t * s].map(|n| vec![0.0; n]) };
    for i in 0..t {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (q, dy) = (&q[i * d..][..d], &dy[i * e..][..e]);
        let scores: Vec<f64> = (0..s).map(|j| dot(q, &k[j * d..][..d]) * scale + bias(i, j)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exps: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
        let p: Vec<f64> = exps.iter().map(|x| x / exps.iter().sum::<f64>()).collect();
        let dp: Vec<f64> = (0..s).map(|j| dot(dy, &v[j * e..][..e]) * keep(i, j)).collect();
        let mean = dot(&p, &dp);
        for j in 0..s {
            let slope = p[j] * (dp[j] - mean);
            out.grads[3][i * s + j] = slope;
            (0..e).for_each(|c| out.y[i * e + c] += p[j] * keep(i, j) * v[j * e + c]);
            (0..e).for_each(|c| out.grads[2][j * e + c] += p[j] * keep(i, j) * dy[c]);
            (0..d).for_each(|c| out.grads[0][i * d + c] += slope * scale * k[j * d + c]);
            (0..d).for_each(|c| out.grads[1][j * d + c] += slope * scale * q[c]);
        }
    }
    out
}

#[derive(Clone, Copy, PartialEq)]
enum Masked {
    No,
    Bool,
    Float,
}

fn check(dtype: DType, heads: [usize; 2], sizes: [usize; 4], is_causal: bool, masked: Masked) {
    check_dropped(dtype, heads, sizes, is_causal, masked, None);
}

fn check_dropped(
    dtype: DType,
    heads: [usize; 2],
    [t, s, d, e]: [usize; 4],
    is_causal: bool,
    masked: Masked,
    dropout: Option<AttentionDropout>,
) {
    // Queries, keys and values lie as [B, T, H, D].
    let tensor = |h: usize, t: usize, d: usize, low: f64| {
        make(&[2, t, h, d], dtype, &floats(low, 1.3)).transpose(1, 2).unwrap()
    };
    let [hq, hk] = heads;
    let (q, k, v) = (tensor(hq, t, d, -1.0), tensor(hk, s, d, -1.7), tensor(hk, s, e, -0.9));
    let mask = match masked {
        Masked::No => None,
        Masked::Bool => {
            let seen: Vec<bool> = (0..t * s).map(|i| i % s == 0 || i % 3 != 1).collect();
            Some(Tensor::from_slice(&seen, &[t, s], Device::CPU).unwrap())
        }
        Masked::Float => Some(make(&[hq, t, s], dtype, &floats(-2.0, 2.0))),
    };
    let bias = |head: usize, i: usize, j: usize| match &mask {
        _ if is_causal && j > i => f64::NEG_INFINITY,
        Some(m) if masked == Masked::Bool && !m.to_vec::<bool>().unwrap()[i * s + j] => f64::NEG_INFINITY,
        Some(m) if masked == Masked::Float => values(m)[(head * t + i) * s + j],
        _ => 0.0,
    };
    let config = Attention { is_causal, scale: Some(0.3), enable_gqa: hq != hk, dropout };
    let kept = dropout.map(|d| values(&attention_keep(&q.contiguous().unwrap(), s, d).unwrap()));
    let (y, stats) = scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), &config).unwrap();
    let dy = tensor(hq, t, e, -1.1);
    let grads = scaled_dot_product_attention_backward(
        [&q, &k, &v],
        mask.as_ref(),
        [&y, &stats],
        &dy,
        &config,
        [true; 4],
    );
    let grads = grads.unwrap().map(|g| values(&g.unwrap()));
    let (q, k, v, y, dy) = (values(&q), values(&k), values(&v), values(&y), values(&dy));
    let near = |got: &[f64], want: &[f64]| {
        assert_eq!(got.len(), want.len());
        got.iter().zip(want).for_each(|(&g, &w)| assert_close(g, w, 8.0 * tolerance(dtype)));
    };
    for b in 0..2 {
        let (mut dk, mut dv) = (vec![0.0; hk * s * d], vec![0.0; hk * s * e]);
        for h in 0..hq {
            let (item, shared) = (b * hq + h, b * hk + h / (hq / hk));
            let parts = [
                &q[item * t * d..][..t * d],
                &k[shared * s * d..][..s * d],
                &v[shared * s * e..][..s * e],
                &dy[item * t * e..][..t * e],
            ];
            let keep = |i: usize, j: usize| kept.as_ref().map_or(1.0, |k| k[(item * t + i) * s + j]);
            let want = twin(parts, [t, s, d, e], [&|i, j| bias(h, i, j), &keep], 0.3);
            near(&y[item * t * e..][..t * e], &want.y);
            near(&grads[0][item * t * d..][..t * d], &want.grads[0]);
            near(&grads[3][item * t * s..][..t * s], &want.grads[3]);
            let at = h / (hq / hk);
            dk[at * s * d..].iter_mut().zip(&want.grads[1]).for_each(|(to, x)| *to += x);
            dv[at * s * e..].iter_mut().zip(&want.grads[2]).for_each(|(to, x)| *to += x);
        }
        near(&grads[1][b * hk * s * d..][..hk * s * d], &dk);
        near(&grads[2][b * hk * s * e..][..hk * s * e], &dv);
    }
}

#[test]
fn forward_and_backward_equal_the_formula() {
    for dtype in FLOATS {
        check(dtype, [2, 2], [5, 7, 3, 4], false, Masked::No);
        check(dtype, [4, 2], [9, 9, 8, 8], true, Masked::No);
        check(dtype, [2, 2], [7, 12, 16, 5], false, Masked::Bool);
        check(dtype, [4, 1], [6, 5, 17, 16], false, Masked::Float);
        // One query, of heads that share a key head and of such that do not.
        for (heads, masked) in
            [([4, 2], Masked::No), ([6, 1], Masked::Bool), ([4, 2], Masked::Float), ([2, 2], Masked::Bool)]
        {
            check(dtype, heads, [1, 150, 17, 5], false, masked);
        }
    }
}

#[test]
fn several_blocks_of_queries_and_keys_equal_the_formula() {
    check(DType::F32, [2, 1], [130, 201, 40, 33], false, Masked::No);
    check(DType::F64, [1, 1], [201, 201, 24, 64], true, Masked::No);
    check(DType::F32, [1, 1], [70, 130, 64, 64], true, Masked::Float);
}

#[test]
fn a_query_has_the_same_bits_among_few_and_many() {
    for dtype in FLOATS {
        for (s, d) in [(1, 5), (33, 16), (129, 40), (300, 7)] {
            let [q, k, v, mask] =
                [[70, d], [s, d], [s, 9], [70, s]].map(|shape| make(&shape, dtype, &floats(-1.0, 1.3)));
            let attend = |count: usize, mask: Option<&Tensor>| {
                let q = q.narrow(0, 0, count).unwrap();
                let mask = mask.map(|mask| mask.narrow(0, 0, count).unwrap());
                let made = scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), &Attention::default());
                let (y, stats) = made.unwrap();
                [values(&y), values(&stats)]
            };
            let run = |count: usize, mask: &Tensor| attend(count, Some(mask));
            let first = |[y, stats]: &[Vec<f64>; 2], n: usize| [y[..n * 9].to_vec(), stats[..n * 2].to_vec()];
            // A mask of rows, of columns, and one of a single row for all.
            let columns = mask.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap();
            let all = run(70, &mask);
            assert_eq!(run(70, &columns), all);
            let bare = attend(70, None);
            // Scores of few queries lie as rows, of at most half a vector of them, and those of more as columns.
            for count in 1..=10 {
                assert_eq!(run(count, &columns), first(&all, count), "{dtype} {count}");
                assert_eq!(attend(count, None), first(&bare, count), "{dtype} {count}");
            }
            let one = mask.narrow(0, 0, 1).unwrap().broadcast_to(&[70, s]).unwrap();
            assert_eq!(run(70, &one), run(70, &one.contiguous().unwrap()));
        }
    }
}

#[test]
fn nothing_to_see_gives_zero_and_empty_sizes_work() {
    let zeros = |shape: &[usize]| make(shape, DType::F32, &|_| 1.0);
    let (y, _) = scaled_dot_product_attention(
        &zeros(&[3, 4]),
        &zeros(&[0, 4]),
        &zeros(&[0, 2]),
        None,
        &Attention::default(),
    )
    .unwrap();
    assert_eq!(values(&y), vec![0.0; 6]);
    // As many queries as vectors hold are read where they lie.
    for [t, d, e] in [[0, 4, 2], [3, 0, 2], [3, 4, 0], [16, 0, 2], [16, 4, 0]] {
        let (q, k, v) = (zeros(&[2, t, d]), zeros(&[2, 3, d]), zeros(&[2, 3, e]));
        let config = Attention { scale: Some(1.0), ..Attention::default() };
        let (y, stats) = scaled_dot_product_attention(&q, &k, &v, None, &config).unwrap();
        assert_eq!(y.shape(), [2, t, e]);
        scaled_dot_product_attention_backward([&q, &k, &v], None, [&y, &stats], &y, &config, [true; 4])
            .unwrap();
    }
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let t = |shape: &[usize]| make(shape, DType::F32, &|_| 0.0);
    let run = |q: &[usize], k: &[usize]| {
        let made = scaled_dot_product_attention(&t(q), &t(k), &t(k), None, &Attention::default());
        made.map(|_| ()).unwrap_err().to_string()
    };
    assert!(run(&[2, 3, 4], &[2, 3, 5]).contains("[2, 3, 5]"));
    assert!(run(&[4, 3, 4], &[2, 3, 4]).contains("enable_gqa"));
}

#[test]
fn dropped_probabilities_are_the_same_forward_and_backward_and_for_parts_of_the_whole() {
    let stream = RngKey { seed: 5, step: 1 }.site(3);
    let dropout = AttentionDropout { p: 0.25, stream, batch_offset: 3, heads: None };
    check_dropped(DType::F64, [2, 2], [70, 130, 8, 8], true, Masked::No, Some(dropout));
    check_dropped(DType::F32, [4, 2], [9, 101, 8, 5], false, Masked::Float, Some(dropout));
    let q = make(&[2, 4, 3, 2], DType::F32, &|_| 0.0);
    let whole = attention_keep(&q, 50, dropout).unwrap();
    let part = AttentionDropout { batch_offset: 4, heads: Some([4, 1]), ..dropout };
    let kept = attention_keep(&q.narrow(0, 1, 1).unwrap().narrow(1, 1, 2).unwrap(), 50, part).unwrap();
    assert_eq!(values(&kept), values(&whole.narrow(0, 1, 1).unwrap().narrow(1, 1, 2).unwrap()));
    let ones = make(&[5, 4, 3, 50], DType::F32, &|_| 1.0);
    let dropped = crate::random::dropout(&ones, 0.25, stream, &Window::whole(ones.shape())).unwrap();
    assert_eq!(values(&whole), values(&dropped.narrow(0, 3, 2).unwrap()));
    let left = values(&whole).iter().filter(|&&x| x == 0.0).count();
    assert!((200..400).contains(&left), "{left} of {} left out", whole.numel());
}

/// The same elements as [.., H, T, D] behind some other memory.
fn laid_out(x: &Tensor, how: usize) -> Tensor {
    let transposed = |x: &Tensor, a: isize, b: isize| x.transpose(a, b).unwrap();
    let apart = |x: &Tensor, dim: isize| {
        let gap = x.empty_like().unwrap();
        let wider = crate::ops::cat(&[x, &gap], dim).unwrap();
        wider.narrow(dim, 0, x.size(dim).unwrap()).unwrap()
    };
    match how {
        0 => x.contiguous().unwrap(),
        1 => transposed(&transposed(x, -3, -2).contiguous().unwrap(), -3, -2),
        2 => transposed(&apart(&transposed(x, -3, -2), -2), -3, -2),
        3 => transposed(&transposed(x, -2, -1).contiguous().unwrap(), -2, -1),
        4 => apart(x, -1),
        _ => {
            // Rows of 1,024 elements.
            let mut shape = Dims::from_slice(x.shape());
            let last = shape.len() - 1;
            let depth = std::mem::replace(&mut shape[last], 1024);
            let wide = Tensor::zeros(&shape, x.dtype(), x.device()).unwrap();
            let mut rows = wide.narrow(-1, 0, depth).unwrap();
            copy_(&mut rows, x).unwrap();
            rows
        }
    }
}

/// Output and gradients of a causal call.
fn all(inputs: [&Tensor; 3], dy: &Tensor) -> [Tensor; 5] {
    let config = Attention { is_causal: true, enable_gqa: true, ..Attention::default() };
    let (y, stats) = scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], None, &config).unwrap();
    let grads = scaled_dot_product_attention_backward(inputs, None, [&y, &stats], dy, &config, [true; 4]);
    let [dq, dk, dv, ds] = grads.unwrap().map(Option::unwrap);
    [y, dq, dk, dv, ds]
}

#[test]
fn bits_do_not_depend_on_layouts_or_threads() {
    let devices = [1, 3].map(|threads| {
        let device = Device::Cpu(920 + threads as u16);
        device.set_threads(threads).unwrap();
        device
    });
    for dtype in FLOATS {
        // Whole vectors and not, whole blocks of queries and not, heads that share keys.
        for [b, h, k, t, d] in [[2, 3, 3, 80, 32], [1, 2, 1, 70, 16], [2, 2, 2, 33, 7], [1, 1, 1, 129, 16]] {
            let sizes = [(h, -1.0, 1.3), (k, -0.7, 0.9), (k, -1.1, 0.6), (h, -0.5, 0.8)];
            let tensors = sizes.map(|(h, low, high)| make(&[b, h, t, d], dtype, &floats(low, high)));
            let mut seen: Option<[Vec<f64>; 5]> = None;
            for device in devices {
                for how in 0..6 {
                    let [q, k, v, dy] = [0, 1, 2, 3].map(|i| {
                        let there = tensors[i].to_device(device, true).unwrap();
                        laid_out(&there, if i == 3 { (how + 2) % 6 } else { how })
                    });
                    let got = all([&q, &k, &v], &dy);
                    // Where the operands' heads lie side by side, so do the results'.
                    for (x, like) in got[..4].iter().zip([&q, &q, &k, &v]) {
                        let apart = x.transpose(1, 2).unwrap();
                        let transposed = matches!(how, 1 | 2) && like.shape()[1] > 1;
                        assert!(if transposed { apart.is_contiguous() } else { x.is_contiguous() });
                    }
                    let got = got.map(|x| values(&x.to_device(Device::CPU, true).unwrap()));
                    assert!(got.iter().flatten().all(|x| x.is_finite()));
                    assert_eq!(seen.get_or_insert_with(|| got.clone()), &got, "{dtype} {how}");
                }
            }
        }
    }
}

#[test]
fn gradients_of_the_heads_of_one_tensor_are_the_parts_of_one_tensor() {
    for [h, k, t, d] in [[2, 2, 70, 16], [4, 2, 5, 3], [2, 1, 3, 4]] {
        let map = make(&[2, t, (h + 2 * k) * d], DType::F32, &floats(-1.0, 1.0));
        let heads = map.with_shape(&[2, t, h + 2 * k, d]).unwrap();
        let part = |start, heads_here| {
            let x = heads.narrow(2, start, heads_here).unwrap();
            x.transpose(1, 2).unwrap()
        };
        let [q, keys, v] = [part(0, h), part(h, k), part(h + k, k)];
        let dy = make(&[2, t, h, d], DType::F32, &floats(-0.5, 0.7)).transpose(1, 2).unwrap();
        let got = all([&q, &keys, &v], &dy);
        let want = all([&q, &keys, &v].map(|x| x.contiguous().unwrap()).each_ref(), &dy);
        assert!(got.iter().zip(&want).all(|(got, want)| values(got) == values(want)));
        let parts = [&got[1], &got[2], &got[3]]
            .map(|x| x.transpose(1, 2).unwrap().with_shape(&[2, t, x.shape()[1] * d]).unwrap());
        let whole = Tensor::joined(&parts.each_ref(), 2).unwrap().unwrap();
        assert_eq!(values(&whole), values(&crate::ops::cat(&parts.each_ref(), 2).unwrap()));
        // Of a part alone, and of what lies in another order, each gradient has its own.
        let alone = all([&q, &keys, &keys], &dy);
        assert!(!alone[1].shares_storage(&alone[2]) && !alone[2].shares_storage(&alone[3]));
    }
}
