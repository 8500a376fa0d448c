//! Attention: every dtype, tensor cores and not, masks, shared key heads, dropout, strides; forward and backward.

use phalanx_kernels::{
    Attention, AttentionDropout, attention_keep, scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
};
use phalanx_tensor::{DType, Device, Result, RngKey, Tensor};

use crate::case::{Case, FLOATS, launches, make, spread, tolerance};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Masked {
    No,
    /// [T, S], of which query 3 sees nothing.
    Bool,
    /// [H, T, S].
    Float,
    /// [B, 1, T, 1]: documents of lengths up to this, others in the second batch item.
    Documents(usize),
    /// [H, T, 1]: a window of so many keys, one more with each head.
    Window(usize),
    /// First visible keys of which one is wrong.
    Wrong([i64; 4]),
}

/// How queries, keys and values lie.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// [B, H, T, D] in order.
    Whole,
    /// [B, T, H, D], as a projection leaves them.
    Turned,
    /// Parts of rows that are longer, at odd addresses.
    Cut,
    /// [B, H, D, T], so that columns do not lie together.
    Across,
    /// All heads are one.
    Shared,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    dtype: DType,
    heads: [usize; 2],
    /// T, S, D, E.
    sizes: [usize; 4],
    is_causal: bool,
    masked: Masked,
    dropout: f64,
    lie: Lie,
    needs: [bool; 4],
}

fn first_keys(keys: &[i64], shape: &[usize], device: Device) -> Result<Option<Tensor>> {
    Tensor::from_slice(keys, shape, Device::CPU)?.to_device(device, false).map(Some)
}

const ALL: [bool; 4] = [true; 4];
const INPUTS: [bool; 4] = [true, true, true, false];

impl Call {
    fn new(dtype: DType, heads: [usize; 2], sizes: [usize; 4]) -> Call {
        let (masked, lie) = (Masked::No, Lie::Turned);
        Call { dtype, heads, sizes, is_causal: false, masked, dropout: 0.0, lie, needs: INPUTS }
    }

    fn causal(self) -> Call {
        Call { is_causal: true, ..self }
    }

    fn operand(&self, device: Device, [heads, rows, columns]: [usize; 3], seed: usize) -> Result<Tensor> {
        let of = |shape: &[usize]| make(shape, self.dtype, device, spread(seed, -1.0, 1.3));
        match self.lie {
            Lie::Whole => Ok(of(&[2, heads, rows, columns])),
            Lie::Turned => of(&[2, rows, heads, columns]).transpose(1, 2),
            Lie::Cut => of(&[2, heads, rows, columns + 3]).narrow(3, 1, columns),
            Lie::Across => of(&[2, heads, columns, rows]).transpose(2, 3),
            Lie::Shared => of(&[2, 1, rows, columns]).broadcast_to(&[2, heads, rows, columns]),
        }
    }

    fn mask(&self, device: Device) -> Result<Option<Tensor>> {
        let [t, s, ..] = self.sizes;
        let hidden = move |i: usize| i / s % t == 3 || i % 11 == 5;
        match self.masked {
            Masked::No => Ok(None),
            Masked::Bool => {
                let seen: Vec<bool> = (0..t * s).map(|i| !hidden(i)).collect();
                Tensor::from_slice(&seen, &[t, s], Device::CPU)?.to_device(device, false).map(Some)
            }
            Masked::Float => {
                let add = spread(9, -2.0, 2.0);
                let value = |i: usize| if hidden(i) { f64::NEG_INFINITY } else { add(i) };
                Ok(Some(make(&[self.heads[0], t, s], self.dtype, device, value)))
            }
            Masked::Documents(most) => {
                // Lengths from 1 to `most`, in no order.
                let row = |seed: usize| {
                    let lengths = (0..).map(move |i| 1 + (i * 7 + seed * 5) % most);
                    let each = lengths.scan(0, |at, n| Some((std::mem::replace(at, *at + n), n)));
                    each.flat_map(|(at, n)| std::iter::repeat_n(at as i64, n)).take(t)
                };
                first_keys(&row(0).chain(row(1)).collect::<Vec<_>>(), &[2, 1, t, 1], device)
            }
            Masked::Window(keys) => {
                let row =
                    |head: usize| (0..t).map(move |query| (query + 1).saturating_sub(keys + head) as i64);
                let heads = self.heads[0];
                first_keys(&(0..heads).flat_map(row).collect::<Vec<_>>(), &[heads, t, 1], device)
            }
            Masked::Wrong(row) => first_keys(&row, &[4, 1], device),
        }
    }

