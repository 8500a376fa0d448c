//! [`Place`]: where the elements of a part lie in the whole tensor. Pure.
//!
//! ```text
//! whole [4, 6]          box: rows 1..3, columns 2..5         range 1..6 of the box
//! .  .  .  .  .  .      runs in the whole's row-major order: 9..11 (elements 0..2 of the part)
//! .  .  0  1  2  .                                           14..17 (elements 2..5)
//! .  .  3  4  5  .      a box is a range in each dimension, so its runs ascend, and two places
//! .  .  .  .  .  .      are compared by going through the runs of both once
//! ```

use std::ops::Range;

use phalanx_tensor::Dims;
use serde::{Deserialize, Serialize};

/// A box of a whole tensor, and a range of its elements in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The whole's shape.
    pub(crate) shape: Vec<usize>,
    /// Where the box begins in it.
    pub(crate) offset: Vec<usize>,
    /// The box's shape.
    pub(crate) extent: Vec<usize>,
    /// Elements of the box.
    pub(crate) range: Range<usize>,
}

/// Elements that are neighbours in the whole, and in the place: from `own` on there, from `whole` on in the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) own: usize,
    pub(crate) whole: usize,
    pub(crate) count: usize,
}

/// Elements that two places have, neighbours in both: from `from` on in the one, from `to` on in the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) count: usize,
}

impl Place {
    /// Whether the box lies inside the whole and the range inside the box; no size overflows.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Place { shape, offset, extent, range } = self;
        let inside = |((&size, &offset), &extent): ((&usize, &usize), &usize)| {
            offset.checked_add(extent).is_some_and(|end| end <= size)
        };
        let ranks = shape.len() == offset.len() && shape.len() == extent.len();
        let sizes = shape.iter().filter(|&&n| n > 0).try_fold(1usize, |product, &n| product.checked_mul(n));
        let fits = ranks && sizes.is_some() && shape.iter().zip(offset).zip(extent).all(inside);
        if !fits || range.start > range.end || range.end > extent.iter().product() {
            return Err(format!(
                "got elements {range:?} of {extent:?} at {offset:?}, wanted some inside of {shape:?}"
            ));
        }
        Ok(())
    }

    /// How many elements it has.
    pub(crate) fn elements(&self) -> usize {
        self.range.len()
    }

    /// How many the whole has.
    pub(crate) fn whole(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its runs, ascending in the whole and in itself.
    pub(crate) fn runs(&self) -> Runs<'_> {
        // Behind the last dimension that is cut all is whole: that one and those are a run.
        let cut = (0..self.shape.len()).rev().find(|&dim| self.extent[dim] != self.shape[dim]);
        let outer = &self.extent[..cut.unwrap_or(0)];
        let length: usize = self.extent[outer.len()..].iter().product();
        let strides = phalanx_tensor::contiguous_strides(&self.shape);
        let corner = self.offset.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum();
        let numbers = match self.range.is_empty() {
            true => 0..0,
            false => self.range.start / length..(self.range.end - 1) / length + 1,
        };
        Runs { range: self.range.clone(), outer, length, strides, corner, numbers }
    }

    /// What it has of another place, of a whole with as many elements.
    pub(crate) fn overlaps(&self, to: &Place) -> Vec<Overlap> {
        let (mut sources, mut targets, mut found) = (self.runs(), to.runs(), Vec::new());
        // Most pieces of a tensor have little of one place, so what cannot overlap is skipped at once.
        let begin = |runs: &Runs<'_>| runs.clone().next().map_or(0, |run| run.whole);
        let (source, target) = (begin(&sources), begin(&targets));
        sources.skip_to(target);
        targets.skip_to(source);
        let (mut source, mut target) = (sources.next(), targets.next());
        while let (Some(from), Some(into)) = (source, target) {
            let (from_end, into_end) = (from.whole + from.count, into.whole + into.count);
            let (start, end) = (from.whole.max(into.whole), from_end.min(into_end));
            if start < end {
                let (from, to) = (from.own + start - from.whole, into.own + start - into.whole);
                found.push(Overlap { from, to, count: end - start });
            }
            if from_end <= into_end {
                source = sources.next();
            }
            if into_end <= from_end {
                target = targets.next();
            }
        }
        found
    }
}

/// The runs of a place.
#[derive(Clone)]
pub(crate) struct Runs<'a> {
    /// Of the place.
    range: Range<usize>,
    /// The box's sizes in the dimensions that runs are counted by, and the elements of a run that is not cut.
    outer: &'a [usize],
    length: usize,
    /// Of the whole, and where the box begins there.
    strides: Dims,
    corner: usize,
    /// Those that are left.
    numbers: Range<usize>,
}

impl Runs<'_> {
    fn at(&self, number: usize) -> Run {
        let (mut rest, mut whole) = (number, self.corner);
        for (size, stride) in self.outer.iter().zip(&self.strides).rev() {
            whole += rest % size * stride;
            rest /= size;
        }
        let first = number * self.length;
        let (start, end) = (first.max(self.range.start), (first + self.length).min(self.range.end));
        Run { own: start - self.range.start, whole: whole + start - first, count: end - start }
    }

    /// Leaves out the runs that end by an element of the whole.
    fn skip_to(&mut self, element: usize) {
        let mut end = self.numbers.end;
        while self.numbers.start < end {
            let middle = self.numbers.start + (end - self.numbers.start) / 2;
            let run = self.at(middle);
            match run.whole + run.count <= element {
                true => self.numbers.start = middle + 1,
                false => end = middle,
            }
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        self.numbers.next().map(|number| self.at(number))
    }
}

/// Whether these fill all of `elements`, even if some come twice.
pub(crate) fn fill(elements: usize, overlaps: impl IntoIterator<Item = Overlap>) -> bool {
    let mut ranges: Vec<Range<usize>> = overlaps.into_iter().map(|o| o.to..o.to + o.count).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let reach = |at: usize, range: Range<usize>| if range.start <= at { at.max(range.end) } else { at };
    ranges.into_iter().fold(0, reach) >= elements
}

#[cfg(test)]
mod tests;
