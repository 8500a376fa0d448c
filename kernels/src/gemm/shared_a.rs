//! Products of one A by several Bs in panels, as a prompt's rows by the weights of queries, keys and values: A is packed once, and threads wait for
//! each other once.

#![allow(unsafe_code)]

use phalanx_tensor::Pool;

use super::element::GemmElem;
use super::epilogue::{Epilogue, Write};
use super::mat::{MatMut, MatRef, SharedMut};
use super::plan::{BlockingPlan, Problem};
use super::product::{Batch, Product, run_by_panel};
use super::tile::TileShape;
use crate::simd::Runner;

/// One of several products of one A: B, C and the bias.
pub(crate) type OfSharedA<'a, T> = (MatRef<'a, T>, MatMut<'a, T>, Option<&'a [T]>);

/// [`super::gemm_each`] on a given instruction set.
pub(super) fn run_each<T: GemmElem>(
    runner: Runner,
    pool: Option<&Pool>,
    a: MatRef<'_, T>,
    items: &mut [OfSharedA<'_, T>],
) {
    let mut products = Vec::with_capacity(items.len());
    for (b, c, bias) in items {
        let epilogue = Epilogue { bias: *bias, activation: None };
        Batch { count: 1, a: 0, b: 0, c: 0 }.check(&a, b, c, &epilogue);
        assert!(b.is_in_panels(), "products of one A by panels");
        let (b, c_strides, c) = (*b, c.strides(), SharedMut::new(c.data()));
        products.push(Product { runner, a, b, c, c_start: 0, c_strides, write: Write::Store, epilogue });
    }
    if a.rows() == 0 || products.is_empty() {
        return;
    }
    // SAFETY: the bounds that each C was made with; all are borrowed for us alone.
    unsafe {
        match plan_of_all(&products) {
            Some(plan) => run_by_panel(&products.iter().collect::<Vec<_>>(), &plan, pool),
            None => products.iter().for_each(|product| product.run(pool, None)),
        }
    }
}

/// The plan of products of one A, as if their columns were one product's; `None` if A is not to be packed once for all of them.
fn plan_of_all<T: GemmElem>(products: &[Product<'_, T>]) -> Option<BlockingPlan> {
    let first = &products[0];
    if products.len() == 1 || first.is_thin() || first.has_tiles() {
        return None;
    }
    let n = products.iter().map(|product| product.b.cols()).sum();
    let problem = Problem { n, ..first.problem() };
    let plan = BlockingPlan::new(problem, TileShape::of::<T::Acc>(first.runner)).for_all_rows();
    (plan.by_panel && plan.shares_packed_a(products.len())).then_some(plan)
}
