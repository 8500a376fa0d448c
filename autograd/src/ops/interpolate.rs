//! Signals, images and volumes resized, `[n, channels, ..]`.
//!
//! Each spatial dimension by itself: a pixel is the weighted sum of a few of the input's ([`lines`]). Derivative: the
//! transposed sums. Nothing is saved.

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Error, Result as TensorResult, Tensor};
use smallvec::{SmallVec, smallvec};

use super::frame::{composed, named, record_linear};
use crate::{Result, Var};

/// How [`Var::interpolate`] finds a pixel's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpolateMode {
    /// The input's pixel at `floor(place * in / out)`, in 1 to 3 dimensions.
    Nearest,
    /// The pixel whose centre is nearest, in 1 to 3 dimensions.
    NearestExact,
    /// Between two elements, in 1 dimension.
    Linear,
    /// Between four pixels, in 2 dimensions.
    Bilinear,
    /// Between eight places, in 3 dimensions.
    Trilinear,
    /// By cubic convolution of 16 pixels (with a = -3/4), in 2 dimensions.
    Bicubic,
    /// The mean of the pixels that it covers, in 1 to 3 dimensions.
    Area,
}

/// What [`Var::interpolate`] is told: the size or the scale, the mode, and where the pixels lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Interpolate {
    target: Target,
    mode: InterpolateMode,
    align_corners: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Target {
    Size(SmallVec<[usize; 3]>),
    Scale(SmallVec<[f64; 3]>),
}

impl Interpolate {
    /// To these sizes; a single one is that of all spatial dimensions.
    pub fn to_size(size: &[usize], mode: InterpolateMode) -> Interpolate {
        Interpolate { target: Target::Size(size.into()), mode, align_corners: false }
    }

    /// To `floor(size * factor)`; a single factor is that of all spatial dimensions.
    pub fn by_scale(factors: &[f64], mode: InterpolateMode) -> Interpolate {
        Interpolate { target: Target::Scale(factors.into()), mode, align_corners: false }
    }

    /// Whether the centres of the corner pixels of input and output are the same points; else their outer corners are.
    /// For the linear modes and the cubic one.
    #[must_use]
    pub fn with_align_corners(self, align_corners: bool) -> Interpolate {
        Interpolate { align_corners, ..self }
    }
}

impl Var {
    /// `[n, channels, ..sizes]` with other sizes, as PyTorch's `functional.interpolate` without antialiasing. Where a
    /// factor is given, it also is the distance of the pixels.
    ///
    /// # Errors
    /// If the mode is not for so many dimensions or cannot align corners, sizes or factors are not as many as the spatial
    /// dimensions, a size is 0, a factor is not positive and finite, or the dtype is no floating-point one (except for
    /// the two nearest modes).
    ///
    /// ```
    /// use phalanx_autograd::{Interpolate, InterpolateMode, Var, tensor::Device};
    /// let x = Var::from_slice(&[0.0, 1.0], &[1, 1, 2], Device::CPU)?;
    /// let y = x.interpolate(&Interpolate::to_size(&[3], InterpolateMode::Linear).with_align_corners(true))?;
    /// assert_eq!(y.to_vec::<f64>()?, [0.0, 0.5, 1.0]);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn interpolate(&self, options: &Interpolate) -> Result<Var> {
        let lines: Arc<[Lines]> = lines(self.shape(), options)?.into();
        if lines.iter().all(Lines::only_picks) && !self.dtype().is_float() {
            return named(OP, resampled(self, lines));
        }
        composed(OP, &[self], |x| resampled(&x[0], lines))
    }
}

const OP: &str = "interpolate";

/// The last dimensions of `x` mapped by `lines`.
fn resampled(x: &Var, lines: Arc<[Lines]>) -> Result<Var> {
    let y = apply(x.tensor(), &lines)?;
    record_linear(OP, x, y, move |dy| {
        resampled(dy, lines.iter().map(Lines::transposed).collect::<Vec<_>>().into())
    })
}

/// Dimensions that grow are mapped last, and the last of them first.
fn apply(x: &Tensor, lines: &[Lines]) -> TensorResult<Tensor> {
    let first = x.rank() - lines.len();
    let mut order: SmallVec<[usize; 3]> = (0..lines.len()).rev().collect();
    order.sort_by_key(|&i| lines[i].grows());
    let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    order.iter().try_fold(x.clone(), |x, &i| lines[i].apply(&x, first + i, dtype))
}

