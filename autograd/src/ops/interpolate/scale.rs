//! Which pixels make a pixel, and with which weights: PyTorch's rules.

use phalanx_tensor::Error;
use smallvec::smallvec;

use super::lines::{Line, Lines};
use super::{Interpolate, InterpolateMode, OP, Target, wrong};
use crate::Result;

/// The maps of the spatial dimensions.
pub(super) fn lines(shape: &[usize], options: &Interpolate) -> Result<Vec<Lines>> {
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
