//! Elements that are moved, converted and compared, and the copies in, out and between layouts.

use phalanx_kernels as k;
use phalanx_tensor::{DType, Device, Result, Scalar, Tensor};

use crate::case::{Case, FLOATS, make, spread};

pub fn cases() -> Vec<Case> {
    let mut all = moves_cases();
    all.extend(copies_cases());
    all
}

const ALL: [DType; 8] =
    [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];
const INTEGERS: [DType; 3] = [DType::I64, DType::I32, DType::U8];

/// Numbers of either sign, as far as the dtype has them.
fn made(shape: &[usize], dtype: DType, d: Device, seed: usize) -> Tensor {
    let (low, high) = match dtype {
        DType::U8 => (0.0, 200.0),
        DType::Bool => (-1.0, 1.0),
        _ => (-100.0, 100.0),
    };
    let value = spread(seed, low, high);
    make(shape, dtype, d, move |i| if dtype == DType::Bool { value(i).max(0.0) } else { value(i) })
}

fn moves_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in ALL {
        converted(dtype, &mut all);
        placed(dtype, &mut all);
        chosen(dtype, &mut all);
        compared(dtype, &mut all);
    }
    for dtype in INTEGERS {
        computed(dtype, &mut all);
    }
    made_anew(&mut all);
    all
}

/// Every dtype into every other, ties and ends of ranges too.
fn converted(from: DType, all: &mut Vec<Case>) {
    const EDGES: [f64; 24] = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        -1.5,
        254.9,
        255.5,
        256.0,
        -0.9,
        300.0,
        65504.0,
        65520.0,
        1.00390625,
        1.0039062500001,
        1.00048828125,
        1.000488281250001,
        2147483647.0,
        2147483648.0,
        -2147483649.0,
        9.3e18,
        -9.3e18,
        1e-300,
        1e300,
    ];
    for to in ALL {
        all.push(Case::new(format!("cast {from} to {to}"), to, move |d| {
            let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
            let special = make(&[3], from, d, move |i| special[i]);
            let edges = make(&[24], from, d, |i| EDGES[i]);
            let each = [special, edges, made(&[129], from, d, 1), made(&[0], from, d, 1)];
            each.iter().map(|t| k::cast(t, to)).collect()
        }));
    }
    all.push(Case::new(format!("cast {from} of views"), DType::BF16, move |d| {
        let x = made(&[6, 16], from, d, 2);
        Ok(vec![k::cast(&x.transpose(0, 1)?, DType::BF16)?, k::cast(&x.narrow(1, 0, 8)?, DType::BF16)?])
    }));
}

/// Copies into views, joins, margins, reversals, triangles.
fn placed(dtype: DType, all: &mut Vec<Case>) {
    let mut add = |name: &str, run: fn(DType, Device) -> Result<Vec<Tensor>>| {
        all.push(Case::new(format!("move {name} {dtype}"), dtype, move |d| run(dtype, d)));
    };
    add("copy_ to a view", |dtype, d| {
        let whole = made(&[6, 20], dtype, d, 1);
        k::copy_(&mut whole.narrow(1, 2, 16)?.narrow(0, 1, 4)?, &made(&[4, 16], dtype, d, 2))?;
        k::copy_(&mut whole.transpose(0, 1)?.narrow(0, 0, 3)?, &made(&[3, 6], dtype, d, 3))?;
        k::copy_(&mut whole.select(0, 5)?, &whole.select(0, 1)?)?;
        Ok(vec![whole])
    });
    add("copy_ from another dtype", |dtype, d| {
        let mut to = made(&[7, 9], dtype, d, 1);
        k::copy_(&mut to, &make(&[7, 9], DType::F32, d, spread(2, 0.0, 90.0)))?;
        Ok(vec![to])
    });
    add("fill", |dtype, d| {
        let whole = made(&[6, 20], dtype, d, 1);
        k::fill_(&mut whole.narrow(1, 3, 5)?, 2.7)?;
        k::fill_(&mut whole.select(1, 9)?, Scalar::Int(3))?;
        let full = |shape: &[usize], x: f64| k::full(shape, x, dtype, d);
        Ok(vec![whole, full(&[129], 0.1)?, full(&[], 1.0)?, full(&[0], 1.0)?, full(&[64], 300.0)?])
    });
    add("cat", |dtype, d| {
        let parts = [made(&[3, 5], dtype, d, 1), made(&[3, 0], dtype, d, 2), made(&[3, 8], dtype, d, 3)];
        let refs: Vec<&Tensor> = parts.iter().collect();
        let turned: Vec<Tensor> = parts.iter().map(|t| t.transpose(0, 1)).collect::<Result<_>>()?;
        let turned: Vec<&Tensor> = turned.iter().collect();
        Ok(vec![k::cat(&refs, 1)?, k::cat(&turned, 0)?])
    });
    add("pad", |dtype, d| {
        let x = made(&[4, 6], dtype, d, 1);
        Ok(vec![k::pad(&x, &[(1, 2), (3, 0)], Scalar::Int(7))?, k::pad(&x, &[(-2, 3)], Scalar::Int(1))?])
    });
    add("flip", |dtype, d| {
        let x = made(&[3, 4, 5], dtype, d, 1);
        let turned = x.transpose(0, 2)?;
        Ok(vec![
            k::flip(&x, &[0])?,
            k::flip(&x, &[2])?,
            k::flip(&x, &[0, 2])?,
            k::flip(&x, &[0, 1, 2])?,
            k::flip(&turned, &[0])?,
            k::flip(&turned.narrow(1, 1, 2)?, &[1, 2])?,
            k::flip(&made(&[0, 2], dtype, d, 1), &[1])?,
        ])
    });
    add("triangles", |dtype, d| {
        let x = made(&[2, 5, 8], dtype, d, 1);
        let mut out = Vec::new();
        for diagonal in [0, 1, -2, 100, -100, isize::MAX, isize::MIN] {
            out.push(k::tril(&x, diagonal)?);
            out.push(k::triu(&x.transpose(1, 2)?, diagonal)?);
        }
        Ok(out)
    });
}