    fn run(&self, device: Device) -> Result<Vec<Tensor>> {
        let ([hq, hk], [t, s, d, e]) = (self.heads, self.sizes);
        let query = self.operand(device, [hq, t, d], 1)?;
        let (key, value) = (self.operand(device, [hk, s, d], 2)?, self.operand(device, [hk, s, e], 3)?);
        let dy = self.operand(device, [hq, t, e], 4)?;
        let mask = self.mask(device)?;
        let stream = RngKey { seed: 5 << 32 | 7, step: 1 }.site(3);
        let dropout = AttentionDropout { p: self.dropout, stream, batch_offset: 3, heads: Some([9, 2]) };
        let dropout = (self.dropout > 0.0).then_some(dropout);
        let config = Attention { is_causal: self.is_causal, scale: Some(0.3), enable_gqa: hq != hk, dropout };
        let inputs = [&query, &key, &value];
        let (y, stats) =
            scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask.as_ref(), &config)?;
        let grads = scaled_dot_product_attention_backward(
            inputs,
            mask.as_ref(),
            [&y, &stats],
            &dy,
            &config,
            self.needs,
        )?;
        Ok([y, stats].into_iter().chain(grads.into_iter().flatten()).collect())
    }

    fn case(self) -> Case {
        let name = format!(
            "attention {} {:?} of {:?} {}{:?} {} {:?} {:?}",
            self.dtype,
            self.sizes,
            self.heads,
            if self.is_causal { "causal " } else { "" },
            self.masked,
            self.dropout,
            self.lie,
            self.needs
        );
        Case::new(name, self.dtype, move |device| self.run(device)).within(2.5 * tolerance(self.dtype))
    }
}

/// What documents in a row differ by from each alone, where all begin at multiples of 128: nothing.
fn apart(dtype: DType, device: Device, lengths: &[usize]) -> Result<Vec<Tensor>> {
    let length: usize = lengths.iter().sum();
    let operand = |seed| make(&[1, 1, length, 64], dtype, device, spread(seed, -1.0, 1.3));
    let all = [operand(1), operand(2), operand(3), operand(4)];
    let run = |[query, key, value, dy]: [&Tensor; 4], mask: Option<&Tensor>| -> Result<Vec<Tensor>> {
        let config = Attention { is_causal: true, ..Attention::default() };
        let (y, stats) = scaled_dot_product_attention(query, key, value, mask, &config)?;
        let inputs = [query, key, value];
        let grads = scaled_dot_product_attention_backward(inputs, mask, [&y, &stats], dy, &config, INPUTS)?;
        Ok([y, stats].into_iter().chain(grads.into_iter().flatten()).collect())
    };
    let mut starts = Vec::new();
    lengths.iter().for_each(|&n| starts.extend(vec![starts.len() as i64; n]));
    let together = run(all.each_ref(), first_keys(&starts, &[length, 1], device)?.as_ref())?;
    let (mut at, mut differences) = (0, Vec::new());
    for &n in lengths {
        let part = |x: &Tensor| x.narrow(2, at, n)?.contiguous();
        let [query, key, value, dy] = all.each_ref().map(part);
        let alone = run([&query?, &key?, &value?, &dy?], None)?;
        for (together, alone) in together.iter().zip(&alone) {
            differences.push(phalanx_kernels::sub(&part(together)?, alone)?);
        }
        at += n;
    }
    Ok(differences)
}

/// Attention of the parts of a joint projection `[B, T, 3 H D]`, and its gradients joined again. Nothing is copied: one kernel forward, three
/// backward.
fn joint(dtype: DType, device: Device, [heads, length, depth]: [usize; 3]) -> Result<Vec<Tensor>> {
    let width = heads * depth;
    let of = |columns, seed| make(&[2, length, columns], dtype, device, spread(seed, -1.0, 1.3));
    let (whole, dy) = (of(3 * width, 1), of(width, 2));
    let by_heads =
        |x: Tensor| x.reshape(&[2, length as isize, heads as isize, depth as isize])?.transpose(1, 2);
    let part = |i: usize| by_heads(whole.narrow(2, i * width, width)?);
    let inputs = [part(0)?, part(1)?, part(2)?];
    let (inputs, dy) = (inputs.each_ref(), by_heads(dy)?);
    let config = Attention { is_causal: true, ..Attention::default() };
    let mut made = Vec::new();
    let forward = launches(device, 1, || {
        let (y, stats) = scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], None, &config)?;
        made.extend([y.transpose(1, 2)?, y, stats]);
        assert!(made[0].is_contiguous());
        Ok(())
    })?;
    let backward = launches(device, 3, || {
        let of = [&made[1], &made[2]];
        let grads = scaled_dot_product_attention_backward(inputs, None, of, &dy, &config, INPUTS)?;
        let grads = grads.into_iter().flatten().map(|g| g.transpose(1, 2)).collect::<Result<Vec<_>>>()?;
        let joined = Tensor::joined(&grads.iter().collect::<Vec<_>>(), 2)?;
        made.push(joined.unwrap_or_else(|| panic!("the gradients do not lie side by side")));
        Ok(())
    })?;
    Ok([made, vec![forward, backward]].concat())
}

