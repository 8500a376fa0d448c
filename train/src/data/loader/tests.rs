//! What a loader promises: the same batches under any workers, pieces and resumes, errors at their step, and no hang.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use phalanx_tensor::{DType, Device, Tensor};

use super::super::scratch::numbers;
use super::super::{Batch, Dataset, HOST, wrong};
use super::{DataLoader, DataLoaderConfig};
use crate::Result;

/// The values of a step's batches, one after the other.
fn values(step: &[Batch]) -> Vec<i64> {
    step.iter().flat_map(|batch| batch.tensors[0].to_vec::<i64>().unwrap()).collect()
}

fn steps(loader: &mut DataLoader, count: usize) -> Vec<Vec<i64>> {
    (0..count).map(|_| values(&loader.next_step().unwrap())).collect()
}

/// A rank's rows that are one piece.
fn one(rows: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(rows).collect()
}

/// Items that take unequal times to read.
fn uneven(len: usize) -> impl Dataset {
    numbers(len).map(|item, index, draw| {
        let pause = (index as u64 * 7919 + draw * 31) % 5;
        std::thread::sleep(Duration::from_micros(pause * 200));
        Ok(item)
    })
}

#[test]
fn the_order_is_the_same_under_0_1_and_4_workers() {
    let read = |workers: usize, ahead: usize| {
        let config = DataLoaderConfig::new(6).with_workers(workers).with_ahead(ahead);
        steps(&mut config.train(uneven(20), 3).unwrap(), 12)
    };
    let on_caller = read(0, 1);
    for (workers, ahead) in [(1, 1), (1, 2), (4, 1), (4, 2), (4, 9)] {
        assert_eq!(read(workers, ahead), on_caller, "{workers} workers, {ahead} ahead");
    }
    let mut epoch = on_caller.concat();
    epoch.truncate(60);
    for epoch in epoch.chunks_exact_mut(20) {
        epoch.sort_unstable();
        assert!(epoch.iter().copied().eq(0..20), "steps straddle epochs, each of which has every item once");
    }
}

#[test]
fn the_pieces_of_1_2_and_3_ranks_are_the_whole() {
    let read = |pieces: Vec<Range<usize>>| {
        steps(
            &mut DataLoaderConfig::new(7).with_workers(2).with_pieces(pieces).train(numbers(25), 1).unwrap(),
            9,
        )
    };
    let whole = read(one(0..7));
    let shares: [&[Vec<Range<usize>>]; 3] = [
        &[vec![0..3, 3..7]],
        &[vec![0..2, 2..4], vec![4..5, 5..7]],
        &[one(0..3), one(3..5), vec![5..6, 6..7]],
    ];
    for ranks in shares {
        let read: Vec<_> = ranks.iter().map(|pieces| read(pieces.clone())).collect();
        for (step, wanted) in whole.iter().enumerate() {
            let joined: Vec<i64> = read.iter().flat_map(|rank| rank[step].clone()).collect();
            assert_eq!(&joined, wanted, "{} ranks, step {step}", ranks.len());
        }
    }
    let mut loader = DataLoaderConfig::new(7).with_pieces(vec![2..4, 5..7]).train(numbers(25), 1).unwrap();
    let step = loader.next_step().unwrap();
    assert_eq!(step.iter().map(|batch| batch.first_row).collect::<Vec<_>>(), [2, 5]);
    assert_eq!(step[1].tensors[0].shape(), [2]);
}

#[test]
fn a_rank_reads_only_its_pieces() {
    for workers in [0, 2] {
        let read = Arc::new(AtomicUsize::new(0));
        let counted = {
            let read = Arc::clone(&read);
            numbers(70).map(move |item, _, _| {
                read.fetch_add(1, Ordering::SeqCst);
                Ok(item)
            })
        };
        let config = DataLoaderConfig::new(7).with_workers(workers).with_pieces(vec![1..2, 4..6]);
        assert_eq!(steps(&mut config.evaluate(counted).unwrap(), 10).concat().len(), 30);
        assert_eq!(read.load(Ordering::SeqCst), 30);
    }
}

