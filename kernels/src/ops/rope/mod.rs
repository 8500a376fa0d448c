//! Rotary position embedding (RoPE).
//!
//! Source: Su, Lu, Pan, Murtadha, Wen, Liu: RoFormer (2021).

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Error, Pool, Result, Tensor};

use crate::block_reader::elements;
use crate::check;
use crate::cuda::{File, LAYOUT, PRELUDE, Strided, type_name};
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::rows::{self, Outputs, Row, RowKernel, RowSizes, lanes};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};

const ROTATE: Kernels<RotateFn> = Kernels { cpu: rotate_on_cpu, cuda: rotate_on_gpu };

type RotateFn = fn(&'static str, &Tensor, Option<&Tensor>, &Angles<'_>, f64, &mut Tensor) -> Result<()>;

/// The options of a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The ratio of the slowest to the fastest wavelength, about.
    pub base: f64,
    /// The first position, where positions are not given.
    pub offset: i64,
}

impl Default for Rope {
    fn default() -> Rope {
        Rope { base: 10000.0, offset: 0 }
    }
}

/// The frequencies of a rotary embedding that do not follow from a base, because a model's context was extended.
#[derive(Clone, Debug)]
pub struct RopeFrequencies {
    /// The angle of each pair of features at position 1, f64 `[D/2]`, on the device of what is rotated.
    pub values: Tensor,
    /// What rotated features are multiplied with.
    pub factor: f64,
}

/// Where angles come from.
struct Angles<'a> {
    config: &'a Rope,
    frequencies: Option<&'a RopeFrequencies>,
}

impl Angles<'_> {
    fn factor(&self) -> f64 {
        self.frequencies.map_or(1.0, |frequencies| frequencies.factor)
    }
}

/// Rotates each row of `x` [.., T, D] by its position: with `a, b` the row's halves and
/// `angle[i] = position * base^(-2i/D)` it becomes `a cos - b sin, b cos + a sin`. Positions are `offset, offset + 1, ..`
/// or `position_ids`, i64 `[T]` or `[B, T]` for `x` `[B, .., T, D]`. Angles are computed in f64, so that late positions are
/// as exact as early ones.
///
/// # Errors
/// If D is odd, or shapes, dtypes or devices do not fit.
pub fn rope(x: &Tensor, position_ids: Option<&Tensor>, config: &Rope) -> Result<Tensor> {
    rotate("rope", x, position_ids, &Angles { config, frequencies: None }, 1.0)
}

/// [`rope`] by given frequencies, `angle[i] = position * frequency[i]`, and times a factor. Of `config` the offset counts.
///
/// # Errors
/// As [`rope`], or if the frequencies do not fit.
pub fn rope_by(
    x: &Tensor,
    position_ids: Option<&Tensor>,
    config: &Rope,
    frequencies: &RopeFrequencies,
) -> Result<Tensor> {
    rotate("rope", x, position_ids, &Angles { config, frequencies: Some(frequencies) }, 1.0)
}

/// The gradient of [`rope_by`]: the rotation back, times the factor.
///
/// # Errors
/// As [`rope_by`].
pub fn rope_by_backward(
    dy: &Tensor,
    position_ids: Option<&Tensor>,
    config: &Rope,
    frequencies: &RopeFrequencies,
) -> Result<Tensor> {
    rotate("rope_backward", dy, position_ids, &Angles { config, frequencies: Some(frequencies) }, -1.0)
}

/// The gradient of [`rope`]: the rotation back.
///
/// # Errors
/// As [`rope`].
pub fn rope_backward(dy: &Tensor, position_ids: Option<&Tensor>, config: &Rope) -> Result<Tensor> {
    rotate("rope_backward", dy, position_ids, &Angles { config, frequencies: None }, -1.0)
}

fn rotate(
    op: &'static str,
    x: &Tensor,
    position_ids: Option<&Tensor>,
    angles: &Angles<'_>,
    sense: f64,
) -> Result<Tensor> {
    check::float(op, x)?;
    let [.., length, depth] = *x.shape() else {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "[.., T, D]"));
    };
    if depth % 2 != 0 {
        return Err(Error::shape(op, format!("{:?}", x.shape()), "an even last dimension"));
    }
    if let Some(ids) = position_ids {
        check::same_device(op, &[x, ids])?;
        check::dtype(op, ids, DType::I64)?;
        let fits = ids.shape() == [length] || (x.rank() > 2 && ids.shape() == [x.shape()[0], length]);
        if !fits {
            let got = format!("positions of shape {:?} for {:?}", ids.shape(), x.shape());
            return Err(Error::shape(op, got, "positions [T] or [B, T] for [B, .., T, D]"));
        }
    }
    if let Some(RopeFrequencies { values, .. }) = angles.frequencies {
        check::same_device(op, &[x, values])?;
        check::dtype(op, values, DType::F64)?;
        if values.shape() != [depth / 2] {
            let got = format!("frequencies of shape {:?} for {:?}", values.shape(), x.shape());
            return Err(Error::shape(op, got, "one for each pair of features"));
        }
    }
    let mut y = x.empty_like_for(op)?;
    if y.numel() > 0 {
        ROTATE.run(y.device(), |rotate| rotate(op, x, position_ids, angles, sense, &mut y))?;
    }
    Ok(y)
}