/// Masks of first visible keys.
fn documents() -> Vec<Call> {
    let call = |dtype, heads, length, depth| Call::new(dtype, heads, [length, length, depth, depth]).causal();
    let mut calls = Vec::new();
    for dtype in FLOATS {
        for length in [1, 7, 33, 129usize] {
            let masked = Masked::Documents(length.div_ceil(2));
            calls.push(Call { masked, ..call(dtype, [2, 1], length, 64) });
        }
        calls.push(Call { masked: Masked::Window(5), needs: ALL, ..call(dtype, [2, 1], 70, 40) });
    }
    for depth in [32, 64, 80, 96, 112, 128] {
        let call = call(DType::BF16, [2, 1], 150, depth);
        calls.push(Call { masked: Masked::Documents(100), ..call });
        calls.push(Call { masked: Masked::Documents(9), dropout: 0.5, needs: ALL, lie: Lie::Cut, ..call });
    }
    calls.push(Call { masked: Masked::Documents(200), ..call(DType::BF16, [1, 1], 400, 64) });
    calls.push(Call { masked: Masked::Window(130), ..call(DType::BF16, [2, 1], 400, 64) });
    for sizes in [[33, 7, 64, 64], [7, 33, 64, 64]] {
        let call = Call::new(DType::F32, [2, 1], sizes).causal();
        calls.extend([
            Call { masked: Masked::Documents(4), ..call },
            Call { masked: Masked::Window(3), ..call },
        ]);
    }
    for row in [[0, 0, 2, 1], [0, 2, 2, 2], [-1, 0, 0, 0]] {
        calls.push(Call { masked: Masked::Wrong(row), ..call(DType::F32, [1, 1], 4, 64) });
    }
    calls
}

pub fn cases() -> Vec<Case> {
    let mut calls = Vec::new();
    for dtype in FLOATS {
        let call = |heads, sizes| Call::new(dtype, heads, sizes);
        for [t, s] in [[1, 1], [7, 33], [33, 7], [65, 129]] {
            calls.extend([call([3, 1], [t, s, 64, 64]), call([3, 3], [t, s, 64, 64]).causal()]);
        }
        let short = call([2, 2], [20, 35, 40, 40]);
        calls.push(Call { masked: Masked::Float, dropout: 0.25, needs: ALL, ..short }.causal());
        calls.push(call([1, 1], [17, 20, 160, 136]).causal());
    }
    // Both families of kernels, in the dtype that they are used in most.
    for dtype in [DType::F32, DType::BF16] {
        let call = |heads, sizes| Call::new(dtype, heads, sizes);
        let short = call([2, 2], [20, 35, 40, 40]);
        calls.extend([Masked::Bool, Masked::Float].map(|masked| Call { masked, ..short }));
        calls.extend([0.25, 1.0].map(|dropout| Call { dropout, ..short }));
        calls.extend([Lie::Whole, Lie::Cut, Lie::Across].map(|lie| Call { lie, ..short }));
        let needs = [[true, false, false, false], [false, true, false, false], [false, false, true, true]];
        calls.extend(needs.map(|needs| Call { needs, ..short }));
        calls.extend([call([1, 1], [5, 0, 8, 8]), call([1, 1], [0, 5, 8, 8]), call([2, 1], [9, 6, 13, 5])]);
    }
    for depth in [32, 80, 96, 112, 128] {
        let call = Call::new(DType::BF16, [2, 1], [70, 65, depth, depth]);
        calls.extend([call.causal(), Call { masked: Masked::Bool, dropout: 0.5, needs: ALL, ..call }]);
    }
    calls.push(Call::new(DType::BF16, [1, 1], [300, 300, 64, 64]).causal());
    // By warpgroups: operands that are gathered or not, values of another depth, rings of tiles that come round.
    let call = Call::new(DType::BF16, [2, 1], [70, 140, 64, 56]);
    let needs = [[true, false, false, false], [false, true, false, false], [false, false, true, false]];
    calls.extend([Lie::Whole, Lie::Cut, Lie::Across, Lie::Shared].map(|lie| Call { lie, ..call }));
    calls.extend(needs.map(|needs| Call { needs, ..call }));
    calls.extend([[60, 700, 64, 64], [140, 400, 128, 72]].map(|sizes| Call::new(DType::BF16, [1, 1], sizes)));
    calls.extend(documents());
    let mut cases: Vec<Case> = calls.into_iter().map(Call::case).collect();
    for dtype in FLOATS {
        let run = move |device| apart(dtype, device, &[128, 256, 70]);
        cases.push(Case::new(format!("attention of documents apart {dtype}"), dtype, run).within(0.0));
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for [heads, length, depth] in [[2, 1, 64], [2, 7, 64], [3, 33, 20], [2, 129, 64], [2, 9, 5]] {
            let name = format!("attention joint {dtype} [{length}, {heads} {depth}]");
            let run = move |device| joint(dtype, device, [heads, length, depth]);
            cases.push(Case::new(name, dtype, run).within(2.5 * tolerance(dtype)));
        }
    }
    for dtype in FLOATS {
        let stream = RngKey { seed: 5, step: 1 }.site(3);
        let dropout = AttentionDropout { p: 0.25, stream, batch_offset: 3, heads: None };
        let keep = move |device| {
            Ok(vec![attention_keep(&make(&[2, 3, 4, 2], dtype, device, |_| 0.0), 50, dropout)?])
        };
        cases.push(Case::new(format!("attention keep {dtype}"), dtype, keep).within(0.0));
    }
    cases
}