fn wrong(shape: &[usize], options: &Interpolate, wanted: &str) -> Error {
    let target = match &options.target {
        Target::Size(size) => format!("size {size:?}"),
        Target::Scale(factors) => format!("factors {factors:?}"),
    };
    Error::invalid(
        OP,
        format!("got {target} in mode {:?} for shape {shape:?}, wanted {wanted}", options.mode),
    )
}

// A linear map along one dimension in which every output is the weighted sum of a few inputs.
//
// Made of one `index_select` of as many elements as the longest sum has for each output, a product with the weights and
// a sum, so that what an output does not depend on cannot spoil it, as a NaN would in a matrix product.

/// The inputs of one output, with their weights.
type Line = SmallVec<[(usize, f64); 4]>;

/// Such a map.
struct Lines {
    pub inputs: usize,
    pub lines: Vec<Line>,
}

impl Lines {
    /// Whether every output is one of the inputs.
    pub fn only_picks(&self) -> bool {
        self.lines.iter().all(|line| matches!(line.as_slice(), [(_, 1.0)]))
    }

    /// Whether there are more outputs than inputs.
    pub fn grows(&self) -> bool {
        self.lines.len() > self.inputs
    }

    fn is_identity(&self) -> bool {
        let same = |(at, line): (usize, &Line)| matches!(line.as_slice(), [(from, 1.0)] if *from == at);
        self.lines.len() == self.inputs && self.lines.iter().enumerate().all(same)
    }

    /// The transposed map.
    pub fn transposed(&self) -> Lines {
        let mut lines = vec![Line::new(); self.inputs];
        for (to, line) in self.lines.iter().enumerate() {
            for &(from, weight) in line {
                match lines[from].last_mut() {
                    Some((last, sum)) if *last == to => *sum += weight,
                    _ => lines[from].push((to, weight)),
                }
            }
        }
        Lines { inputs: self.lines.len(), lines }
    }

    /// The map of dimension `dim`, with weights in `dtype`.
    pub fn apply(&self, x: &Tensor, dim: usize, dtype: DType) -> TensorResult<Tensor> {
        if self.is_identity() {
            return Ok(x.clone());
        }
        let outputs = self.lines.len();
        let terms = self.lines.iter().map(SmallVec::len).max().unwrap_or(0).max(1);
        // A sum with fewer terms repeats its first input with the weight 0.
        let term = |nth: usize, line: &Line| {
            line.get(nth).copied().unwrap_or((line.first().map_or(0, |&(from, _)| from), 0.0))
        };
        let all = || (0..terms).flat_map(|nth| self.lines.iter().map(move |line| term(nth, line)));
        let places: Vec<i64> = all().map(|(from, _)| from as i64).collect();
        let places = Tensor::from_slice(&places, &[places.len()], x.device())?;
        let picked = kernels::index_select(x, dim, &places)?;
        if self.only_picks() {
            return Ok(picked);
        }
        let mut shape = Dims::from_slice(picked.shape());
        shape[dim] = outputs;
        shape.insert(dim, terms);
        let weights: Vec<f64> = all().map(|(_, weight)| weight).collect();
        let mut by_output = Dims::from_elem(1, shape.len() - dim);
        (by_output[0], by_output[1]) = (terms, outputs);
        let weights = kernels::cast(&Tensor::from_slice(&weights, &by_output, x.device())?, dtype)?;
        kernels::sum(&kernels::mul(&picked.with_shape(&shape)?, &weights)?, &[dim], false)
    }
}

// Which pixels make a pixel, and with which weights: PyTorch's rules.

/// The maps of the spatial dimensions.
fn lines(shape: &[usize], options: &Interpolate) -> Result<Vec<Lines>> {
    let sizes = spatial(shape, options)?;
    let one = |(i, &size): (usize, &usize)| -> Result<Lines> {
        if size == 0 {
            return Err(wrong(shape, options, "an input of at least one pixel").into());
        }
        let (out, factor) = match &options.target {
            Target::Size(to) => (to[i.min(to.len() - 1)], None),
            Target::Scale(factors) => {
                let factor = factors[i.min(factors.len() - 1)];
                if !(factor.is_finite() && factor > 0.0) {
                    return Err(wrong(shape, options, "factors above 0, and finite").into());
                }
                ((size as f64 * factor) as usize, Some(factor))
            }
        };
        if out == 0 {
            return Err(wrong(shape, options, "an output of at least one pixel").into());
        }
        Axis { size, out, factor, options }.lines()
    };
    sizes.iter().enumerate().map(one).collect()
}