#[test]
fn a_resumed_loader_goes_on_as_if_it_had_not_stopped() {
    let config = || DataLoaderConfig::new(4).with_workers(2);
    let mut whole = config().train(numbers(10), 8).unwrap();
    let before = steps(&mut whole, 5);
    assert_eq!((before.len(), whole.position()), (5, 5));
    let mut resumed = config().with_position(whole.position()).train(numbers(10), 8).unwrap();
    assert_eq!(steps(&mut resumed, 6), steps(&mut whole, 6));
    assert_eq!(resumed.position(), 11);
}

#[test]
fn an_evaluation_goes_through_everything_once_in_order() {
    for workers in [0, 3] {
        let config = DataLoaderConfig::new(4).with_workers(workers);
        let mut loader = config.clone().evaluate(numbers(10)).unwrap();
        assert_eq!(loader.steps(), Some(3));
        let all: Vec<Vec<i64>> = loader.by_ref().map(|step| values(&step.unwrap())).collect();
        assert_eq!(all, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        let error = loader.next_step().unwrap_err().to_string();
        assert!(error.contains("the evaluation has ended after 3 steps"), "{error}");
        // Two ranks, the second of which has no row in the last step.
        let rank = |pieces| -> Vec<Vec<i64>> {
            let loader = config.clone().with_pieces(pieces).evaluate(numbers(10)).unwrap();
            loader.map(|step| values(&step.unwrap())).collect()
        };
        assert_eq!(rank(vec![0..1, 1..2]), [[0, 1], [4, 5], [8, 9]]);
        assert_eq!(rank(one(2..4)), [vec![2, 3], vec![6, 7], vec![]]);
        assert_eq!(rank(vec![]), [const { Vec::<i64>::new() }; 3]);
    }
}

#[test]
fn an_error_comes_out_of_its_step_names_the_item_and_the_next_step_goes_on() {
    let data = || {
        numbers(12).map(|item, index, draw| match index {
            5 | 7 if draw == 0 => Err(wrong("disk", format!("no sector {index}"))),
            _ => Ok(item),
        })
    };
    for workers in [0, 1, 4] {
        let mut loader = DataLoaderConfig::new(4).with_workers(workers).evaluate(data()).unwrap();
        assert_eq!(values(&loader.next_step().unwrap()), [0, 1, 2, 3]);
        let error = loader.next_step().unwrap_err().to_string();
        assert_eq!(error, "item 5 in epoch 0: disk: no sector 5", "the first of the step's errors");
        assert_eq!(loader.position(), 2);
        assert_eq!(values(&loader.next_step().unwrap()), [8, 9, 10, 11]);
    }
}

#[test]
fn a_panic_is_an_error_that_names_the_item() {
    for workers in [0, 1, 4] {
        let data = numbers(8)
            .map(|item, index, _| if index == 2 { panic!("item {index} is cursed") } else { Ok(item) });
        let mut loader = DataLoaderConfig::new(4).with_workers(workers).evaluate(data).unwrap();
        let error = loader.next_step().unwrap_err().to_string();
        assert_eq!(error, "item 2 in epoch 0: its reading panicked: item 2 is cursed");
        assert_eq!(values(&loader.next_step().unwrap()), [4, 5, 6, 7]);
    }
}

/// A data set whose batches cannot be made, and whose samples cannot even be named.
struct Clumsy;

impl Dataset for Clumsy {
    fn len(&self) -> usize {
        4
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        Ok(vec![Tensor::zeros(&[if index == 2 { 3 } else { 2 }], DType::F32, HOST)?])
    }
}

#[test]
fn items_that_do_not_fit_are_named_with_their_step() {
    let mut loader = DataLoaderConfig::new(4).with_pieces(one(1..4)).evaluate(Clumsy).unwrap();
    let error = loader.next_step().unwrap_err().to_string();
    assert_eq!(
        error,
        "rows 1..4 of step 0: stack: item 1 of the batch differs from item 0: got tensor 0 of [3] f32, wanted [2] f32; \
         item 1 is item 2 in epoch 0, item 0 is item 1 in epoch 0"
    );
}

#[test]
fn a_collate_of_ones_own_makes_the_batches_and_its_panic_is_an_error() {
    struct Padded(bool);
    impl Dataset for Padded {
        fn len(&self) -> usize {
            Clumsy.len()
        }
        fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
            Clumsy.item(index, draw)
        }
        fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
            assert!(self.0, "no padding");
            let lengths: Vec<i64> = items.iter().map(|item| item[0].numel() as i64).collect();
            Ok(vec![Tensor::from_slice(&lengths, &[lengths.len()], Device::CPU)?])
        }
    }
    let loader = |works| DataLoaderConfig::new(4).evaluate(Padded(works)).unwrap();
    assert_eq!(values(&loader(true).next_step().unwrap()), [2, 2, 3, 2]);
    let error = loader(false).next_step().unwrap_err().to_string();
    assert!(error.starts_with("rows 0..4 of step 0: collate panicked: no padding"), "{error}");
}

