//! What a rank of a pipeline holds, from the ledger: on meta devices, where a rank needs no peers, to the byte. Alone in this
//! file, since no other test may use its ledgers.

mod gpt;
#[path = "ranks/kit.rs"]
mod kit;
#[path = "ranks/twin.rs"]
mod twin;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_nn::models::RecomputeMode::{self, Always, ExceptLast, Never};
use phalanx_parallel::pipeline::ranks::{AsynchronousPipeline, Executed, Pipeline};
use phalanx_parallel::pipeline::schedule::{ActionKind, Schedule, gpipe, one_f_one_b, zb_h1};
use phalanx_parallel::{comm, launch};
use phalanx_tensor::{Category, Device, Usage};

use crate::gpt::{LENGTH, ROWS};
use crate::kit::{WIDTH, config};
use crate::twin::{Case, Descent, Scheme, Work};

/// The ledgers are the process's.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn activations(device: Device) -> Usage {
    device.ledger().unwrap().category(Category::Activations)
}

/// Bytes of a stage's input.
fn input(micro_batches: usize) -> usize {
    ROWS / micro_batches * LENGTH * WIDTH * size_of::<f32>()
}

/// Bytes of activations after each action, and at peak, of a rank without peers that runs a schedule over the first of
/// `pieces` pieces of a batch. Each stage has two blocks.
fn books(
    schedule: &Schedule,
    pieces: usize,
    rank: usize,
    mode: RecomputeMode,
) -> (Vec<(ActionKind, usize)>, usize) {
    books_for(schedule, pieces, rank, mode, false)
}

/// The same, what it sends being gone at once or held for receivers that may be slow.
fn books_for(
    schedule: &Schedule,
    pieces: usize,
    rank: usize,
    mode: RecomputeMode,
    slow: bool,
) -> (Vec<(ActionKind, usize)>, usize) {
    let (books, peak) = peaks_for(schedule, pieces, rank, mode, slow);
    (books.into_iter().map(|(kind, now, _)| (kind, now)).collect(), peak)
}

/// The same with the peak up to each action's end.
fn peaks_for(
    schedule: &Schedule,
    pieces: usize,
    rank: usize,
    mode: RecomputeMode,
    slow: bool,
) -> (Vec<(ActionKind, usize, usize)>, usize) {
    let device = Device::Meta(700);
    let ranks = schedule.ranks.len();
    let comm = comm::meta(rank, ranks).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&heard);
    let observer = move |done: Executed| {
        let Usage { now, peak } = activations(device);
        told.lock().unwrap().push((done.action.kind, now, peak));
    };
    let pipeline = Pipeline::new(schedule, comm, device).unwrap().recompute(mode);
    let pipeline = pipeline.observer(Arc::new(observer));
    let pipeline = if slow { pipeline.with_slow_receivers().unwrap() } else { pipeline };
    let mut work = kit::Work::new(&config(2 * ranks), schedule, rank, device).unwrap();
    // A step in which shapes are known to all.
    (work.rows, work.step) = (phalanx_nn::cut(ROWS, pieces), 1);
    device.ledger().unwrap().reset_peak();
    pipeline.train(&Arc::new(work)).unwrap();
    let heard = heard.lock().unwrap().clone();
    (heard, activations(device).peak)
}

/// Bytes that a stage keeps of each micro-batch for backward, the loss aside.
fn kept(ranks: usize, micro_batches: usize, rank: usize, mode: RecomputeMode) -> usize {
    let (books, _) = books(&gpipe(ranks, micro_batches).unwrap(), micro_batches, rank, mode);
    let forwards: Vec<usize> =
        books.iter().filter(|(kind, _)| *kind == ActionKind::Forward).map(|(_, bytes)| *bytes).collect();
    forwards[1] - forwards[0] - loss(ranks, rank)
}

/// Bytes of a loss, where there is one.
fn loss(ranks: usize, rank: usize) -> usize {
    if rank + 1 == ranks { size_of::<f32>() } else { 0 }
}

#[test]
fn one_f_one_b_holds_stages_minus_rank_micro_batches_and_sent_outputs_are_gone() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (ranks, micro_batches) in [(4, 6), (3, 2), (2, 4)] {
        for rank in 0..ranks {
            let each = kept(ranks, micro_batches, rank, Never);
            let (books, _) = books(&one_f_one_b(ranks, micro_batches).unwrap(), micro_batches, rank, Never);
            let (mut live, mut most, mut forwards, mut waits) = (0, 0, 0, 0);
            for &(kind, bytes) in &books {
                match kind {
                    ActionKind::Forward => (live, forwards) = (live + 1, forwards + 1),
                    ActionKind::Backward => live -= 1,
                    _ => {}
                }
                most = most.max(live);
                // What came and is not yet used, or is not yet sent.
                waits += usize::from(matches!(kind, ActionKind::RecvForward | ActionKind::RecvBackward));
                waits -= usize::from(kind == ActionKind::Forward && rank > 0);
                waits -= usize::from(kind == ActionKind::Backward && rank + 1 < ranks);
                waits += usize::from(kind == ActionKind::Forward && rank + 1 < ranks);
                waits += usize::from(kind == ActionKind::Backward && rank > 0);
                if matches!(kind, ActionKind::SendForward | ActionKind::SendBackward) {
                    // Said while the tensor is still there.
                    waits -= 1;
                    continue;
                }
                let wanted = live * each + forwards * loss(ranks, rank) + waits * input(micro_batches);
                assert_eq!(bytes, wanted, "rank {rank} of {ranks}, {kind:?}: {books:?}");
            }
            assert_eq!(most, micro_batches.min(ranks - rank));
        }
    }
}

