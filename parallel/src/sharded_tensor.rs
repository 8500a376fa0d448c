//! [`ShardedTensor`]: one rank's elements of a tensor, under any layout; `BoxRange`: which elements of the whole tensor
//! these are.
//!
//! ```text
//! whole [4, 6]          box: rows 1..3, columns 2..5         range 1..6 of the box
//! .  .  .  .  .  .      segments in the whole's row-major order: 9..11 (elements 0..2 of the part)
//! .  .  0  1  2  .                                               14..17 (elements 2..5)
//! .  .  3  4  5  .      a box is a range in each dimension, so its segments ascend, and two parts are compared
//! .  .  .  .  .  .      by one pass over the segments of both
//! ```

use std::collections::HashMap;
use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Int8Blocks;
use phalanx_nn::{Buffer, Error, Mismatch, Parameter, Parameters, Shard, is_whole_state};
use phalanx_tensor::{Dims, Tensor};
use serde::{Deserialize, Serialize};

use crate::Result;

/// A part of a tensor of a model or an optimizer (Megatron-Core: `ShardedTensor`): a box of the whole tensor (the split of tensor
/// parallelism), and a range of that box (the split of ZeRO). Parts are compared by the elements of the whole that they hold, in
/// row-major order. So one part may see the whole as `[3, out, in]` and another as `[3 out, in]`.
#[derive(Clone, Debug)]
pub struct ShardedTensor {
    /// The tensor's name in the whole run, the same on all ranks.
    pub name: String,
    /// The box, and the shape of the whole tensor.
    pub shard: Shard,
    /// Elements of the box, in row-major order.
    pub range: Range<usize>,
    /// The values of these elements, contiguous, in any shape. It is the model's tensor, not a copy.
    pub values: Tensor,
    /// Whether it is a buffer. Forward passes change buffers, and ranks may have different values.
    pub buffer: bool,
}

impl ShardedTensor {
    /// A whole tensor.
    pub fn whole(name: impl Into<String>, values: Tensor) -> ShardedTensor {
        let (shard, range) = (Shard::whole(values.shape()), 0..values.numel());
        ShardedTensor { name: name.into(), shard, range, values, buffer: false }
    }

    /// The part of a parameter that this rank holds.
    pub fn of_parameter(parameter: &Parameter) -> ShardedTensor {
        let (shard, values) = (parameter.part().clone(), parameter.tensor());
        ShardedTensor {
            name: parameter.name().into(),
            shard,
            range: parameter.range(),
            values,
            buffer: false,
        }
    }

    /// [`ShardedTensor::of_parameter`] with floats of a parameter that is held in 8-bit blocks.
    ///
    /// # Errors
    /// If memory is short.
    pub fn with_values(parameter: &Parameter) -> Result<ShardedTensor> {
        Ok(ShardedTensor { values: parameter.values()?, ..ShardedTensor::of_parameter(parameter) })
    }

    /// What holds a parameter's values: the part that this rank has of it, or of the codes and scales of its 8-bit blocks, as
    /// [`ShardedTensor::of_int8_blocks`].
    ///
    /// # Errors
    /// As [`ShardedTensor::of_int8_blocks`].
    pub fn held_in(parameter: &Parameter) -> Result<Vec<ShardedTensor>> {
        match parameter.int8_blocks() {
            Some(blocks) => ShardedTensor::of_int8_blocks(parameter.name(), parameter.part(), &blocks),
            None => Ok(vec![ShardedTensor::of_parameter(parameter)]),
        }
    }

    /// What comes behind the name of a matrix in the names of its 8-bit blocks.
    pub(crate) const INT8_BLOCKS: [&str; 2] = ["codes", "scales"];

    /// The codes and the scales of a matrix `name` in 8-bit blocks, of which this rank has the part `shard`: `name.codes`, whose rows have
    /// whole blocks, and `name.scales`.
    ///
    /// # Errors
    /// If the blocks are not those of the part.
    pub fn of_int8_blocks(name: &str, shard: &Shard, blocks: &Int8Blocks) -> Result<Vec<ShardedTensor>> {
        let part = |((kind, values), each): ((&str, &Tensor), usize)| {
            let mut shard = shard.clone();
            let in_units = |columns: usize| columns.div_ceil(Int8Blocks::BLOCK) * each;
            for shape in [&mut shard.window.global, &mut shard.window.offset, &mut shard.extent] {
                shape.iter_mut().next_back().into_iter().for_each(|columns| *columns = in_units(*columns));
            }
            let (range, name) = (0..values.numel(), format!("{name}.{kind}"));
            let part = ShardedTensor { name, shard, range, values: values.clone(), buffer: false };
            part.place().map(|_| part)
        };
        let kinds = Self::INT8_BLOCKS.into_iter().zip(blocks.tensors());
        kinds.zip([Int8Blocks::BLOCK, 1]).map(part).collect()
    }