fn chosen(dtype: DType, all: &mut Vec<Case>) {
    all.push(Case::new(format!("where {dtype}"), dtype, move |d| {
        let (a, b) = (made(&[7, 16], dtype, d, 1), made(&[7, 16], dtype, d, 2));
        let condition = made(&[7, 16], DType::Bool, d, 3);
        let column = made(&[7, 1], DType::Bool, d, 3);
        let one = made(&[], dtype, d, 4);
        let filled = |mask: &Tensor, x: f64| k::masked_fill(&a, mask, Scalar::Float(x));
        let turned = a.transpose(0, 1)?;
        Ok(vec![
            k::where_(&condition, &a, &b)?,
            k::where_(&column, &a, &one)?,
            k::where_(&condition.transpose(0, 1)?, &turned, &b.transpose(0, 1)?)?,
            filled(&condition, 3.5)?,
            filled(&column, if dtype.is_float() { f64::NEG_INFINITY } else { 1.0 })?,
        ])
    }));
}

fn compared(dtype: DType, all: &mut Vec<Case>) {
    type Pair = fn(&Tensor, &Tensor) -> Result<Tensor>;
    type Number = fn(&Tensor, Scalar) -> Result<Tensor>;
    const PAIRS: [(&str, Pair, Number); 6] = [
        ("eq", k::eq, k::eq_scalar),
        ("ne", k::ne, k::ne_scalar),
        ("lt", k::lt, k::lt_scalar),
        ("le", k::le, k::le_scalar),
        ("gt", k::gt, k::gt_scalar),
        ("ge", k::ge, k::ge_scalar),
    ];
    // What differs between dtypes shows in any of them.
    let chosen = if matches!(dtype, DType::F32 | DType::I64) { &PAIRS[..] } else { &PAIRS[1..3] };
    for &(name, pair, number) in chosen {
        all.push(Case::new(format!("compare {name} {dtype}"), dtype, move |d| {
            let a = make(&[33], dtype, d, |i| [0.0, 1.0, 2.0, f64::NAN, 3.0, 0.1][i % 6]);
            let b = make(&[33], dtype, d, |i| [1.0, 1.0, 0.0, 2.0, f64::NAN][i % 5]);
            Ok(vec![pair(&a, &b)?, number(&a, Scalar::Int(1))?, number(&a, Scalar::Float(0.1))?])
        }));
    }
}

fn computed(dtype: DType, all: &mut Vec<Case>) {
    all.push(Case::new(format!("integers {dtype}"), dtype, move |d| {
        let (a, b) = (made(&[7, 17], dtype, d, 1), made(&[7, 17], dtype, d, 2));
        let s = Scalar::Int(3);
        let few = make(&[17], dtype, d, |i| (i % 5) as f64);
        Ok(vec![
            k::add(&a, &b)?,
            k::sub(&a, &b)?,
            k::mul(&a, &b)?,
            k::div(&a, &k::add_scalar(&few, Scalar::Int(1))?)?,
            k::maximum(&a, &b)?,
            k::minimum(&a, &b.narrow(0, 0, 1)?)?,
            k::pow(&a, &few)?,
            k::pow_scalar(&a, s)?,
            k::rpow_scalar(&b, Scalar::Int(-1))?,
            k::add_scalar(&a.transpose(0, 1)?, s)?,
            k::sub_scalar(&a, s)?,
            k::rsub_scalar(&a, s)?,
            k::mul_scalar(&a, s)?,
            k::neg(&a)?,
            k::abs(&a)?,
            k::square(&a)?,
            k::relu(&a)?,
            k::clamp(&a, Some(Scalar::Int(-5)), Some(Scalar::Int(50)))?,
            k::clamp(&a, Some(Scalar::Int(60)), Some(Scalar::Int(50)))?,
        ])
    }));
}

