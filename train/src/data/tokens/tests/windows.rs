//! Windows, packed windows, and blends of them.

use phalanx_tensor::{Device, RngKey};

use super::super::super::{DataLoaderConfig, Dataset, Samples};
use super::super::{Blend, IndexedTokens, Packed, TokenWindows, Tokens};
use super::{DOCUMENTS, Folder, values, write_indexed};

/// The loader of `nn`, as it draws: where sample `sample` begins.
fn start_in_nn(len: usize, context: usize, seed: u64, sample: u64) -> usize {
    let count = ((len - context) / context).max(1) as u64;
    let stream = RngKey { seed, step: 0 }.site(0x6461_7461);
    let (epoch, index) = (sample / count, sample % count);
    let half = (64 - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut place = index;
    loop {
        let (mut left, mut right) = (place >> half, place & mask);
        for round in 0..4 {
            let [word, ..] = stream.block(epoch, 1 + round + (right << 3));
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        place = (left << half) | right;
        if place < count {
            break;
        }
    }
    let shifts = (len - context * count as usize) as u64;
    let [a, b, ..] = stream.block(epoch, 0);
    let shift = ((u64::from(a) << 32) | u64::from(b)) % shifts;
    shift as usize + place as usize * context
}

#[test]
fn windows_are_those_of_nn() {
    for (len, context, seed) in [(2, 1, 0), (10, 3, 7), (9, 8, 1), (1000, 7, 7), (5000, 4, 9)] {
        let tokens: Vec<u32> = (0..len as u32).collect();
        let windows = TokenWindows::new(tokens, context, seed).unwrap();
        for sample in 0..3 * windows.per_epoch() {
            let start = start_in_nn(len, context, seed, sample);
            assert_eq!(windows.start(sample), start as u64);
            let window = windows.sample(sample).unwrap();
            assert!(values(&window[0]).into_iter().eq(start as i64..(start + context) as i64));
            assert!(values(&window[1]).into_iter().eq(start as i64 + 1..(start + context) as i64 + 1));
        }
    }
}

#[test]
fn a_loader_of_windows_has_the_batches_of_nn_as_samples_and_as_a_data_set() {
    let windows = TokenWindows::new((0..500).collect::<Vec<u32>>(), 5, 7).unwrap();
    let config = DataLoaderConfig::new(6).with_workers(2);
    let mut drawn = config.clone().stream(windows.clone()).unwrap();
    let mut shuffled = config.train(windows, 7).unwrap();
    for step in 0..40 {
        let (a, b) = (drawn.next_step().unwrap(), shuffled.next_step().unwrap());
        assert_eq!(a[0].tensors[0].shape(), [6, 5]);
        for row in 0..6 {
            let start = start_in_nn(500, 5, 7, step * 6 + row as u64) as i64;
            let of = |t: usize| values(&a[0].tensors[t])[row * 5..row * 5 + 5].to_vec();
            assert!(of(0).into_iter().eq(start..start + 5) && of(1).into_iter().eq(start + 1..start + 6));
        }
        for t in 0..2 {
            assert_eq!(values(&a[0].tensors[t]), values(&b[0].tensors[t]), "step {step}");
        }
    }
}

#[test]
fn unshifted_windows_are_all_that_fit_from_the_first_token_on() {
    let windows = TokenWindows::new((0..11).collect::<Vec<u32>>(), 5, 3).unwrap().unshifted();
    let starts: Vec<i64> =
        (0..Dataset::len(&windows)).map(|i| values(&windows.item(i, 9).unwrap()[0])[0]).collect();
    assert_eq!(starts, [0, 5]);
    assert!(windows.item(2, 0).unwrap_err().to_string().contains("got item 2, wanted one of 2"));
}

#[test]
fn a_text_shorter_than_a_window_is_refused() {
    let error = TokenWindows::new(vec![1, 2, 3], 3, 0).unwrap_err().to_string();
    assert!(error.contains("got 3 tokens for a context of 3"), "{error}");
    assert!(TokenWindows::new(vec![], 1, 0).is_err() && TokenWindows::new(vec![1, 2], 0, 0).is_err());
}

#[test]
fn packed_windows_are_the_windows_with_documents_and_no_target_across_them() {
    let folder = Folder::new();
    write_indexed(&folder.path("c"), 100, &DOCUMENTS).unwrap();
    let open = || IndexedTokens::open(folder.path("c")).unwrap();
    let packed = Packed::new(open(), 4, 1).unwrap().unshifted();
    let read = |packed: &dyn Dataset, i| -> Vec<Vec<i64>> {
        packed.item(i, 0).unwrap().iter().map(values).collect()
    };
    // Documents begin at tokens 0, 3 and 6.
    assert_eq!(read(&packed, 0), [vec![1, 2, 3, 4], vec![2, 3, -100, 5], vec![0, 0, 0, 3]]);
    assert_eq!(read(&packed, 1), [vec![5, 6, 7, 8], vec![6, -100, 8, 9], vec![0, 0, 2, 2]]);
    let last = Packed::new(open(), 6, 1).unwrap().unshifted();
    assert_eq!(read(&last, 0)[1], [2, 3, -100, 5, 6, -100], "the last target is in another document too");
    // Ends of text are in the text, and are the last tokens of their documents.
    let joined = Packed::new(vec![1, 0, 2, 3, 0, 4, 5].with_end_of_text(0), 6, 1).unwrap().unshifted();
    assert_eq!(
        read(&joined, 0),
        [vec![1, 0, 2, 3, 0, 4], vec![0, -100, 3, 0, -100, 5], vec![0, 0, 2, 2, 2, 5]]
    );
    // Drawn as the windows are.
    let (packed, windows) = (Packed::new(open(), 2, 9).unwrap(), TokenWindows::new(open(), 2, 9).unwrap());
    for sample in 0..20 {
        assert_eq!(values(&packed.sample(sample).unwrap()[0]), values(&windows.sample(sample).unwrap()[0]));
        assert_eq!(Samples::name(&packed, sample), Samples::name(&windows, sample));
    }
}

#[test]
fn a_blend_of_windows_is_loaded_by_weight_and_the_same_under_any_workers() {
    let source = |first: u32, seed| -> Box<dyn Samples> {
        Box::new(TokenWindows::new((first..first + 1000).collect::<Vec<_>>(), 4, seed).unwrap())
    };
    let read = |workers: usize| -> Vec<i64> {
        let blend = Blend::new(vec![(source(0, 1), 3.0), (source(10_000, 2), 1.0)], 5).unwrap();
        let config = DataLoaderConfig::new(100).with_workers(workers).with_device(Device::CPU);
        let mut loader = config.stream(blend).unwrap();
        (0..10).flat_map(|_| values(&loader.next_step().unwrap()[0].tensors[0])).collect()
    };
    let drawn = read(0);
    assert_eq!(drawn.iter().filter(|&&token| token < 10_000).count(), 750 * 4);
    assert_eq!(read(3), drawn);
}