    /// A buffer, by its path in the module.
    pub fn of_buffer(path: impl Into<String>, buffer: &Buffer) -> ShardedTensor {
        ShardedTensor { buffer: true, ..ShardedTensor::whole(path, buffer.tensor()) }
    }

    /// [`ShardedTensor::all_of`] with floats of parameters that are held in 8-bit blocks.
    ///
    /// # Errors
    /// If memory is short.
    pub(crate) fn all_values_of(model: &(impl Parameters + ?Sized)) -> Result<Vec<ShardedTensor>> {
        let (mut parts, parameters) = (ShardedTensor::all_of(model), model.parameters());
        for (part, parameter) in parts.iter_mut().zip(&parameters) {
            part.values = parameter.values()?;
        }
        Ok(parts)
    }

    /// All parameters of a model by their names, each once, and all buffers by their paths.
    pub fn all_of(model: &(impl Parameters + ?Sized)) -> Vec<ShardedTensor> {
        let mut parts: Vec<ShardedTensor> =
            model.parameters().iter().map(ShardedTensor::of_parameter).collect();
        model.visit("", &mut |path, entry| {
            if let phalanx_nn::Entry::Buffer(buffer) = entry {
                parts.push(ShardedTensor::of_buffer(path, buffer));
            }
        });
        parts
    }

    /// The state of an optimizer of these parameters, of which this rank has parts: its [`Optimizer::state_dict`], with each tensor's
    /// name there.
    ///
    /// [`Optimizer::state_dict`]: phalanx_nn::Optimizer::state_dict
    pub fn of_optimizer_state(parameters: &[Parameter], entries: &[(String, Tensor)]) -> Vec<ShardedTensor> {
        let by_name: HashMap<&str, &Parameter> = parameters.iter().map(|p| (p.name(), p)).collect();
        let part = |(name, values): &(String, Tensor)| {
            let parameter = name.rsplit_once('.').and_then(|(of, kind)| {
                // State of the whole parameter is whole on every rank.
                by_name.get(of).filter(|_| !is_whole_state(kind) && kind != "step")
            });
            let (name, values) = (name.clone(), values.clone());
            match parameter {
                Some(p) => ShardedTensor { name, values, ..ShardedTensor::of_parameter(p) },
                None => ShardedTensor::whole(name, values),
            }
        };
        entries.iter().map(part).collect()
    }

    /// Which elements of the whole tensor it holds.
    ///
    /// # Errors
    /// If the box is not inside the whole, the range is not inside the box, or the values have another number of elements or are
    /// not contiguous.
    pub(crate) fn place(&self) -> Result<BoxRange> {
        let Shard { window, extent } = &self.shard;
        let place = BoxRange {
            shape: window.global.to_vec(),
            offset: window.offset.to_vec(),
            extent: extent.to_vec(),
            range: self.range.clone(),
        };
        let wrong = |why: String| Error::invalid(format!("part of {}", self.name), why);
        place.check().map_err(wrong)?;
        if self.values.numel() != self.range.len() || !self.values.is_contiguous() {
            let (shape, strides) = (self.values.shape(), self.values.strides());
            let why = format!("got values of shape {shape:?}, strides {strides:?}");
            return Err(wrong(format!("{why}, wanted {} contiguous elements", self.range.len())).into());
        }
        Ok(place)
    }