#[test]
fn a_panic_outside_of_the_items_is_an_error_and_no_hang() {
    struct Nameless;
    impl super::Samples for Nameless {
        fn sample(&self, _: u64) -> Result<Vec<Tensor>> {
            Err(wrong("mine", "no"))
        }
        fn name(&self, _: u64) -> String {
            panic!("no name")
        }
    }
    let mut loader = DataLoaderConfig::new(2).with_workers(2).stream(Nameless).unwrap();
    let error = loader.next_step().unwrap_err().to_string();
    assert!(error.contains("a worker thread has died"), "{error}");
}

#[test]
fn dropping_the_loader_ends_its_workers_also_in_the_middle_of_a_step() {
    let alive = Arc::new(());
    let data = {
        let alive = Arc::clone(&alive);
        numbers(1000).map(move |item, _, _| {
            let _here = &alive;
            std::thread::sleep(Duration::from_millis(2));
            Ok(item)
        })
    };
    let loader = DataLoaderConfig::new(1000).with_workers(3).train(data, 0).unwrap();
    drop(loader);
    assert_eq!(Arc::strong_count(&alive), 1, "all workers have let go of the data");
}

#[test]
fn workers_read_at_the_same_time_and_no_further_ahead_than_told() {
    // Two items wait for each other: one worker would hang here.
    let meeting = Arc::new(Barrier::new(2));
    let data = numbers(8).map(move |item, _, _| {
        meeting.wait();
        Ok(item)
    });
    let mut loader = DataLoaderConfig::new(2).with_workers(2).evaluate(data).unwrap();
    assert_eq!(steps(&mut loader, 4).concat().len(), 8);

    let read = Arc::new(AtomicUsize::new(0));
    let counted = {
        let read = Arc::clone(&read);
        numbers(100).map(move |item, _, _| {
            read.fetch_add(1, Ordering::SeqCst);
            Ok(item)
        })
    };
    let mut loader = DataLoaderConfig::new(5).with_workers(2).with_ahead(3).train(counted, 0).unwrap();
    for step in 0..4 {
        while read.load(Ordering::SeqCst) < (step + 3) * 5 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(read.load(Ordering::SeqCst), (step + 3) * 5);
        loader.next_step().unwrap();
    }
}

#[test]
fn a_devices_ledger_does_not_know_how_far_ahead_the_workers_are() {
    let device = Device::Cpu(907);
    let read = |workers: usize| {
        let config = DataLoaderConfig::new(8).with_workers(workers).with_ahead(4).with_device(device);
        let mut loader = config.train(numbers(64), 0).unwrap();
        let batches = loader.next_step().unwrap();
        assert_eq!(batches[0].tensors[0].device(), device);
        std::thread::sleep(Duration::from_millis(5));
        let usage = device.ledger().unwrap().category(phalanx_tensor::Category::Buffers);
        drop(batches);
        usage.now
    };
    assert_eq!(read(0), 64);
    assert_eq!(read(4), 64);
}

#[test]
fn settings_that_make_no_sense_are_refused_at_once() {
    let error = |config: DataLoaderConfig| config.train(numbers(4), 0).err().unwrap().to_string();
    assert!(error(DataLoaderConfig::new(0)).contains("batches of 0 rows"));
    assert!(error(DataLoaderConfig::new(4).with_pieces(one(2..5))).contains("got the rows 2..5"));
    assert!(error(DataLoaderConfig::new(4).with_ahead(0)).contains("0 steps ahead"));
    assert!(error(DataLoaderConfig::new(4).with_position(u64::MAX)).contains("wanted a smaller one"));
    let empty = DataLoaderConfig::new(4).train(numbers(0), 0).err().unwrap().to_string();
    assert!(empty.contains("without items"), "{empty}");
}
