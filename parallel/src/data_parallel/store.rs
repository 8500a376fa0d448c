//! [`Store`]: the buckets' buffers, and each gradient's view of one.

use std::sync::Mutex;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::Leaf;
use phalanx_tensor::{Category, DType, Device, Dims, Tensor};

use super::hook::{Bucket, Rest};
use super::{Buckets, GradSize};
use crate::Result;
use crate::engine::{Engine, Resource};

pub(super) struct Store {
    pub(super) buckets: Buckets,
    /// What the engine orders a bucket's work by.
    pub(super) slots: Vec<Resource<Slot>>,
    /// Each gradient's part of a buffer, in its shape.
    pub(super) views: Vec<Tensor>,
}

/// A bucket.
pub(super) struct Slot {
    pub(super) index: usize,
    /// The gradients of its parameters, one after the other.
    pub(super) gradients: Tensor,
    parameters: Vec<usize>,
    shapes: Vec<Dims>,
    /// What is left of it once it was started.
    pub(super) rest: Mutex<Option<Rest>>,
}

impl Slot {
    pub(super) fn bucket(&self) -> Bucket<'_> {
        let Slot { index, gradients, parameters, shapes, .. } = self;
        Bucket { index: *index, gradients, parameters, shapes }
    }
}

impl Store {
    /// Buffers of zeros.
    pub(super) fn new(
        buckets: Buckets,
        sizes: &[GradSize],
        leaves: &[(Parameter, Leaf)],
        engine: &Engine,
    ) -> Result<Store> {
        let mut views = vec![None; sizes.len()];
        let mut slots = Vec::new();
        for (index, members) in buckets.members().iter().enumerate() {
            let total = members.iter().map(|&number| sizes[number].elements).sum();
            let (dtype, device): (DType, Device) = members
                .first()
                .map_or((DType::F32, Device::CPU), |&number| (sizes[number].dtype, sizes[number].device));
            // As `Leaf::zero_grad`.
            let gradients = kernels::full(&[total], -0.0, dtype, device)?.tagged(Category::Gradients);
            let shape = |&number: &usize| Dims::from_slice(leaves[number].0.tensor().shape());
            let shapes = members.iter().map(shape).collect();
            let slot = Slot { index, gradients, parameters: members.clone(), shapes, rest: Mutex::new(None) };
            for (&number, view) in members.iter().zip(slot.bucket().views()?) {
                views[number] = Some(view);
            }
            slots.push(engine.resource(slot));
        }
        Ok(Store { buckets, slots, views: views.into_iter().flatten().collect() })
    }
}
