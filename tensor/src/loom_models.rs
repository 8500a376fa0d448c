//! loom's models of what threads share: the jobs of a pool, and the counts of a storage's users and handles. Each runs every interleaving
//! of a few threads, those of the pool up to a number of preemptions.
//!
//! `cargo test -p phalanx-tensor --release --features loom --lib loom_models`
#![allow(unsafe_code)]

mod storage {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::thread;

    use crate::storage::guard::{Handles, InUse, Users};

    /// A storage reduced to its counts, and elements whose accesses loom checks.
    struct Model {
        users: InUse,
        handles: Handles,
        elements: UnsafeCell<u32>,
    }

    impl Model {
        fn new(handles: u32) -> Arc<Model> {
            let model =
                Model { users: InUse::default(), handles: Handles::one(), elements: UnsafeCell::new(0) };
            (1..handles).for_each(|_| model.handles.add());
            Arc::new(model)
        }

        /// The elements, unless there is a writer. A storage would wait, which a model of all interleavings cannot.
        fn read(&self, token: u32) -> Option<u32> {
            let there =
                self.users.enter_reader(token) || self.users.enter(&|users| users.and_reader(token), false);
            // SAFETY: no thread writes, or loom reports it.
            let read = there.then(|| self.elements.with(|elements| unsafe { *elements }))?;
            self.users.leave(Users::reader(token));
            Some(read)
        }

        /// Writes if there is no other user; returns whether it did.
        fn write(&self, token: u32) -> bool {
            let there = self.users.enter(&|users| users.and_writer(token), false);
            if there {
                self.change();
                self.users.leave(Users::writer(token));
            }
            there
        }

        fn change(&self) {
            // SAFETY: no other thread reads or writes, or loom reports it.
            self.elements.with_mut(|elements| unsafe { *elements += 1 });
        }
    }

    // SAFETY: the models check it; loom reports a violation.
    unsafe impl Sync for Model {}
    // SAFETY: as above.
    unsafe impl Send for Model {}

    #[test]
    fn two_writers_and_a_reader_are_never_there_at_once() {
        loom::model(|| {
            let model = Model::new(1);
            let writers = [1, 2].map(|token| {
                let model = model.clone();
                thread::spawn(move || u32::from(model.write(token)))
            });
            let read = model.read(3);
            let wrote = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
            assert!(read.is_some_and(|read| read <= wrote) || wrote > 0);
            assert_eq!(model.read(3), Some(wrote), "those who were refused have left nothing behind");
        });
    }

    #[test]
    fn readers_are_there_together_and_a_writer_is_not_beside_them() {
        loom::model(|| {
            let model = Model::new(1);
            let readers = [1, 2].map(|token| {
                let model = model.clone();
                thread::spawn(move || model.read(token))
            });
            let wrote = model.write(3);
            let read = readers.map(|reader| reader.join().unwrap());
            assert!(wrote || read.iter().all(|read| *read == Some(0)), "{wrote} {read:?}");
            assert!(model.write(3), "all have left");
        });
    }

    #[test]
    fn a_sole_handle_writes_untold_and_the_last_one_frees() {
        loom::model(|| {
            let model = Model::new(2);
            let drop_handle = |model: &Model| {
                if model.handles.remove() {
                    model.change(); // as the next tensor would that gets the storage
                }
            };
            let other = thread::spawn({
                let model = model.clone();
                move || {
                    model.read(1);
                    drop_handle(&model);
                }
            });
            if model.handles.is_sole() {
                model.change();
            } else {
                model.write(2);
            }
            drop_handle(&model);
            other.join().unwrap();
        });
    }
}

mod pool {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use crate::pool::workers::WorkerGroup;

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
                // SAFETY: a piece is one thread's, or loom reports it.
                place.with_mut(|place| unsafe { *place += 1 });
            }
        }

        /// Runs on the group, and asserts that each piece was done once.
        fn run(group: &WorkerGroup, invite: impl FnOnce()) {
            let job = Job::<PIECES> {
                next: AtomicUsize::new(0),
                places: std::array::from_fn(|_| UnsafeCell::new(0)),
            };
            // SAFETY: each model has one caller, and nothing unwinds unless the model has failed.
            unsafe { group.run(&|| job.share(), invite) };
            // SAFETY: all helpers have left, or loom reports it.
            job.places.iter().for_each(|place| place.with(|place| assert_eq!(unsafe { *place }, 1)));
        }
    }

    // SAFETY: the models check it; loom reports a violation.
    unsafe impl<const PIECES: usize> Sync for Job<PIECES> {}

    #[test]
    fn a_worker_helps_with_job_after_job_and_hears_of_the_end() {
        model(3, || {
            let group = Arc::new(WorkerGroup::default());
            let worker = thread::spawn({
                let group = group.clone();
                move || group.work()
            });
            Job::<2>::run(&group, || ());
            Job::<1>::run(&group, || ());
            group.close();
            worker.join().unwrap();
        });
    }

    #[test]
    fn two_workers_share_a_job() {
        model(2, || {
            let group = Arc::new(WorkerGroup::default());
            let workers = [(); 2].map(|()| {
                let group = group.clone();
                thread::spawn(move || group.work())
            });
            Job::<2>::run(&group, || ());
            group.close();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
    }

    #[test]
    fn a_guest_comes_to_the_job_it_was_invited_to_or_to_a_later_one_or_to_none() {
        model(3, || {
            let group = Arc::new(WorkerGroup::default());
            let guests = std::sync::Mutex::new(Vec::new());
            let invite = || {
                group.invite(1, || {
                    let group = group.clone();
                    guests.lock().unwrap().push(thread::spawn(move || group.follow_invitation()));
                });
            };
            Job::<2>::run(&group, invite);
            Job::<1>::run(&group, invite);
            let guests = guests.into_inner().unwrap();
            assert!((1..=2).contains(&guests.len()));
            guests.into_iter().for_each(|guest| guest.join().unwrap());
        });
    }
}
