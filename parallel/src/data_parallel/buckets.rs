//! [`Buckets`]: which parameters' gradients share a buffer. [`BucketTracker`]: when each bucket may start. [`BucketStore`]: the
//! buffers.
//!
//! Backward completes gradients from the last layer to the first, so buckets are filled in reverse order of registration; the
//! first one is small, so that communication begins early. Every rank starts buckets in the order of their numbers, whatever
//! the order in which they fill, since collectives must come in one order. Source: Li et al., "PyTorch Distributed" (VLDB
//! 2020), section 3.2.

use std::collections::HashMap;
use std::sync::Mutex;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::Leaf;
use phalanx_tensor::{Category, DType, Device, Dims, Tensor};

use super::hook::{Bucket, PendingBucket};
use crate::Result;
use crate::engine::{Engine, Resource};

/// The size, dtype and device of a parameter's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradSize {
    /// Elements.
    pub elements: usize,
    /// The gradient's dtype.
    pub dtype: DType,
    /// Where it lives.
    pub device: Device,
}

/// Parameters, by number, whose gradients lie in one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets(Vec<Vec<usize>>);

impl Buckets {
    /// The first bucket's size in bytes.
    pub const FIRST_BYTES: usize = 1 << 20;
    /// The size in bytes of every later bucket.
    pub const BYTES: usize = 25 << 20;

    /// Fills buckets in the order given; gradients of different dtypes or devices go to different buckets. The gradient that
    /// fills a bucket closes it. Buckets are numbered in the order in which they close; those that are never full come last,
    /// in the order of their first gradients.
    pub fn fill(order: &[usize], sizes: &[GradSize], first: usize, later: usize) -> Buckets {
        let mut closed: Vec<Vec<usize>> = Vec::new();
        let mut open: Vec<(Vec<usize>, usize)> = Vec::new();
        let mut place: HashMap<(DType, Device), usize> = HashMap::new();
        for &number in order {
            let GradSize { elements, dtype, device } = sizes[number];
            let at = *place.entry((dtype, device)).or_insert_with(|| {
                open.push((Vec::new(), 0));
                open.len() - 1
            });
            let (members, bytes) = &mut open[at];
            members.push(number);
            *bytes += elements * dtype.size();
            if *bytes >= if closed.is_empty() { first } else { later } {
                closed.push(std::mem::take(members));
                *bytes = 0;
            }
        }
        let mut rest: Vec<Vec<usize>> = open.into_iter().map(|o| o.0).filter(|m| !m.is_empty()).collect();
        rest.sort_by_key(|members| order.iter().position(|number| *number == members[0]));
        closed.extend(rest);
        Buckets(closed)
    }

    /// The buckets of a model before anything is known of the order in which gradients arrive.
    pub fn of_registration(sizes: &[GradSize]) -> Buckets {
        let order: Vec<usize> = (0..sizes.len()).rev().collect();
        Buckets::fill(&order, sizes, Buckets::FIRST_BYTES, Buckets::BYTES)
    }

    /// The members of each bucket.
    pub fn members(&self) -> &[Vec<usize>] {
        &self.0
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Counts arrived gradients, and returns the buckets that may start.
#[derive(Clone, Debug)]
pub struct BucketTracker {
    /// The bucket of each parameter.
    bucket: Vec<usize>,
    /// Gradients that each bucket waits for.
    missing: Vec<usize>,
    ready: Vec<bool>,
    next: usize,
    arrivals: Vec<usize>,
}

impl BucketTracker {
    /// For one backward pass.
    pub fn new(buckets: &Buckets) -> BucketTracker {
        let parameters = buckets.members().iter().map(Vec::len).sum();
        let mut bucket = vec![0; parameters];
        for (b, members) in buckets.members().iter().enumerate() {
            members.iter().for_each(|&number| bucket[number] = b);
        }
        let missing = buckets.members().iter().map(Vec::len).collect();
        BucketTracker { bucket, missing, ready: vec![false; parameters], next: 0, arrivals: Vec::new() }
    }

    /// Notes that a parameter's gradient is complete (a second time changes nothing), and returns the buckets to
    /// launch now: those next in order that are full.
    pub fn arrive(&mut self, parameter: usize) -> std::ops::Range<usize> {
        if !std::mem::replace(&mut self.ready[parameter], true) {
            self.arrivals.push(parameter);
            self.missing[self.bucket[parameter]] -= 1;
        }
        let first = self.next;
        while self.missing.get(self.next) == Some(&0) {
            self.next += 1;
        }
        first..self.next
    }

    /// Parameters whose gradients have not arrived.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.ready.len()).filter(|&parameter| !self.ready[parameter]).collect()
    }

    /// Parameters in the order of their gradients' arrival.
    pub fn arrivals(&self) -> &[usize] {
        &self.arrivals
    }
}

/// The buffers of all buckets, and each gradient's view of one.
pub(super) struct BucketStore {
    pub(super) buckets: Buckets,
    /// The buffers, each with the variable by which the engine orders its bucket's work.
    pub(super) buffers: Vec<Resource<BucketBuffer>>,
    /// Each gradient's part of a buffer, in its shape.
    pub(super) views: Vec<Tensor>,
}

/// A bucket's buffer, and what a hook has to know of it.
pub(super) struct BucketBuffer {
    pub(super) index: usize,
    /// The gradients of its parameters, one after the other.
    pub(super) gradients: Tensor,
    parameters: Vec<usize>,
    shapes: Vec<Dims>,
    /// The hook's collective, after the bucket was started and until it is waited for.
    pub(super) pending: Mutex<Option<PendingBucket>>,
}

impl BucketBuffer {
    /// A buffer of zeros for the gradients of `parameters`.
    fn new(
        index: usize,
        parameters: &[usize],
        sizes: &[GradSize],
        leaves: &[(Parameter, Leaf)],
    ) -> Result<BucketBuffer> {
        let total = parameters.iter().map(|&number| sizes[number].elements).sum();
        let first = parameters.first().map(|&number| sizes[number]);
        let (dtype, device) = first.map_or((DType::F32, Device::CPU), |size| (size.dtype, size.device));
        // As `Leaf::zero_grad`.
        let gradients = kernels::full(&[total], -0.0, dtype, device)?.tagged(Category::Gradients);
        let shape = |&number: &usize| Dims::from_slice(leaves[number].0.tensor().shape());
        let shapes = parameters.iter().map(shape).collect();
        let parameters = parameters.to_vec();
        Ok(BucketBuffer { index, gradients, parameters, shapes, pending: Mutex::new(None) })
    }