    /// Copies its elements from other parts, converted to its dtype. If two parts have an element, the first one counts.
    ///
    /// # Errors
    /// If a tensor cannot be copied or a part is not well-formed.
    fn copy_from_parts(&self, others: &[&ShardedTensor]) -> Result<()> {
        let (place, own) = (self.place()?, self.values.with_shape(&[self.values.numel()])?);
        for other in others.iter().rev() {
            let values = other.values.with_shape(&[other.values.numel()])?;
            for Overlap { from, to, count } in other.place()?.overlaps(&place) {
                let segment = values.narrow(0, from, count)?.to_device(own.device(), false)?;
                kernels::copy_(&mut own.narrow(0, to, count)?, &kernels::cast(&segment, own.dtype())?)?;
            }
        }
        Ok(())
    }
}

/// Copies the values of `own` parts from the `given` parts of any layout, and converts dtypes.
///
/// # Errors
/// If elements are missing or a whole tensor has another size, or, with `all`, if a given name is not among the own parts. Then
/// nothing is changed. The message begins with `what`.
pub(crate) fn load(what: &str, own: &[ShardedTensor], given: &[ShardedTensor], all: bool) -> Result<()> {
    let mut problems = Mismatch::default();
    let named = |name: &str| given.iter().filter(|part| part.name == name).collect::<Vec<_>>();
    for part in own {
        let (place, others) = (part.place()?, named(&part.name));
        let places = others.iter().map(|other| other.place()).collect::<Result<Vec<_>>>()?;
        if let Some(other) = places.iter().find(|other| other.whole() != place.whole()) {
            problems.misshaped.push((part.name.clone(), other.shape.clone(), place.shape));
        } else if !covers(place.elements(), places.iter().flat_map(|other| other.overlaps(&place))) {
            problems.missing.push(part.name.clone());
        }
    }
    let unknown = |name: &String| all && !own.iter().any(|part| part.name == *name);
    problems.unexpected = given.iter().map(|part| part.name.clone()).filter(unknown).collect();
    problems.unexpected.sort();
    problems.unexpected.dedup();
    problems.check(what)?;
    own.iter().try_for_each(|part| part.copy_from_parts(&named(&part.name)))
}

/// A box of a whole tensor, and a range of its elements in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct BoxRange {
    /// The whole's shape.
    pub(crate) shape: Vec<usize>,
    /// Where the box begins in it.
    pub(crate) offset: Vec<usize>,
    /// The box's shape.
    pub(crate) extent: Vec<usize>,
    /// Elements of the box.
    pub(crate) range: Range<usize>,
}

/// Contiguous elements: from `own` on in the part, and from `whole` on in the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) own: usize,
    pub(crate) whole: usize,
    pub(crate) count: usize,
}

/// Elements that two parts share, contiguous in both: from `from` on in the one, from `to` on in the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) count: usize,
}