/// What has no input of its own kind.
fn made_anew(all: &mut Vec<Case>) {
    for dtype in ALL {
        all.push(Case::new(format!("arange {dtype}"), dtype, move |d| {
            Ok(vec![
                k::arange(0, 130, 1, dtype, d)?,
                k::arange(5, -9, -2, dtype, d)?,
                k::arange(0.0, 1.0, 0.1, dtype, d)?,
                k::arange(3, 3, 1, dtype, d)?,
            ])
        }));
    }
    for dtype in FLOATS {
        all.push(Case::new(format!("any_nan {dtype}"), DType::Bool, move |d| {
            let clean = made(&[9, 21], dtype, d, 1);
            let at =
                |place: usize| make(&[9, 21], dtype, d, move |i| if i == place { f64::NAN } else { 1.0 });
            let each = [
                clean,
                at(0),
                at(188),
                at(100).transpose(0, 1)?,
                at(0).narrow(0, 1, 8)?,
                made(&[0], dtype, d, 1),
            ];
            let found: Vec<u8> = each.iter().map(|t| k::any_nan(t).map(u8::from)).collect::<Result<_>>()?;
            Ok(vec![Tensor::from_slice(&found, &[found.len()], d)?])
        }));
    }
    all.push(Case::new("compare broadcast", DType::Bool, |d| {
        let (a, b) = (made(&[5, 1], DType::F32, d, 1), made(&[1, 48], DType::F32, d, 2));
        Ok(vec![k::lt(&a, &b)?, k::lt(&a.narrow(0, 1, 3)?, &b.narrow(1, 1, 7)?)?])
    }));
    for (name, value) in [("", 2.0), (" beyond", 6.0), (" negative", -1.0)] {
        all.push(Case::new(format!("one_hot{name}"), DType::I64, move |d| {
            let index = make(&[3, 7], DType::I32, d, move |i| if i == 11 { value } else { (i % 6) as f64 });
            Ok(vec![k::one_hot(&index, 6)?, k::one_hot(&index.transpose(0, 1)?, 6)?])
        }));
    }
}

/// Shapes, odd and empty ones too.
const SHAPES: [&[usize]; 11] = [
    &[],
    &[0],
    &[1],
    &[129],
    &[7, 33],
    &[40, 72],
    &[3, 0, 2],
    &[3, 10, 17],
    &[2, 16, 140],
    &[2, 3, 4, 5],
    &[2, 3, 4, 16],
];

fn copies_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::I64, DType::U8] {
        for shape in SHAPES {
            let made = move |device| make(shape, dtype, device, spread(1, 0.0, 200.0));
            all.push(Case::new(format!("copy round trip {dtype} {shape:?}"), dtype, move |device| {
                Ok(vec![made(device)])
            }));
            let turned = move |device| {
                let order: Vec<usize> = (0..shape.len()).rev().collect();
                Ok(vec![made(device).permute(&order)?.contiguous()?])
            };
            all.push(Case::new(format!("copy transposed {dtype} {shape:?}"), dtype, turned));
            for (order, cut) in
                [(&[0, 2, 1][..], 0), (&[2, 1, 0], 0), (&[0, 2, 1, 3], 0), (&[1, 0], 4), (&[1, 0], 1)]
            {
                if order.len() == shape.len() {
                    let planes = move |device| {
                        Ok(vec![
                            made(device)
                                .narrow(-1, cut, shape[shape.len() - 1] - cut)?
                                .permute(order)?
                                .contiguous()?,
                        ])
                    };
                    all.push(Case::new(
                        format!("copy permuted {dtype} {shape:?} {order:?} from {cut}"),
                        dtype,
                        planes,
                    ));
                }
            }
            let zeros = move |device| Ok(vec![Tensor::zeros(shape, dtype, device)?]);
            all.push(Case::new(format!("zeros {dtype} {shape:?}"), dtype, zeros));
        }
    }
    all
}
