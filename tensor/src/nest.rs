//! Copies from any strides to any others that overlap nothing, loop by loop.
//!
//! The two innermost loops are one function, with forms of its own for what is common: runs that lie together, runs of a few elements,
//! and every second, third or fourth element. So a run of three elements costs no call and no search for its place.

use bytemuck::Pod;

use crate::copy::PIECE;
use crate::{Loops, Pool};

/// Copies `from` into `to`, which both begin at the first element. The loops' first strides are those of `to`, larger outside than
/// inside; the second those of `from`.
pub(crate) fn copy<T: Pod + Send + Sync>(pool: &Pool, to: &mut [T], from: &[T], loops: &Loops<2>) {
    spread(pool, to, from, loops.sizes(), loops.strides());
}

/// Shares out the outermost loop; where one step of it is much already, the loop inside, step by step.
fn spread<T: Pod + Send + Sync>(
    pool: &Pool,
    to: &mut [T],
    from: &[T],
    sizes: &[usize],
    strides: &[[usize; 2]],
) {
    let inside: usize = sizes[1..].iter().product();
    let [to_stride, from_stride] = strides[0];
    if inside > PIECE {
        for i in 0..sizes[0] {
            spread(pool, &mut to[i * to_stride..], &from[i * from_stride..], &sizes[1..], &strides[1..]);
        }
        return;
    }
    let steps = (PIECE / inside).max(1);
    let reach: usize = sizes[1..].iter().zip(&strides[1..]).map(|(n, stride)| (n - 1) * stride[0]).sum();
    let to = &mut to[..(sizes[0] - 1) * to_stride + reach + 1];
    pool.for_each_chunk(to, steps * to_stride, |piece, to| {
        let first = piece * steps;
        let mut sizes = crate::Dims::from_slice(sizes);
        sizes[0] = steps.min(sizes[0] - first);
        nest(to, &from[first * from_stride..], &sizes, strides);
    });
}

fn nest<T: Pod>(to: &mut [T], from: &[T], sizes: &[usize], strides: &[[usize; 2]]) {
    match (sizes, strides) {
        (&[n], &[stride]) => rows(to, from, [1, n], [[1, 1], stride]),
        (&[m, n], &[outer, inner]) => rows(to, from, [m, n], [outer, inner]),
        _ => {
            for i in 0..sizes[0] {
                let [to_stride, from_stride] = strides[0];
                nest(&mut to[i * to_stride..], &from[i * from_stride..], &sizes[1..], &strides[1..]);
            }
        }
    }
}

/// `m` runs of `n` elements.
fn rows<T: Pod>(to: &mut [T], from: &[T], [m, n]: [usize; 2], [down, across]: [[usize; 2]; 2]) {
    match (n, across) {
        (2, [1, _]) => few::<T, 2>(to, from, m, down, across[1]),
        (3, [1, _]) => few::<T, 3>(to, from, m, down, across[1]),
        (4, [1, _]) => few::<T, 4>(to, from, m, down, across[1]),
        _ => {
            for i in 0..m {
                run(&mut to[i * down[0]..], &from[i * down[1]..], n, across);
            }
        }
    }
}

/// `m` runs of `N` elements that are written side by side.
fn few<T: Pod, const N: usize>(to: &mut [T], from: &[T], m: usize, down: [usize; 2], across: usize) {
    let whole = (m - 1) * down[1] + 1;
    let columns: [&[T]; N] = std::array::from_fn(|j| &from[j * across..][..whole]);
    match down {
        [to_stride, 1] if to_stride == N => {
            for (i, to) in to.chunks_exact_mut(N).take(m).enumerate() {
                to.iter_mut().zip(&columns).for_each(|(to, column)| *to = column[i]);
            }
        }
        [to_stride, from_stride] => {
            for i in 0..m {
                let to = &mut to[i * to_stride..][..N];
                to.iter_mut().zip(&columns).for_each(|(to, column)| *to = column[i * from_stride]);
            }
        }
    }
}

fn run<T: Pod>(to: &mut [T], from: &[T], n: usize, across: [usize; 2]) {
    match across {
        [1, 0] => to[..n].fill(from[0]),
        [1, 1] if n < 8 => to[..n].iter_mut().zip(&from[..n]).for_each(|(to, &from)| *to = from),
        [1, 1] => to[..n].copy_from_slice(&from[..n]),
        [1, 2] => every::<T, 2>(&mut to[..n], from),
        [1, 3] => every::<T, 3>(&mut to[..n], from),
        [1, 4] => every::<T, 4>(&mut to[..n], from),
        [to_stride, 0] => to.iter_mut().step_by(to_stride).take(n).for_each(|to| *to = from[0]),
        [to_stride, from_stride] => {
            let from = from.iter().step_by(from_stride).take(n);
            to.iter_mut().step_by(to_stride).zip(from).for_each(|(to, &from)| *to = from);
        }
    }
}

/// Every `N`-th element.
fn every<T: Pod, const N: usize>(to: &mut [T], from: &[T]) {
    let Some((last, to)) = to.split_last_mut() else { return };
    *last = from[to.len() * N];
    to.iter_mut().zip(from.chunks_exact(N)).for_each(|(to, from)| *to = from[0]);
}

#[cfg(test)]
mod tests {
    use super::copy;
    use crate::{Loops, Pool};

    #[test]
    fn elements_of_every_size_go_where_the_strides_say() {
        check(|i| i as u8);
        check(|i| i as u16);
        check(|i| i as u32);
        check(|i| i as u64);
    }

    /// Every form of the inner loops, one and several pieces, and gaps that stay as they are.
    fn check<T: bytemuck::Pod + Send + Sync + PartialEq>(number: fn(usize) -> T) {
        let pool = Pool::new(2);
        let source: Vec<T> = (0..300_000).map(number).collect();
        for sizes in [[1, 1, 1], [1, 1, 7], [33, 5, 2], [3, 129, 3], [129, 7, 4], [2, 3, 5], [2, 700, 33]] {
            for gaps in [[0, 0, 1], [1, 0, 1], [0, 3, 1], [2, 5, 2], [0, 0, 3]] {
                for from in [[1, 1, 1], [0, 3, 1], [50, 1, 700], [7, 0, 2], [2, 1, 3], [9, 40, 4], [1, 20, 0]]
                {
                    let inner = gaps[2];
                    let middle = (sizes[2] - 1) * inner + 1 + gaps[1];
                    let outer = (sizes[1] - 1) * middle + (sizes[2] - 1) * inner + 1 + gaps[0];
                    let strides = [outer, middle, inner];
                    let length =
                        (sizes[0] - 1) * outer + (sizes[1] - 1) * middle + (sizes[2] - 1) * inner + 1;
                    let (mut to, mut wanted) = (vec![number(99); length + 3], vec![number(99); length + 3]);
                    for i in 0..sizes[0] {
                        for j in 0..sizes[1] {
                            for k in 0..sizes[2] {
                                let place = |s: [usize; 3]| i * s[0] + j * s[1] + k * s[2];
                                wanted[place(strides)] = source[place(from)];
                            }
                        }
                    }
                    copy(&pool, &mut to, &source, &Loops::new(&sizes, [&strides, &from]));
                    assert!(to == wanted, "{sizes:?} to {strides:?} from {from:?}");
                }
            }
        }
    }
}
