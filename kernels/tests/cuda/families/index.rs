//! Rows and elements by index, and rotary embedding.

use phalanx_kernels::{
    Rope, RopeFrequencies, embedding, embedding_backward, embedding_backward_accumulate_, gather, index_add,
    index_select, rope, rope_backward, rope_by, rope_by_backward, scatter_add, split_indices,
};
use phalanx_tensor::{DType, Device, Tensor};

use crate::case::{Case, FLOATS, make, spread};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    picks(&mut all);
    sums(&mut all);
    splits(&mut all);
    out_of_range(&mut all);
    rotations(&mut all);
    all
}

/// `count` indices below `size`, some of them often.
fn indices(seed: usize, count: &[usize], size: usize, device: Device) -> Tensor {
    let values = spread(seed, 0.0, 1.0);
    let skewed = move |i: usize| (values(i).powi(3) * size as f64).floor();
    make(count, DType::I64, device, skewed)
}

fn picks(all: &mut Vec<Case>) {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::I64, DType::U8] {
        for (rows, inner, count) in
            [(5, 1, 7), (33, 7, 1), (7, 96, 129), (3, 1, 0), (129, 33, 33), (2, 1500, 3)]
        {
            let table = move |d| make(&[rows, inner], dtype, d, spread(1, 0.0, 200.0));
            all.push(Case::new(
                format!("index embedding {dtype} {rows}x{inner} at {count}"),
                dtype,
                move |d| Ok(vec![embedding(&table(d), &indices(2, &[count], rows, d))?]),
            ));
        }
        let cube = move |d| make(&[4, 5, 6], dtype, d, spread(3, 0.0, 200.0));
        for dim in 0..3 {
            all.push(Case::new(format!("index select {dtype} along {dim}"), dtype, move |d| {
                let x = cube(d).permute(&[2, 0, 1])?;
                Ok(vec![index_select(&x, dim, &indices(4, &[9], 4, d))?])
            }));
            all.push(Case::new(format!("index gather {dtype} along {dim}"), dtype, move |d| {
                let mut shape = [3, 4, 5];
                shape[dim] = 7;
                let x = cube(d).transpose(0, 1)?.narrow(2, 1, 5)?;
                Ok(vec![gather(&x, dim, &indices(5, &shape, 4, d))?])
            }));
        }
        all.push(Case::new(format!("index gather {dtype} of one number"), dtype, move |d| {
            let x = make(&[], dtype, d, |_| 3.0);
            Ok(vec![gather(&x, 0, &make(&[], DType::I64, d, |_| 0.0))?])
        }));
    }
}

fn sums(all: &mut Vec<Case>) {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8] {
        let bits = |case: Case| if dtype.is_float() { case.within(0.0) } else { case };
        for (rows, inner, count) in
            [(5, 1, 7), (33, 8, 1), (300, 16, 1300), (7, 520, 60), (3, 5, 0), (1, 33, 129), (70_000, 1, 50)]
        {
            let source = move |d| make(&[count, inner], dtype, d, spread(6, -3.0, 100.0));
            if dtype.is_float() {
                let name = format!("index embedding backward {dtype} {rows}x{inner} at {count}");
                all.push(bits(Case::new(name, dtype, move |d| {
                    let index = indices(7, &[count], rows, d);
                    let dy = source(d);
                    let mut sum = make(&[rows, inner], dtype, d, spread(8, -1.0, 1.0));
                    assert!(embedding_backward_accumulate_(&mut sum, &dy, &index, None)?);
                    let padded = embedding_backward(&dy, &index, rows, Some(0))?;
                    Ok(vec![embedding_backward(&dy, &index, rows, None)?, padded, sum])
                })));
            }
            let name = format!("index add {dtype} {rows}x{inner} at {count}");
            all.push(bits(Case::new(name, dtype, move |d| {
                let x = make(&[rows, inner], dtype, d, spread(8, 0.0, 90.0));
                Ok(vec![index_add(&x, 0, &indices(7, &[count], rows, d), &source(d), 2.0)?])
            })));
        }
        for dim in 0..3 {
            all.push(bits(Case::new(format!("index add {dtype} along {dim}"), dtype, move |d| {
                let x = make(&[4, 5, 6], dtype, d, spread(8, 0.0, 90.0));
                let mut shape = [4, 5, 6];
                shape[dim] = 11;
                shape.reverse();
                let source = make(&shape, dtype, d, spread(9, 0.0, 50.0)).permute(&[2, 1, 0])?;
                Ok(vec![index_add(&x, dim, &indices(10, &[11], 4, d), &source, -0.5)?])
            })));
            for length in [1, 3, 50] {
                let name = format!("index scatter {dtype} along {dim}, {length} a line");
                all.push(bits(Case::new(name, dtype, move |d| {
                    let x = make(&[4, 5, 6], dtype, d, spread(8, 0.0, 90.0));
                    let mut shape = [3, 4, 5];
                    shape[dim] = length;
                    let index = indices(11, &shape, 4, d);
                    Ok(vec![scatter_add(&x, dim, &index, &make(&shape, dtype, d, spread(12, 0.0, 50.0)))?])
                })));
            }
        }
        all.push(bits(Case::new(format!("index scatter {dtype} into one line"), dtype, move |d| {
            let x = make(&[300], dtype, d, spread(8, 0.0, 90.0));
            let source = make(&[2100], dtype, d, spread(12, 0.0, 50.0));
            Ok(vec![scatter_add(&x, 0, &indices(13, &[2100], 300, d), &source)?])
        })));
    }
}

