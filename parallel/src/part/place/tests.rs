//! Runs and copies by tables, and against a slow twin that numbers every element.

use proptest::prelude::*;

use super::{Overlap, Place, Run, fill};

fn place(shape: &[usize], offset: &[usize], extent: &[usize], range: std::ops::Range<usize>) -> Place {
    let place = Place { shape: shape.into(), offset: offset.into(), extent: extent.into(), range };
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
        let wanted: Vec<Run> =
            wanted.into_iter().map(|(own, whole, count)| Run { own, whole, count }).collect();
        assert_eq!(place.runs().collect::<Vec<_>>(), wanted, "{place:?}");
    }
}

#[test]
fn overlaps_are_what_both_have() {
    let halves = [place(&[4, 6], &[0, 0], &[4, 3], 0..12), place(&[4, 6], &[0, 3], &[4, 3], 0..12)];
    let third = place(&[4, 6], &[0, 2], &[4, 2], 0..8);
    let overlaps = |from: &Place, to: &Place| -> Vec<(usize, usize, usize)> {
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
    assert!(fill(5, [overlap(3, 2), overlap(0, 2), overlap(1, 2)]));
    assert!(!fill(5, [overlap(3, 2), overlap(0, 2)]));
    assert!(!fill(5, [overlap(0, 4)]));
    assert!(fill(0, []) && !fill(1, []));
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
        assert!(Place { shape, offset, extent, range }.check().is_err());
    }
}

/// The numbers of a place's elements in the whole.
fn numbers(place: &Place) -> Vec<usize> {
    let mut all = vec![0];
    for ((&size, &offset), &extent) in place.shape.iter().zip(&place.offset).zip(&place.extent) {
        all = all.iter().flat_map(|&n| (offset..offset + extent).map(move |i| n * size + i)).collect();
    }
    all[place.range.clone()].to_vec()
}

/// A place in a whole of that shape.
fn places(shape: Vec<usize>) -> impl Strategy<Value = Place> {
    let cuts: Vec<_> = shape.iter().map(|&n| (0..=n, 0..=n)).collect();
    (cuts, any::<(u16, u16)>()).prop_map(move |(cuts, (a, b))| {
        let (offset, extent): (Vec<usize>, Vec<usize>) =
            cuts.into_iter().map(|(a, b)| (a.min(b), a.abs_diff(b))).unzip();
        let all = extent.iter().product::<usize>();
        let (a, b) = (usize::from(a) % (all + 1), usize::from(b) % (all + 1));
        Place { shape: shape.clone(), offset, extent, range: a.min(b)..a.max(b) }
    })
}

/// Two places, in a whole that one of them may see with its first dimensions joined.
fn pairs() -> impl Strategy<Value = (Place, Place)> {
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
        prop_assert_eq!(fill(targets.len(), from.overlaps(&to)), all);
    }
}