impl BoxRange {
    /// Whether the box lies inside the whole and the range inside the box; no size overflows.
    pub(crate) fn check(&self) -> Result<(), String> {
        let BoxRange { shape, offset, extent, range } = self;
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

    /// The number of its elements.
    pub(crate) fn elements(&self) -> usize {
        self.range.len()
    }

    /// The number of elements of the whole tensor.
    pub(crate) fn whole(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its contiguous segments, ascending in the whole tensor and in the part.
    pub(crate) fn segments(&self) -> Segments<'_> {
        // The dimensions after the last one that is split are whole. So a range of that one is contiguous.
        let cut = (0..self.shape.len()).rev().find(|&dim| self.extent[dim] != self.shape[dim]);
        let outer = &self.extent[..cut.unwrap_or(0)];
        let length: usize = self.extent[outer.len()..].iter().product();
        let strides = phalanx_tensor::contiguous_strides(&self.shape);
        let corner = self.offset.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum();
        let numbers = match self.range.is_empty() {
            true => 0..0,
            false => self.range.start / length..(self.range.end - 1) / length + 1,
        };
        Segments { range: self.range.clone(), outer, length, strides, corner, numbers }
    }

    /// The elements that it shares with another part, of a whole tensor with as many elements.
    pub(crate) fn overlaps(&self, to: &BoxRange) -> Vec<Overlap> {
        let (mut sources, mut targets, mut found) = (self.segments(), to.segments(), Vec::new());
        // Most pairs of parts share few elements, so segments that cannot overlap are skipped at once.
        let begin = |segments: &Segments<'_>| segments.clone().next().map_or(0, |segment| segment.whole);
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

/// The segments of a box range.
#[derive(Clone)]
pub(crate) struct Segments<'a> {
    /// The range of the box.
    range: Range<usize>,
    /// The box's sizes in the dimensions that segments are counted by, and the elements of a segment that the range does not cut.
    outer: &'a [usize],
    length: usize,
    /// The strides of the whole tensor, and the box's first element in it.
    strides: Dims,
    corner: usize,
    /// The numbers of the segments that are left.
    numbers: Range<usize>,
}

impl Segments<'_> {
    fn at(&self, number: usize) -> Segment {
        let (mut rest, mut whole) = (number, self.corner);
        for (size, stride) in self.outer.iter().zip(&self.strides).rev() {
            whole += rest % size * stride;
            rest /= size;
        }
        let first = number * self.length;
        let (start, end) = (first.max(self.range.start), (first + self.length).min(self.range.end));
        Segment { own: start - self.range.start, whole: whole + start - first, count: end - start }
    }

    /// Skips the segments that end before an element of the whole tensor.
    fn skip_to(&mut self, element: usize) {
        let mut end = self.numbers.end;
        while self.numbers.start < end {
            let middle = self.numbers.start + (end - self.numbers.start) / 2;
            let segment = self.at(middle);
            match segment.whole + segment.count <= element {
                true => self.numbers.start = middle + 1,
                false => end = middle,
            }
        }
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        self.numbers.next().map(|number| self.at(number))
    }
}

/// Whether the overlaps cover all of `elements`; some elements may be covered twice.
pub(crate) fn covers(elements: usize, overlaps: impl IntoIterator<Item = Overlap>) -> bool {
    let mut ranges: Vec<Range<usize>> = overlaps.into_iter().map(|o| o.to..o.to + o.count).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let reach = |at: usize, range: Range<usize>| if range.start <= at { at.max(range.end) } else { at };
    ranges.into_iter().fold(0, reach) >= elements
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(shape: &[usize], offset: &[usize], extent: &[usize], range: std::ops::Range<usize>) -> BoxRange {
        let place = BoxRange { shape: shape.into(), offset: offset.into(), extent: extent.into(), range };
        place.check().unwrap();
        place
    }

    #[test]
    fn runs_are_as_long_as_the_cut_allows() {
        let table = [
            (place(&[4, 6], &[1, 2], &[2, 3], 1..6), vec![(0, 9, 2), (2, 14, 3)]),
            (place(&[4, 6], &[1, 0], &[2, 6], 0..12), vec![(0, 6, 12)]),
            (place(&[4, 6], &[1, 0], &[2, 6], 5..8), vec![(0, 11, 3)]),
            (place(&[4, 6], &[0, 3], &[4, 3], 0..12), vec![(0, 3, 3), (3, 9, 3), (6, 15, 3), (9, 21, 3)]),
            (place(&[3, 4, 2], &[0, 2, 0], &[3, 2, 2], 0..12), vec![(0, 4, 4), (4, 12, 4), (8, 20, 4)]),
            (place(&[3, 4, 2], &[0, 2, 0], &[3, 2, 2], 4..9), vec![(0, 12, 4), (4, 20, 1)]),
            (place(&[], &[], &[], 0..1), vec![(0, 0, 1)]),
            (place(&[5], &[2], &[3], 3..3), vec![]),
            (place(&[0, 7], &[0, 0], &[0, 7], 0..0), vec![]),
            (place(&[2, 3], &[1, 3], &[1, 0], 0..0), vec![]),
        ];
        for (place, wanted) in table {
            let wanted: Vec<Segment> =
                wanted.into_iter().map(|(own, whole, count)| Segment { own, whole, count }).collect();
            assert_eq!(place.segments().collect::<Vec<_>>(), wanted, "{place:?}");
        }
    }

    #[test]
    fn overlaps_are_what_both_have() {
        let halves = [place(&[4, 6], &[0, 0], &[4, 3], 0..12), place(&[4, 6], &[0, 3], &[4, 3], 0..12)];
        let third = place(&[4, 6], &[0, 2], &[4, 2], 0..8);
        let overlaps = |from: &BoxRange, to: &BoxRange| -> Vec<(usize, usize, usize)> {
            from.overlaps(to).into_iter().map(|Overlap { from, to, count }| (from, to, count)).collect()
        };
        assert_eq!(overlaps(&halves[0], &third), [(2, 0, 1), (5, 2, 1), (8, 4, 1), (11, 6, 1)]);
        assert_eq!(overlaps(&halves[1], &third), [(0, 1, 1), (3, 3, 1), (6, 5, 1), (9, 7, 1)]);
        assert_eq!(overlaps(&halves[0], &halves[1]), []);
        // The joint map, of which tensor parallelism takes a part of each of its three.
        let joint = place(&[3, 4, 2], &[0, 2, 0], &[3, 2, 2], 0..12);
        let rows = place(&[12, 2], &[5, 0], &[6, 2], 0..12);
        assert_eq!(overlaps(&joint, &rows), [(4, 2, 4), (8, 10, 2)]);
    }

    #[test]
    fn filled_is_what_has_no_gap() {
        let overlap = |to, count| Overlap { from: 0, to, count };
        assert!(covers(5, [overlap(3, 2), overlap(0, 2), overlap(1, 2)]));
        assert!(!covers(5, [overlap(3, 2), overlap(0, 2)]));
        assert!(!covers(5, [overlap(0, 4)]));
        assert!(covers(0, []) && !covers(1, []));
    }

    #[test]
    fn what_is_not_inside_is_refused() {
        for (shape, offset, extent, range) in [
            (vec![4], vec![2], vec![3], 0..3),
            (vec![4], vec![2], vec![2], 0..3),
            (vec![4], vec![0, 0], vec![2], 0..1),
            (vec![4], vec![usize::MAX], vec![2], 0..2),
            (vec![usize::MAX, 2], vec![0, 0], vec![1, 1], 0..1),
            (vec![4], vec![0], vec![4], std::ops::Range { start: 3, end: 2 }),
        ] {
            let refused = BoxRange { shape, offset, extent, range }.check().err().unwrap().to_string();
            assert!(refused.contains("wanted some inside of ["), "{refused}");
        }
    }

    /// The numbers of a place's elements in the whole.
    fn numbers(place: &BoxRange) -> Vec<usize> {
        let mut all = vec![0];
        for ((&size, &offset), &extent) in place.shape.iter().zip(&place.offset).zip(&place.extent) {
            all = all.iter().flat_map(|&n| (offset..offset + extent).map(move |i| n * size + i)).collect();
        }
        all[place.range.clone()].to_vec()
    }

    /// A place in a whole of that shape.
    fn places(shape: Vec<usize>) -> impl Strategy<Value = BoxRange> {
        let cuts: Vec<_> = shape.iter().map(|&n| (0..=n, 0..=n)).collect();
        (cuts, any::<(u16, u16)>()).prop_map(move |(cuts, (a, b))| {
            let (offset, extent): (Vec<usize>, Vec<usize>) =
                cuts.into_iter().map(|(a, b)| (a.min(b), a.abs_diff(b))).unzip();
            let all = extent.iter().product::<usize>();
            let (a, b) = (usize::from(a) % (all + 1), usize::from(b) % (all + 1));
            BoxRange { shape: shape.clone(), offset, extent, range: a.min(b)..a.max(b) }
        })
    }

    /// Two places, in a whole that one of them may see with its first dimensions joined.
    fn pairs() -> impl Strategy<Value = (BoxRange, BoxRange)> {
        (prop::collection::vec(1usize..6, 0..4), any::<bool>()).prop_flat_map(|(shape, join)| {
            let other = match (join, &shape[..]) {
                (true, [a, b, rest @ ..]) => [&[a * b], rest].concat(),
                _ => shape.clone(),
            };
            (places(shape), places(other))
        })
    }

    proptest! {
        #[test]
        fn overlaps_are_exactly_the_elements_that_both_have((from, to) in pairs()) {
            from.check().unwrap();
            let (sources, targets) = (numbers(&from), numbers(&to));
            let mut got = Vec::new();
            for Overlap { from, to, count } in from.overlaps(&to) {
                got.extend((0..count).map(|i| (from + i, to + i)));
            }
            let place = |number: &usize| targets.binary_search(number).ok();
            let wanted: Vec<_> = sources.iter().enumerate().filter_map(|(i, n)| Some((i, place(n)?))).collect();
            prop_assert_eq!(&got, &wanted);
            let all = wanted.len() == targets.len();
            prop_assert_eq!(covers(targets.len(), from.overlaps(&to)), all);
        }
    }
}