/// The sizes to change, if there are as many as the mode and the options are for.
fn spatial<'a>(shape: &'a [usize], options: &Interpolate) -> Result<&'a [usize]> {
    let refuse = |wanted: &str| Err(wrong(shape, options, wanted).into());
    let Some(sizes) = shape.get(2..) else { return refuse("[n, channels, ..]") };
    use InterpolateMode as Mode;
    let (fits, wanted) = match options.mode {
        Mode::Linear => (sizes.len() == 1, "[n, channels, length]"),
        Mode::Bilinear | Mode::Bicubic => (sizes.len() == 2, "[n, channels, h, w]"),
        Mode::Trilinear => (sizes.len() == 3, "[n, channels, d, h, w]"),
        _ => ((1..=3).contains(&sizes.len()), "one to three spatial dimensions after [n, channels]"),
    };
    if !fits {
        return refuse(wanted);
    }
    let count = match &options.target {
        Target::Size(size) => size.len(),
        Target::Scale(factors) => factors.len(),
    };
    if count != 1 && count != sizes.len() {
        return refuse("one number a spatial dimension, or one for all");
    }
    let aligns = matches!(options.mode, Mode::Linear | Mode::Bilinear | Mode::Trilinear | Mode::Bicubic);
    if options.align_corners && !aligns {
        return refuse("aligned corners only in the linear modes and the cubic one");
    }
    Ok(sizes)
}

/// One dimension that is to change.
struct Axis<'a> {
    size: usize,
    out: usize,
    factor: Option<f64>,
    options: &'a Interpolate,
}

impl Axis<'_> {
    fn lines(&self) -> Result<Lines> {
        let mut lines = Vec::new();
        let room = lines.try_reserve_exact(self.out);
        room.map_err(|_| Error::range(OP, format!("a size of {}", self.out), "one that fits in memory"))?;
        lines.extend((0..self.out).map(|to| self.line(to)));
        Ok(Lines { inputs: self.size, lines })
    }

    fn line(&self, to: usize) -> Line {
        match self.options.mode {
            InterpolateMode::Nearest => self.pick(to as f64 * self.step()),
            InterpolateMode::NearestExact => self.pick((to as f64 + 0.5) * self.step()),
            InterpolateMode::Bicubic => self.cubic(self.place(to)),
            InterpolateMode::Area => {
                let (start, end) = (to * self.size / self.out, ((to + 1) * self.size).div_ceil(self.out));
                (start..end).map(|at| (at, 1.0 / (end - start) as f64)).collect()
            }
            _ => self.linear(self.place(to).max(0.0)),
        }
    }

    /// The distance of the output's pixels in the input.
    fn step(&self) -> f64 {
        if self.options.align_corners {
            return if self.out > 1 { (self.size - 1) as f64 / (self.out - 1) as f64 } else { 0.0 };
        }
        self.factor.map_or(self.size as f64 / self.out as f64, f64::recip)
    }

    /// Where an output's pixel lies in the input.
    fn place(&self, to: usize) -> f64 {
        if self.options.align_corners {
            return to as f64 * self.step();
        }
        self.step() * (to as f64 + 0.5) - 0.5
    }

    /// Rounded to f32 before it is cut, as PyTorch does, so that thirds of three are whole.
    fn pick(&self, place: f64) -> Line {
        smallvec![(((place as f32).floor() as usize).min(self.size - 1), 1.0)]
    }

    fn linear(&self, place: f64) -> Line {
        let first = (place as usize).min(self.size - 1);
        let share = (place - first as f64).clamp(0.0, 1.0);
        smallvec![(first, 1.0 - share), ((first + 1).min(self.size - 1), share)]
    }

    fn cubic(&self, place: f64) -> Line {
        const A: f64 = -0.75;
        let near = |t: f64| ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0;
        let far = |t: f64| ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A;
        let (first, t) = (place.floor() as isize, place - place.floor());
        let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
        let at = |i: usize| (first - 1 + i as isize).clamp(0, self.size as isize - 1) as usize;
        (0..4).map(|i| (at(i), weights[i])).collect()
    }
}

#[cfg(test)]
mod tests {
    // Values worked out by hand, derivatives, refusals.

    use phalanx_tensor::{DType, Device};

    use super::{Interpolate, InterpolateMode as Mode};
    use crate::Var;
    use crate::ops::testing::check_twice;

    fn row(values: &[f64], options: &Interpolate) -> Vec<f64> {
        let x = Var::from_slice(values, &[1, 1, values.len()], Device::CPU).unwrap();
        x.interpolate(options).unwrap().to_vec().unwrap()
    }

