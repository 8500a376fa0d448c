//! loom's models of the crew: every interleaving of a caller and its helpers, up to a number of preemptions.
//!
//! `cargo test -p phalanx-tensor --release --features loom --lib models`

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::crew::Crew;

fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(run);
}

/// Pieces that write to places of their own.
struct Job<const PIECES: usize> {
    next: AtomicUsize,
    places: [UnsafeCell<usize>; PIECES],
}

impl<const PIECES: usize> Job<PIECES> {
    /// What each thread does.
    fn share(&self) {
        while let Some(place) = self.places.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: a piece is one thread's, or loom says so.
            place.with_mut(|place| unsafe { *place += 1 });
        }
    }

    /// Runs on the crew and finds each piece done once, by whomever, when it is back; then the places are gone.
    fn run(crew: &Crew, invite: impl FnOnce()) {
        let job =
            Job::<PIECES> { next: AtomicUsize::new(0), places: std::array::from_fn(|_| UnsafeCell::new(0)) };
        // SAFETY: each model has one caller, and nothing unwinds unless the model has failed.
        unsafe { crew.run(&|| job.share(), invite) };
        // SAFETY: all have left, or loom says so.
        job.places.iter().for_each(|place| place.with(|place| assert_eq!(unsafe { *place }, 1)));
    }
}

// SAFETY: what the models are to show; loom says if it is not so.
unsafe impl<const PIECES: usize> Sync for Job<PIECES> {}

#[test]
fn a_worker_helps_with_job_after_job_and_hears_of_the_end() {
    model(3, || {
        let crew = Arc::new(Crew::default());
        let worker = thread::spawn({
            let crew = crew.clone();
            move || crew.work()
        });
        Job::<2>::run(&crew, || ());
        Job::<1>::run(&crew, || ());
        crew.close();
        worker.join().unwrap();
    });
}

#[test]
fn two_workers_share_a_job() {
    model(2, || {
        let crew = Arc::new(Crew::default());
        let workers = [(); 2].map(|()| {
            let crew = crew.clone();
            thread::spawn(move || crew.work())
        });
        Job::<2>::run(&crew, || ());
        crew.close();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
}

#[test]
fn a_guest_comes_to_the_job_it_was_invited_to_or_to_a_later_one_or_to_none() {
    model(3, || {
        let crew = Arc::new(Crew::default());
        let guests = std::sync::Mutex::new(Vec::new());
        let invite = || {
            crew.invite(1, || {
                let crew = crew.clone();
                guests.lock().unwrap().push(thread::spawn(move || crew.come()));
            });
        };
        Job::<2>::run(&crew, invite);
        Job::<1>::run(&crew, invite);
        let guests = guests.into_inner().unwrap();
        assert!((1..=2).contains(&guests.len()));
        guests.into_iter().for_each(|guest| guest.join().unwrap());
    });
}
