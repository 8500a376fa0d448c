//! What every rank must get, computed from the definition of each collective, element by element.

use phalanx_parallel::comm::{CollectiveKind, Reduction};
use phalanx_tensor::{DType, Device, Tensor, bf16, f16};

/// A counter-based draw (splitmix64).
pub fn draw(seed: u64, n: u64) -> u64 {
    let mut x = seed.wrapping_add((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// One element of any dtype: floats as they are, integers and bools as their value.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    F64(f64),
    F32(f32),
    BF16(bf16),
    F16(f16),
    I64(i64),
    I32(i32),
    U8(u8),
}

impl Value {
    /// Bits, so that NaN and the sign of zero count.
    pub fn bits(self) -> u64 {
        match self {
            Value::F64(x) => x.to_bits(),
            Value::F32(x) => x.to_bits().into(),
            Value::BF16(x) => x.to_bits().into(),
            Value::F16(x) => x.to_bits().into(),
            Value::I64(x) => x as u64,
            Value::I32(x) => x as u32 as u64,
            Value::U8(x) => x.into(),
        }
    }
}

/// Floats between -8 and 8 with full mantissas, so that the order of additions shows; integers of any size.
pub fn values(dtype: DType, seed: u64, count: usize) -> Vec<Value> {
    let element = |i: usize| {
        let bits = draw(seed, i as u64);
        let float = (bits >> 11) as f64 / (1u64 << 53) as f64 * 16.0 - 8.0;
        match dtype {
            DType::F64 => Value::F64(float),
            DType::F32 => Value::F32(float as f32),
            DType::BF16 => Value::BF16(bf16::from_f64(float)),
            DType::F16 => Value::F16(f16::from_f64(float)),
            DType::I64 => Value::I64(bits as i64),
            DType::I32 => Value::I32(bits as i32),
            DType::U8 => Value::U8(bits as u8),
            DType::Bool => Value::U8((bits & 1) as u8),
        }
    };
    (0..count).map(element).collect()
}

macro_rules! each_dtype {
    ($tensor_dtype:expr, $type:ident, $variant:ident => $body:expr, bool => $bool:expr) => {
        match $tensor_dtype {
            DType::F64 => {
                type $type = f64;
                use Value::F64 as $variant;
                $body
            }
            DType::F32 => {
                type $type = f32;
                use Value::F32 as $variant;
                $body
            }
            DType::BF16 => {
                type $type = bf16;
                use Value::BF16 as $variant;
                $body
            }
            DType::F16 => {
                type $type = f16;
                use Value::F16 as $variant;
                $body
            }
            DType::I64 => {
                type $type = i64;
                use Value::I64 as $variant;
                $body
            }
            DType::I32 => {
                type $type = i32;
                use Value::I32 as $variant;
                $body
            }
            DType::U8 => {
                type $type = u8;
                use Value::U8 as $variant;
                $body
            }
            DType::Bool => $bool,
        }
    };
}

/// A flat tensor of these.
pub fn tensor(dtype: DType, values: &[Value], device: Device) -> Tensor {
    let shape = [values.len()];
    let made = each_dtype!(dtype, T, V => {
        let plain = values.iter().map(|v| match v { V(x) => *x, _ => panic!("a value of another dtype") });
        Tensor::from_slice::<T>(&plain.collect::<Vec<T>>(), &shape, device)
    }, bool => {
        let plain = values.iter().map(|v| v.bits() != 0);
        Tensor::from_slice::<bool>(&plain.collect::<Vec<bool>>(), &shape, device)
    });
    made.unwrap()
}

/// What a tensor holds, as bits.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    each_dtype!(tensor.dtype(), T, V => {
        tensor.to_vec::<T>().unwrap().into_iter().map(|x| V(x).bits()).collect()
    }, bool => tensor.to_vec::<bool>().unwrap().into_iter().map(u64::from).collect())
}

/// `((x0 . x1) . x2) . ...`, narrow floats in f32 and rounded at the end, an average after it was divided.
pub fn reduce(by: Reduction, ranks: &[Value]) -> Value {
    macro_rules! float {
        ($wide:ty, $variant:ident, $narrow:expr, $widen:expr) => {{
            let mut wide = ranks.iter().map(|v| match v {
                Value::$variant(x) => $widen(*x),
                _ => panic!(),
            });
            let first: $wide = wide.next().unwrap();
            let f = |a: $wide, b: $wide| match by {
                Reduction::Sum | Reduction::Avg => a + b,
                Reduction::Prod => a * b,
                Reduction::Max => a.max(b),
                Reduction::Min => a.min(b),
                _ => panic!("the {by} of floats"),
            };
            let all = wide.fold(first, f);
            let divisor = if by == Reduction::Avg { ranks.len() as $wide } else { 1.0 };
            Value::$variant($narrow(all / divisor))
        }};
    }
    macro_rules! integer {
        ($variant:ident) => {{
            let mut all = ranks.iter().map(|v| match v {
                Value::$variant(x) => *x,
                _ => panic!(),
            });
            let first = all.next().unwrap();
            Value::$variant(all.fold(first, |a, b| match by {
                Reduction::Sum => a.wrapping_add(b),
                Reduction::Prod => a.wrapping_mul(b),
                Reduction::Max => a.max(b),
                Reduction::Min => a.min(b),
                Reduction::Avg => panic!("the average of integers"),
                Reduction::BitAnd => a & b,
                Reduction::BitOr => a | b,
                Reduction::BitXor => a ^ b,
            }))
        }};
    }
    match ranks[0] {
        Value::F64(_) => float!(f64, F64, |x| x, |x| x),
        Value::F32(_) => float!(f32, F32, |x| x, |x| x),
        Value::BF16(_) => float!(f32, BF16, bf16::from_f32, bf16::to_f32),
        Value::F16(_) => float!(f32, F16, f16::from_f32, f16::to_f32),
        Value::I64(_) => integer!(I64),
        Value::I32(_) => integer!(I32),
        Value::U8(_) => integer!(U8),
    }
}

/// What each rank's output holds after a collective with equal shares: `inputs[r]` is what rank `r` gives, `before[r]`
/// what its output held.
pub fn collective(
    kind: CollectiveKind,
    by: Reduction,
    root: usize,
    inputs: &[Vec<Value>],
    before: &[Vec<Value>],
) -> Vec<Vec<Value>> {
    let size = inputs.len();
    let reduced = |range: std::ops::Range<usize>| -> Vec<Value> {
        range.map(|i| reduce(by, &inputs.iter().map(|x| x[i]).collect::<Vec<_>>())).collect()
    };
    let share = |r: usize, of: usize| {
        let n = inputs[of].len() / size;
        r * n..(r + 1) * n
    };
    let at_root = |r: usize, value: Vec<Value>| if r == root { value } else { before[r].clone() };
    (0..size)
        .map(|r| match kind {
            CollectiveKind::Barrier | CollectiveKind::Send | CollectiveKind::Receive => vec![],
            CollectiveKind::AllReduce => reduced(0..inputs[0].len()),
            CollectiveKind::ReduceScatter => reduced(share(r, 0)),
            CollectiveKind::AllGather => inputs.concat(),
            CollectiveKind::Broadcast => inputs[root].clone(),
            CollectiveKind::Reduce => at_root(r, reduced(0..inputs[0].len())),
            CollectiveKind::Gather => at_root(r, inputs.concat()),
            CollectiveKind::Scatter => inputs[root][share(r, root)].to_vec(),
            CollectiveKind::AllToAll => (0..size).flat_map(|q| inputs[q][share(r, q)].to_vec()).collect(),
        })
        .collect()
}