    /// The bucket, whose gradients were divided by `divisor`, if they were.
    pub(super) fn bucket(&self, divisor: Option<f64>) -> Bucket<'_> {
        let BucketBuffer { index, gradients, parameters, shapes, .. } = self;
        Bucket { index: *index, gradients, parameters, shapes, divisor }
    }
}

impl BucketStore {
    /// Buffers of zeros.
    pub(super) fn new(
        buckets: Buckets,
        sizes: &[GradSize],
        leaves: &[(Parameter, Leaf)],
        engine: &Engine,
    ) -> Result<BucketStore> {
        let mut views = vec![None; sizes.len()];
        let mut buffers = Vec::new();
        for (index, members) in buckets.members().iter().enumerate() {
            let buffer = BucketBuffer::new(index, members, sizes, leaves)?;
            for (&number, view) in members.iter().zip(buffer.bucket(None).views()?) {
                views[number] = Some(view);
            }
            buffers.push(engine.resource(buffer));
        }
        Ok(BucketStore { buckets, buffers, views: views.into_iter().flatten().collect() })
    }

    /// Moves the gradients into other buckets, one bucket after the other, and frees a buffer when all its gradients have moved, so
    /// that all are never here twice. `moved` is called with each gradient's number and new place. After an error no buffers are left.
    pub(super) fn rebuild(
        &mut self,
        buckets: Buckets,
        sizes: &[GradSize],
        leaves: &[(Parameter, Leaf)],
        engine: &Engine,
        moved: impl Fn(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut old: Vec<_> = std::mem::take(&mut self.buffers).into_iter().map(Some).collect();
        let mut left: Vec<usize> = self.buckets.members().iter().map(Vec::len).collect();
        let before = BucketTracker::new(&self.buckets).bucket;
        let mut buffers = Vec::new();
        for (index, members) in buckets.members().iter().enumerate() {
            let buffer = BucketBuffer::new(index, members, sizes, leaves)?;
            for (&number, mut view) in members.iter().zip(buffer.bucket(None).views()?) {
                kernels::copy_(&mut view, &self.views[number])?;
                moved(number, &view)?;
                self.views[number] = view;
                left[before[number]] -= 1;
                if left[before[number]] == 0 {
                    old[before[number]] = None;
                }
            }
            buffers.push(engine.resource(buffer));
        }
        (self.buckets, self.buffers) = (buckets, buffers);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(elements: &[usize]) -> Vec<GradSize> {
        let size = |&elements| GradSize { elements, dtype: DType::F32, device: Device::CPU };
        elements.iter().map(size).collect()
    }

    #[test]
    fn the_first_bucket_is_small_and_a_gradient_that_fills_one_closes_it() {
        let sizes = sizes(&[10, 10, 10, 10, 10]);
        let buckets = Buckets::fill(&[4, 3, 2, 1, 0], &sizes, 40, 80);
        assert_eq!(buckets.members(), [vec![4], vec![3, 2], vec![1, 0]]);
        let buckets = Buckets::fill(&[4, 3, 2, 1, 0], &sizes, 50, 90);
        assert_eq!(buckets.members(), [vec![4, 3], vec![2, 1, 0]]);
        assert_eq!(Buckets::of_registration(&sizes).members(), [vec![4, 3, 2, 1, 0]]);
        assert!(Buckets::of_registration(&[]).is_empty());
    }

    #[test]
    fn dtypes_do_not_mix() {
        let mut sizes = sizes(&[10, 10, 10, 10]);
        sizes[1].dtype = DType::BF16;
        sizes[3].dtype = DType::BF16;
        let buckets = Buckets::fill(&[3, 2, 1, 0], &sizes, 1 << 20, 1 << 20);
        assert_eq!(buckets.members(), [vec![3, 1], vec![2, 0]]);
    }

    #[test]
    fn buckets_go_in_order_whatever_the_order_of_arrival() {
        let buckets = Buckets::fill(&[3, 2, 1, 0], &sizes(&[10; 4]), 40, 80);
        assert_eq!(buckets.members(), [vec![3], vec![2, 1], vec![0]]);
        let mut launcher = BucketTracker::new(&buckets);
        assert_eq!(launcher.arrive(0), 0..0);
        assert_eq!(launcher.arrive(2), 0..0);
        assert_eq!(launcher.missing(), [1, 3]);
        assert_eq!(launcher.arrive(3), 0..1);
        assert_eq!(launcher.arrive(3), 1..1);
        assert_eq!(launcher.arrive(1), 1..3);
        assert_eq!(launcher.arrivals(), [0, 2, 3, 1]);
    }
}
