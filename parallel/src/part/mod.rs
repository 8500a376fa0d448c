//! [`Part`]: what one rank has of a tensor that ranks share, wherever cuts run.
//!
//! ```text
//! place   where the elements lie in the whole tensor, and which of them another place has too
//! ```

mod place;

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::{Buffer, Error, Mismatch, Parameter, Parameters, Shard};
use phalanx_tensor::Tensor;

pub(crate) use place::{Overlap, Place, fill};

use crate::Result;

/// A part of a tensor of a model or an optimizer: a box of the whole, as tensor parallelism cuts it, and of that box a range,
/// as ZeRO cuts it. What counts is which elements of the whole it holds, in row-major order, so the whole's shape may be
/// seen as `[3, out, in]` here and as `[3 out, in]` there.
#[derive(Clone, Debug)]
pub struct Part {
    /// The tensor's name in the whole run, the same on all ranks.
    pub name: String,
    /// The box, and the whole's shape.
    pub shard: Shard,
    /// Elements of the box, in row-major order.
    pub range: Range<usize>,
    /// Their values, contiguous, in any shape: the model's own, not a copy.
    pub values: Tensor,
    /// Whether it is a buffer: passes change those, and ranks may differ in them.
    pub buffer: bool,
}

impl Part {
    /// A whole tensor.
    pub fn whole(name: impl Into<String>, values: Tensor) -> Part {
        let (shard, range) = (Shard::whole(values.shape()), 0..values.numel());
        Part { name: name.into(), shard, range, values, buffer: false }
    }

    /// What a parameter holds.
    pub fn of_parameter(parameter: &Parameter) -> Part {
        let (shard, values) = (parameter.part().clone(), parameter.tensor());
        Part { name: parameter.name().into(), shard, range: parameter.range(), values, buffer: false }
    }

    /// A module's buffer of that path.
    pub fn of_buffer(path: impl Into<String>, buffer: &Buffer) -> Part {
        Part { buffer: true, ..Part::whole(path, buffer.tensor()) }
    }

    /// All that a model holds: parameters by their names, each once, buffers by their paths.
    pub fn all_of(model: &(impl Parameters + ?Sized)) -> Vec<Part> {
        let mut parts: Vec<Part> = model.parameters().iter().map(Part::of_parameter).collect();
        model.visit("", &mut |path, entry| {
            if let phalanx_nn::Entry::Buffer(buffer) = entry {
                parts.push(Part::of_buffer(path, buffer));
            }
        });
        parts
    }

    /// Where its elements lie.
    ///
    /// # Errors
    /// If the box is not inside the whole, the range not inside the box, or the values are not as many or not contiguous.
    pub(crate) fn place(&self) -> Result<Place> {
        let Shard { window, extent } = &self.shard;
        let place = Place {
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

    /// Takes what other parts have of its elements, converted to its dtype; of two that have one, from the first.
    ///
    /// # Errors
    /// If a tensor cannot be copied or a part is not well-formed.
    fn take(&self, others: &[&Part]) -> Result<()> {
        let (place, own) = (self.place()?, self.values.with_shape(&[self.values.numel()])?);
        for other in others.iter().rev() {
            let values = other.values.with_shape(&[other.values.numel()])?;
            for Overlap { from, to, count } in other.place()?.overlaps(&place) {
                let run = values.narrow(0, from, count)?.to_device(own.device(), false)?;
                kernels::copy_(&mut own.narrow(0, to, count)?, &kernels::cast(&run, own.dtype())?)?;
            }
        }
        Ok(())
    }
}

/// Lets `own` parts take their values from those `given`, of any layout; converts dtypes.
///
/// # Errors
/// If parts of what is wanted are missing or of another size, or, where `all` that is given has to be wanted, names are not
/// known; then nothing is changed. Both begin with `what`.
pub(crate) fn load(what: &str, own: &[Part], given: &[Part], all: bool) -> Result<()> {
    let mut problems = Mismatch::default();
    let named = |name: &str| given.iter().filter(|part| part.name == name).collect::<Vec<_>>();
    for part in own {
        let (place, others) = (part.place()?, named(&part.name));
        let places = others.iter().map(|other| other.place()).collect::<Result<Vec<_>>>()?;
        if let Some(other) = places.iter().find(|other| other.whole() != place.whole()) {
            problems.misshaped.push((part.name.clone(), other.shape.clone(), place.shape));
        } else if !fill(place.elements(), places.iter().flat_map(|other| other.overlaps(&place))) {
            problems.missing.push(part.name.clone());
        }
    }
    let unknown = |name: &String| all && !own.iter().any(|part| part.name == *name);
    problems.unexpected = given.iter().map(|part| part.name.clone()).filter(unknown).collect();
    problems.unexpected.sort();
    problems.unexpected.dedup();
    problems.check(what)?;
    own.iter().try_for_each(|part| part.take(&named(&part.name)))
}