/// Between its halves a micro-batch holds the gradients of its linear maps beside what forward left, which is less than that.
#[test]
fn a_split_backward_leaves_less_than_twice_what_it_found_and_nothing_in_the_end() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let (ranks, micro_batches) = (3, 4);
    for rank in 0..ranks {
        let each = kept(ranks, micro_batches, rank, Never);
        let (books, peak) = books(&zb_h1(ranks, micro_batches).unwrap(), micro_batches, rank, Never);
        let [.., (_, waiting), (_, end)] = books[..] else { unreachable!("a schedule of one action") };
        let left = waiting - end;
        assert!(left < 2 * each, "rank {rank}: {left} of {each} each");
        assert!(peak < ranks * left + each, "rank {rank}: {peak} of {each} each, {left} left");
        assert_eq!(books.last().unwrap(), &(ActionKind::Weight, micro_batches * loss(ranks, rank)));
    }
}

#[test]
fn recomputation_holds_the_inputs_of_all_and_the_activations_of_one_micro_batch() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let ranks = 3;
    for (rank, m) in (0..ranks).flat_map(|rank| [2, 3, 4, 6].map(|m| (rank, m))) {
        // The first stage has tokens instead, which are the caller's.
        let input = if rank == 0 { 0 } else { input(m) };
        let whole = kept(ranks, m, rank, Never);
        assert_eq!(kept(ranks, m, rank, Always), input);
        // One micro-batch alone: its activations and what its backward pass works with.
        let (actions, one) = peaks_for(&gpipe(ranks, 1).unwrap(), m, rank, Never, false);
        let forward = actions.iter().find(|(kind, ..)| *kind == ActionKind::Forward).unwrap().2;
        // What is computed again has the gradient that has come beside it.
        let again = if rank + 1 == ranks { one } else { one.max(forward + self::input(m)) };
        let peak = |mode| books(&gpipe(ranks, m).unwrap(), m, rank, mode).1 - (m - 1) * loss(ranks, rank);
        assert_eq!(peak(Never), (m - 1) * whole + one, "never, rank {rank}, {m} micro-batches");
        assert_eq!(peak(Always), (m - 1) * input + again, "always, rank {rank}, {m} micro-batches");
        // While the first is computed again, the last is still there.
        let wanted = (m - 2) * input + whole + again;
        assert_eq!(peak(ExceptLast), wanted, "except the last, rank {rank}, {m} micro-batches");
        assert!(one < 2 * whole, "rank {rank}: {one} for one micro-batch, of which {whole} are kept");
    }
}

/// Bytes of activations after each forward pass and at peak, of each rank on a CPU; `late`: stages but the first begin when
/// that has done all its forward passes.
fn on_cpus(schedule: &Schedule, pieces: usize, late: bool) -> Vec<(Vec<usize>, usize)> {
    let ranks = schedule.ranks.len();
    let done = &Arc::new(AtomicUsize::new(0));
    let books = launch::threads(ranks, |rank| -> phalanx_parallel::Result<(Vec<usize>, usize)> {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (told, device, first) = (Arc::clone(&heard), rank.device(), rank.rank() == 0);
        let counted = Arc::clone(done);
        let observer = move |done: Executed| {
            let forward = done.action.kind == ActionKind::Forward;
            told.lock().unwrap().extend(forward.then(|| activations(device).now));
            counted.fetch_add(usize::from(forward && first), Ordering::Relaxed);
        };
        let pipeline = Pipeline::new(schedule, rank.comm().clone(), rank.device())?;
        let mut work = kit::Work::new(&config(2 * ranks), schedule, rank.rank(), rank.device())?;
        (work.rows, work.step) = (phalanx_nn::cut(ROWS, pieces), 1);
        rank.device().ledger()?.reset_peak();
        while late && !first && done.load(Ordering::Relaxed) < pieces && rank.comm().failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        pipeline.observer(Arc::new(observer)).train(&Arc::new(work))?;
        let heard = heard.lock().unwrap().clone();
        Ok((heard, activations(rank.device()).peak))
    });
    books.unwrap()
}