fn rotate_on_cpu(
    op: &'static str,
    x: &Tensor,
    position_ids: Option<&Tensor>,
    angles: &Angles<'_>,
    sense: f64,
    y: &mut Tensor,
) -> Result<()> {
    let (length, half) = (x.size(-2)?, x.size(-1)? / 2);
    let positions = match position_ids {
        Some(ids) => elements::<i64>(op, ids)?,
        None => (0..length as i64).map(|t| angles.config.offset + t).collect(),
    };
    let slowness = match angles.frequencies {
        Some(frequencies) => elements::<f64>(op, &frequencies.values)?,
        None => (0..half).map(|i| angles.config.base.powf(-(i as f64) / half as f64)).collect(),
    };
    let by = Table { slowness: &slowness, factor: angles.factor(), sense };
    for_real!(op, x.dtype(), T => run::<T>(op, x, &positions, &by, y))
}

fn run<T: Real>(
    op: &'static str,
    x: &Tensor,
    positions: &[i64],
    by: &Table<'_>,
    y: &mut Tensor,
) -> Result<()> {
    let (length, width) = (x.size(-2)?, x.size(-1)?);
    let pool = x.device().pool()?;
    let table = by.of::<T::Wide>(&pool, positions);
    let rows = x.numel() / width;
    // Rows that share a row of position numbers: all of them, or one batch item's.
    let shared = rows / (positions.len() / length);
    let kernel = Rotate { table: &table, length, shared };
    rows::run::<T, 1>(
        op,
        &kernel,
        RowSizes { rows, width, stats: 0, sums: 0 },
        [x],
        Outputs { y: Some(y), stats: &mut [] },
    )?;
    Ok(())
}

/// How a table of cosines and sines is made.
struct Table<'a> {
    /// The angle of each pair at position 1.
    slowness: &'a [f64],
    factor: f64,
    sense: f64,
}

impl Table<'_> {
    /// For each position the cosines and then the sines of all angles, times the factor, the sines times `sense`.
    fn of<T: Float>(&self, pool: &Pool, positions: &[i64]) -> Vec<T> {
        let Table { slowness, factor, sense } = *self;
        let half = slowness.len();
        let mut table = vec![T::ZERO; positions.len() * 2 * half];
        let rows = (4096 / half).max(1);
        pool.for_each_chunk(&mut table, rows * 2 * half, |piece, part| {
            let mut row = vec![0.0; 2 * half];
            for (i, to) in part.chunks_exact_mut(2 * half).enumerate() {
                let position = positions[piece * rows + i] as f64;
                dispatch(CosinesAndSines { position, slowness, sense, row: &mut row });
                to.iter_mut().zip(&row).for_each(|(to, &x)| *to = T::from_f64(x * factor));
            }
        });
        table
    }
}

struct CosinesAndSines<'a> {
    position: f64,
    slowness: &'a [f64],
    sense: f64,
    row: &'a mut [f64],
}

impl Kernel for CosinesAndSines<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (cos, sin) = self.row.split_at_mut(self.slowness.len());
        let (position, sense) = (S::F64::splat(self.position), S::F64::splat(self.sense));
        lanes::map([self.slowness], cos, |[x]: [S::F64; 1]| (x * position).cos());
        lanes::map([self.slowness], sin, |[x]: [S::F64; 1]| (x * position).sin() * sense);
    }
}

struct Rotate<'a, T> {
    table: &'a [T],
    /// Rows of one head, and rows for which the positions are the same ones.
    length: usize,
    shared: usize,
}

impl<T: Float> RowKernel<T, 1> for Rotate<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], half) = (row.x, row.x[0].len() / 2);
        let at = row.index / self.shared * self.length + row.index % self.length;
        let (cos, sin) = self.table[at * 2 * half..][..2 * half].split_at(half);
        let ((a, b), (y, z)) = (x.split_at(half), row.y.split_at_mut(half));
        lanes::map([a, b, cos, sin], y, |[a, b, cos, sin]: [T::Vec<S>; 4]| a * cos - b * sin);
        lanes::map([a, b, cos, sin], z, |[a, b, cos, sin]: [T::Vec<S>; 4]| b * cos + a * sin);
    }
}

const FILES: &[File] = &[PRELUDE, LAYOUT, ("rope.cu", include_str!("rope.cu"))];
const THREADS: u32 = 128;
/// Heads that a thread rotates, as in `rope.cu`.
const HEADS: usize = 16;