    #[test]
    fn places_follow_the_rule_of_each_mode() {
        let x = [1.0, 2.0, 4.0, 8.0];
        let to = |size: usize, mode| row(&x, &Interpolate::to_size(&[size], mode));
        assert_eq!(to(6, Mode::Nearest), [1.0, 1.0, 2.0, 4.0, 4.0, 8.0]);
        assert_eq!(to(2, Mode::NearestExact), [2.0, 8.0]);
        assert_eq!(to(2, Mode::Area), [1.5, 6.0]);
        assert_eq!(to(3, Mode::Area), [1.5, 3.0, 6.0]);
        assert_eq!(to(8, Mode::Linear), [1.0, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 8.0]);
        assert_eq!(to(1, Mode::Linear), [3.0]);
        let aligned = Interpolate::to_size(&[7], Mode::Linear).with_align_corners(true);
        assert_eq!(row(&x, &aligned), [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]);
        // Where the factor is given, it is the distance: 4 * 1.3 is 5 pixels, each 1 / 1.3 from the last.
        let scaled = row(&x, &Interpolate::by_scale(&[1.3], Mode::Linear));
        assert_eq!(scaled.len(), 5);
        let third = 2.5 / 1.3 - 0.5;
        assert!((scaled[2] - (2.0 + 2.0 * (third - 1.0))).abs() < 1e-12);
    }

    #[test]
    fn what_a_pixel_does_not_depend_on_cannot_spoil_it() {
        let x = [1.0, f64::NAN, 3.0, 4.0, 5.0, f64::INFINITY];
        let y = row(&x, &Interpolate::to_size(&[12], Mode::Linear));
        assert_eq!(&y[6..=8], [3.75, 4.25, 4.75]);
        assert!(y[1].is_nan() && y[11] == f64::INFINITY);
    }

    #[test]
    fn derivatives_hold_in_every_mode() {
        use Mode::{Area, Bicubic, Bilinear, Linear, Nearest, NearestExact, Trilinear};
        for mode in [Nearest, NearestExact, Linear, Area] {
            for options in [Interpolate::to_size(&[7], mode), Interpolate::by_scale(&[0.6], mode)] {
                check_twice(&[&[2, 2, 5]], |v| v[0].tanh()?.interpolate(&options));
            }
        }
        for mode in [Nearest, Bilinear, Bicubic, Area] {
            check_twice(&[&[1, 2, 3, 5]], |v| v[0].tanh()?.interpolate(&Interpolate::to_size(&[5, 2], mode)));
        }
        for mode in [Bilinear, Bicubic] {
            let options = Interpolate::by_scale(&[2.0, 0.5], mode).with_align_corners(true);
            check_twice(&[&[1, 2, 3, 5]], |v| v[0].tanh()?.interpolate(&options));
        }
        let volume = Interpolate::to_size(&[3], Trilinear);
        check_twice(&[&[1, 1, 2, 4, 3]], |v| v[0].tanh()?.interpolate(&volume));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let x = Var::arange(0, 12, 1, DType::F32, Device::CPU).unwrap().reshape(&[1, 1, 3, 4]).unwrap();
        let says = |options: Interpolate, what: &str| {
            let error = x.interpolate(&options).unwrap_err().to_string();
            assert!(error.starts_with("interpolate: ") && error.contains(what), "{error}");
        };
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            says(Interpolate::by_scale(&[factor], Mode::Bilinear), "factors above 0");
        }
        says(Interpolate::by_scale(&[0.1], Mode::Nearest), "at least one pixel");
        says(Interpolate::by_scale(&[1e300], Mode::Nearest), "memory");
        says(Interpolate::to_size(&[0, 3], Mode::Nearest), "at least one pixel");
        says(Interpolate::to_size(&[2, 3, 4], Mode::Nearest), "one for all");
        says(Interpolate::to_size(&[], Mode::Nearest), "one for all");
        says(Interpolate::to_size(&[2], Mode::Linear), "[n, channels, length]");
        says(Interpolate::to_size(&[2], Mode::Nearest).with_align_corners(true), "aligned corners");
        let whole = x.to(DType::I64).unwrap();
        let refused =
            whole.interpolate(&Interpolate::to_size(&[2], Mode::Bilinear)).err().unwrap().to_string();
        assert!(refused.contains("interpolate: got dtype i64"), "{refused}");
        assert_eq!(
            whole.interpolate(&Interpolate::to_size(&[2], Mode::Nearest)).unwrap().to_vec::<i64>().unwrap(),
            [0, 2, 4, 6]
        );
    }
}