#[test]
fn ranks_on_cpus_hold_at_most_what_they_hold_on_meta_for_slow_receivers() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for schedule in [one_f_one_b(3, 4).unwrap(), zb_h1(3, 4).unwrap(), gpipe(2, 4).unwrap()] {
        for (rank, (_, peak)) in on_cpus(&schedule, 4, false).into_iter().enumerate() {
            let [least, most] = [false, true].map(|slow| books_for(&schedule, 4, rank, Never, slow).1);
            assert!((least..=most).contains(&peak), "rank {rank}: {peak}, wanted {least} to {most}");
        }
    }
    // Late enough, and the first stage has all its outputs at once.
    let schedule = gpipe(2, 4).unwrap();
    let (books, _) = books_for(&schedule, 4, 0, Never, true);
    let after: Vec<usize> =
        books.iter().filter(|(kind, _)| *kind == ActionKind::Forward).map(|&(_, b)| b).collect();
    assert_eq!(after[3] - after[2], after[0], "{after:?}: each with its output");
    assert_eq!(on_cpus(&schedule, 4, true)[0].0, after);
}

/// Bytes of parameters after each action, and at peak, of a rank without peers; and of the stage's parameters alone.
fn weights(case: &Case, rank: usize) -> (Vec<(ActionKind, usize)>, usize, usize) {
    let device = Device::Meta(701);
    let parameters = move || device.ledger().unwrap().category(Category::Parameters);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&heard);
    let observer = move |done: Executed| told.lock().unwrap().push((done.action.kind, parameters().now));
    let comm = comm::meta(rank, case.ranks()).unwrap();
    let pipeline = AsynchronousPipeline::new(&case.plan(), comm, device).unwrap();
    let pipeline = pipeline.observer(Arc::new(observer));
    let work = Work { known: true, ..Work::new(case, rank, device).unwrap() };
    let (mut descent, before) = (Descent::new(case, &work), parameters().now);
    device.ledger().unwrap().reset_peak();
    pipeline.train(&Arc::new(work), &mut descent).unwrap();
    assert_eq!(parameters().now, before, "one version is left");
    let heard = heard.lock().unwrap().clone();
    (heard, parameters().peak, before)
}

#[test]
fn weight_stashing_holds_a_version_more_than_the_warm_up() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (stages, micro_batches) in [(1, 5), (2, 7), (4, 11)] {
        for rank in 0..stages {
            let case = Case::new(Scheme::Stashing, stages, micro_batches);
            let (books, peak, each) = weights(&case, rank);
            let warm_up = stages - rank - 1;
            assert_eq!(peak, (warm_up + 1) * each, "rank {rank} of {stages}");
            // After update u the micro-batches u + 1 to u + warm_up are on their way, with the versions from u + 1 - warm_up on.
            let updates = books.iter().filter(|(kind, _)| *kind == ActionKind::Update);
            for (u, &(_, bytes)) in updates.enumerate() {
                let under_way = u + 1..(u + 1 + warm_up).min(micro_batches);
                let mut versions: Vec<usize> = under_way.map(|m| m.saturating_sub(warm_up)).collect();
                versions.push(u + 1);
                versions.dedup();
                assert_eq!(bytes, versions.len() * each, "rank {rank} of {stages}, update {u}: {books:?}");
            }
        }
    }
}

#[test]
fn double_buffers_hold_two_versions() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (stages, interval) in [(1, 1), (1, 3), (2, 2), (4, 4), (4, 6)] {
        for rank in 0..stages {
            let case = Case::new(Scheme::DoubleBuffered(interval), stages, 3 * interval + 1);
            let (books, peak, each) = weights(&case, rank);
            assert_eq!(peak, 2 * each, "rank {rank} of {stages}, an update every {interval}");
            let most = books.iter().map(|&(_, bytes)| bytes).max();
            assert_eq!(most, Some(2 * each), "rank {rank} of {stages}, an update every {interval}");
        }
    }
}

#[test]
fn replicas_hold_the_versions_that_the_schedule_counts() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for replicas in [&[2, 1][..], &[1, 3], &[2, 1, 3]] {
        for scheme in [Scheme::Stashing, Scheme::VerticalSync, Scheme::DoubleBuffered(6)] {
            let case = Case::over(scheme, replicas, 24);
            let (plan, kept) = (case.plan(), case.plan().verify(0).unwrap());
            for (stage, &kept) in kept.iter().enumerate() {
                let held = plan.schedule.ranks_of(stage).map(|rank| {
                    let (_, peak, each) = weights(&case, rank);
                    assert_eq!(peak % each, 0, "{replicas:?}, {scheme:?}, rank {rank}");
                    peak / each
                });
                assert_eq!(held.max(), Some(kept), "{replicas:?}, {scheme:?}, stage {stage}");
            }
        }
    }
}