/// The rotation of `x` into the contiguous `y`, which has elements; positions as [`rope`] takes them.
fn rotate_on_gpu(
    op: &'static str,
    x: &Tensor,
    ids: Option<&Tensor>,
    angles: &Angles<'_>,
    sense: f64,
    y: &mut Tensor,
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let (last, half) = (x.rank() - 1, x.size(-1)? / 2);
    let positions = x.size(-2)?;
    let ids = ids.map(Tensor::contiguous).transpose()?;
    let batches = ids.as_ref().map_or(1, |ids| ids.numel() / positions);
    let heads = x.numel() / (2 * half * positions * batches);
    let rows = x.select(last, 0)?;
    let step = x.strides()[last];
    // Pairs lie together and begin at multiples of two, in every row.
    let even = |stride: &usize| stride.is_multiple_of(2);
    let pairs = half.is_multiple_of(2)
        && [x.offset(), y.offset()].iter().all(even)
        && (step != 1 || rows.strides().iter().all(even));
    let (entry, lanes) = if pairs { ("rotate_2", 2) } else { ("rotate_1", 1) };
    let defines = [("ELEMENT", type_name(x.dtype()))];
    let program = Program { name: "rope.cu", files: FILES, defines: &defines };
    let blocks = (positions * (half / lanes)).div_ceil(THREADS as usize);
    let most = usize::from(u16::MAX);
    let grid = Grid::new(blocks, THREADS).by(heads.div_ceil(HEADS).min(most), batches.min(most));
    let layout = Strided::new(op, rows.shape(), [&rows])?;
    let frequencies = angles.frequencies.map(|frequencies| frequencies.values.contiguous()).transpose()?;
    let args = Args::new(op, gpu).write(y)?.read(x)?.read_if(ids.as_ref())?;
    let args = args.read_if(frequencies.as_ref())?.value(layout);
    let args = args.value(step as u64).value(batches as u64).value(heads as u64).value(positions as u64);
    let args = args.value(half as u64).value(angles.config.offset).value(angles.config.base);
    let args = args.value(angles.factor()).value(sense);
    gpu.kernel(op, &program, entry)?.launch(grid, args)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{Rope, RopeFrequencies, rope, rope_backward, rope_by, rope_by_backward};
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    #[test]
    fn equals_the_formula_and_turns_back() {
        let ids = Tensor::from_slice(&[0i64, 7, 100_003, 1 << 22, 3, 5], &[2, 3], Device::CPU).unwrap();
        for dtype in FLOATS {
            let x = make(&[2, 3, 4, 22], dtype, &floats(-2.0, 3.0)).transpose(1, 2).unwrap();
            for (ids, offset) in [(Some(&ids), 0), (None, 4)] {
                let config = Rope { base: 500.0, offset };
                let y = rope(&x, ids, &config).unwrap();
                let back = rope_backward(&y, ids, &config).unwrap();
                let (xs, ys, backs) = (values(&x), values(&y), values(&back));
                for (row, x) in xs.chunks(22).enumerate() {
                    let (b, t) = (row / 12, row % 3);
                    let position =
                        ids.map_or(offset + t as i64, |ids| ids.to_vec::<i64>().unwrap()[b * 3 + t]);
                    for i in 0..11 {
                        let angle = position as f64 * 500f64.powf(-2.0 * i as f64 / 22.0);
                        let near = |got: f64, want: f64| assert_close(got, want, 2.0 * tolerance(dtype));
                        near(ys[row * 22 + i], x[i] * angle.cos() - x[i + 11] * angle.sin());
                        near(ys[row * 22 + i + 11], x[i + 11] * angle.cos() + x[i] * angle.sin());
                        near(backs[row * 22 + i], x[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn given_frequencies_and_a_factor_count() {
        let frequencies = [1.0, 0.25, 1e-3];
        for dtype in FLOATS {
            let x = make(&[2, 5, 6], dtype, &floats(-2.0, 3.0));
            let values_of = Tensor::from_slice(&frequencies, &[3], Device::CPU).unwrap();
            let by = RopeFrequencies { values: values_of, factor: 1.5 };
            let config = Rope { offset: 2, ..Rope::default() };
            let y = rope_by(&x, None, &config, &by).unwrap();
            let back = values(&rope_by_backward(&y, None, &config, &by).unwrap());
            let (xs, ys) = (values(&x), values(&y));
            for (row, x) in xs.chunks(6).enumerate() {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = ((2 + row % 5) as f64 * frequency).sin_cos();
                    let near = |got: f64, want: f64| assert_close(got, want, 4.0 * tolerance(dtype));
                    near(ys[row * 6 + i], 1.5 * (x[i] * cos - x[i + 3] * sin));
                    near(ys[row * 6 + i + 3], 1.5 * (x[i + 3] * cos + x[i] * sin));
                    near(back[row * 6 + i], 2.25 * x[i]);
                }
            }
            let short = Tensor::from_slice(&frequencies[..2], &[2], Device::CPU).unwrap();
            let refused = rope_by(&x, None, &config, &RopeFrequencies { values: short, factor: 1.0 });
            assert!(refused.unwrap_err().to_string().contains("frequencies of shape [2]"));
        }
    }

    #[test]
    fn odd_depths_and_foreign_positions_are_refused() {
        let x = make(&[2, 3, 5], DType::F32, &|_| 0.0);
        assert!(rope(&x, None, &Rope::default()).is_err());
        let ids = Tensor::from_slice(&[1i64, 2], &[2], Device::CPU).unwrap();
        let x = make(&[2, 3, 4], DType::F32, &|_| 0.0);
        assert!(rope(&x, Some(&ids), &Rope::default()).is_err());
    }
}
