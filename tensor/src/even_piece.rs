//! [`even_piece`]: `0..len` in contiguous pieces whose sizes differ by at most one. Everything that is divided evenly uses it: a
//! batch among ranks, blocks among stages, a sum among the ranks that add it, panels of a matrix product among threads.

use std::ops::Range;

/// Piece `index` of `0..len` in `pieces` contiguous pieces; the first `len % pieces` have one element more. So a `len` below
/// `pieces` gives empty pieces at the end.
#[inline]
pub fn even_piece(len: usize, pieces: usize, index: usize) -> Range<usize> {
    if pieces == 1 {
        return 0..len; // the usual case in a matrix product, without a division
    }
    let (size, longer) = (len / pieces, len % pieces);
    let start = |index: usize| index * size + index.min(longer);
    start(index)..start(index + 1)
}

#[cfg(test)]
mod tests {
    use super::even_piece;

    #[test]
    fn pieces_differ_by_one_and_the_first_are_longer() {
        for (len, sizes) in [(7, &[3, 2, 2][..]), (1, &[1, 0, 0]), (6, &[2, 2, 2]), (0, &[0, 0]), (5, &[5])] {
            let mut end = 0;
            for (index, &size) in sizes.iter().enumerate() {
                assert_eq!(even_piece(len, sizes.len(), index), end..end + size);
                end += size;
            }
            assert_eq!(end, len);
        }
    }
}