fn splits(all: &mut Vec<Case>) {
    for (count, own, ignored) in [
        (1, 0..3, None),
        (7, 3..5, Some(-100)),
        (33, 0..10, Some(4)),
        (129, 9..10, Some(-1)),
        (0, 2..3, None),
    ] {
        let name = format!("index split of {count} at {own:?} without {ignored:?}");
        all.push(Case::new(name, DType::I64, move |d| {
            let every = move |i: usize| {
                let none = ignored.filter(|_| i % 6 == 2);
                none.map_or((i * i % 10) as f64, |index| index as f64)
            };
            let index = make(&[2, count], DType::I64, d, every).transpose(0, 1)?;
            let (here, elsewhere) = split_indices(&index, own.clone(), 10, ignored)?;
            Ok(vec![here, elsewhere])
        }));
    }
}

fn out_of_range(all: &mut Vec<Case>) {
    for bad in [-1.0, 7.0, 1e12] {
        all.push(Case::new(format!("index {bad} out of range, split"), DType::F32, move |d| {
            let index = make(&[40], DType::I64, d, move |i| if i == 33 { bad } else { 2.0 });
            Ok(vec![split_indices(&index, 2..5, 7, Some(-100))?.0])
        }));
        let index = move |d| make(&[40], DType::I64, d, move |i| if i == 33 { bad } else { 2.0 });
        let x = |d| make(&[7, 3], DType::F32, d, spread(1, -1.0, 1.0));
        let dy = |d| make(&[40, 3], DType::F32, d, spread(1, -1.0, 1.0));
        all.push(Case::new(format!("index {bad} out of range, picked"), DType::F32, move |d| {
            Ok(vec![embedding(&x(d), &index(d))?])
        }));
        all.push(Case::new(format!("index {bad} out of range, gathered"), DType::F32, move |d| {
            Ok(vec![gather(&x(d).narrow(1, 0, 1)?, 0, &index(d).unsqueeze(1)?)?])
        }));
        all.push(Case::new(format!("index {bad} out of range, added"), DType::F32, move |d| {
            Ok(vec![embedding_backward(&dy(d), &index(d), 7, None)?])
        }));
        for length in [1, 40] {
            all.push(Case::new(
                format!("index {bad} out of range, scattered {length}"),
                DType::BF16,
                move |d| {
                    let x = make(&[40, 7], DType::BF16, d, spread(1, -1.0, 1.0));
                    let x = if length == 1 { x } else { x.transpose(0, 1)? };
                    let dim = usize::from(length == 1);
                    let index = index(d).unsqueeze(1)?;
                    Ok(vec![scatter_add(
                        &x,
                        dim,
                        &index,
                        &make(&[40, 1], DType::BF16, d, spread(1, -1.0, 1.0)),
                    )?])
                },
            ));
        }
    }
}

fn rotations(all: &mut Vec<Case>) {
    for dtype in FLOATS {
        for (length, depth) in [(1, 2), (7, 6), (33, 64), (5, 22)] {
            let name = format!("rope {dtype} {length}x{depth}");
            // A wavelength's last digit counts as often as the position says.
            let turned = |case: Case| if dtype == DType::F64 { case.within(1e-10) } else { case };
            all.push(turned(Case::new(name, dtype, move |d| {
                let x = make(&[2, length, 3, depth], dtype, d, spread(1, -2.0, 2.0)).transpose(1, 2)?;
                let ids = make(&[2, length], DType::I64, d, |i| (i * i * 1009 % 100_003) as f64);
                let config = Rope { base: 500.0, offset: 4 };
                let values = make(&[depth / 2], DType::F64, d, |i| 1.0 / (1.0 + i as f64));
                let by = RopeFrequencies { values, factor: 1.5 };
                Ok(vec![
                    rope_by(&x, Some(&ids), &config, &by)?,
                    rope_by_backward(&x, None, &config, &by)?,
                    rope(&x, None, &config)?,
                    rope(&x, Some(&ids), &config)?,
                    rope(&x, Some(&ids.select(0, 1)?), &config)?,
                    rope_backward(&x, Some(&ids), &config)?,
                ])
            })));
        }
        all.push(Case::new(format!("rope {dtype} of 40 heads"), dtype, move |d| {
            let x = make(&[40, 3, 4], dtype, d, spread(1, -2.0, 2.0));
            Ok(vec![rope(&x, None, &Rope::default())?])
        }));
    }
}
