//! The conjugate functions: what every rank gets forward, and what comes back.

use phalanx_nn::autograd::{Options, Result, Var, grad};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::launch;
use phalanx_parallel::tensor_parallel::{
    all_gather, copy_to_region, gather_from_region, reduce_from_region, reduce_scatter, scatter_to_region,
};
use phalanx_tensor::Tensor;

const RANKS: usize = 3;

/// `[2, width, 2]`, each element its number plus 100 times the rank.
fn numbered(rank: usize, width: usize) -> Vec<f64> {
    (0..4 * width).map(|i| (100 * rank + i) as f64).collect()
}

/// Part `rank` of rows of `2 * width` numbers.
fn part(whole: &[f64], rank: usize) -> Vec<f64> {
    let row = whole.len() / 2;
    whole.chunks(row).flat_map(|row| row.chunks(row.len() / RANKS).nth(rank).unwrap().to_vec()).collect()
}

/// The parts of all ranks side by side.
fn side_by_side(parts: &[Vec<f64>]) -> Vec<f64> {
    let row =
        |i: usize| parts.iter().flat_map(move |part| part.chunks(part.len() / 2).nth(i).unwrap().to_vec());
    row(0).chain(row(1)).collect()
}

fn sum(all: &[Vec<f64>]) -> Vec<f64> {
    (0..all[0].len()).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// Every rank's result of `f` for its numbers of `widths[0]`, and its gradient for gradients of `widths[1]`.
fn run(f: impl Fn(&Var, &Comm) -> Result<Var> + Sync, widths: [usize; 2]) -> Vec<[Vec<f64>; 2]> {
    let rank = |rank: launch::Rank| -> Result<[Vec<f64>; 2]> {
        let tensor =
            |width: usize| Tensor::from_slice(&numbered(rank.rank(), width), &[2, width, 2], rank.device());
        let x = Var::leaf(tensor(widths[0])?)?;
        let y = f(&x, rank.comm())?;
        let dx = grad(&[(y.clone(), Some(Var::new(tensor(widths[1])?)))], &[&x], Options::default())?;
        // The input is as it was.
        assert_eq!(x.to_vec::<f64>()?, numbered(rank.rank(), widths[0]));
        Ok([y.to_vec()?, dx[0].as_ref().unwrap().to_vec()?])
    };
    launch::threads(RANKS, rank).unwrap()
}

fn all(width: usize) -> Vec<Vec<f64>> {
    (0..RANKS).map(|rank| numbered(rank, width)).collect()
}

#[test]
fn what_is_copied_to_the_region_comes_back_summed() {
    for (rank, [y, dx]) in run(copy_to_region, [2, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (numbered(rank, 2), sum(&all(2))));
    }
}

#[test]
fn what_is_reduced_from_the_region_comes_back_as_it_is() {
    for (rank, [y, dx]) in run(reduce_from_region, [2, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (sum(&all(2)), numbered(rank, 2)));
    }
}

#[test]
fn what_is_scattered_comes_back_gathered() {
    for (rank, [y, dx]) in run(|x, comm| scatter_to_region(x, 1, comm), [6, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (part(&numbered(rank, 6), rank), side_by_side(&all(2))));
    }
}

#[test]
fn what_is_gathered_comes_back_scattered() {
    for (rank, [y, dx]) in run(|x, comm| gather_from_region(x, 1, comm), [2, 6]).into_iter().enumerate() {
        assert_eq!((y, dx), (side_by_side(&all(2)), part(&numbered(rank, 6), rank)));
    }
}

#[test]
fn what_is_gathered_for_different_uses_comes_back_as_a_part_of_the_sum() {
    for (rank, [y, dx]) in run(|x, comm| all_gather(x, 1, comm), [2, 6]).into_iter().enumerate() {
        assert_eq!((y, dx), (side_by_side(&all(2)), part(&sum(&all(6)), rank)));
    }
}

#[test]
fn a_part_of_the_sum_comes_back_gathered() {
    for (rank, [y, dx]) in run(|x, comm| reduce_scatter(x, 1, comm), [6, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (part(&sum(&all(6)), rank), side_by_side(&all(2))));
    }
}

#[test]
fn the_last_dimension_can_be_named_from_the_end_and_the_first_needs_no_packing() {
    launch::threads(2, |rank| -> Result<()> {
        let x = Var::from_slice(&[rank.rank() as f64, 10.0], &[1, 2], rank.device())?;
        assert_eq!(gather_from_region(&x, -1, rank.comm())?.to_vec::<f64>()?, [0.0, 10.0, 1.0, 10.0]);
        let rows = gather_from_region(&x, 0, rank.comm())?;
        assert_eq!((rows.shape(), rows.to_vec::<f64>()?), (&[2, 2][..], vec![0.0, 10.0, 1.0, 10.0]));
        assert!(gather_from_region(&x, 2, rank.comm()).is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn sizes_that_do_not_divide_are_refused_on_every_rank() {
    let run = |rank: launch::Rank| -> Result<()> {
        let x = Var::from_slice(&[1.0; 8], &[2, 4], rank.device())?;
        for error in [scatter_to_region(&x, 1, rank.comm()), reduce_scatter(&x, 1, rank.comm())] {
            let message = error.map(drop).unwrap_err().to_string();
            assert!(message.contains("got 4 to cut over 3 ranks, wanted a multiple of 3"), "{message}");
        }
        Ok(())
    };
    launch::threads(RANKS, run).unwrap();
}
