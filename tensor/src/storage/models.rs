//! loom's models of a storage's users and handles: every interleaving of a few threads.
//!
//! `cargo test -p phalanx-tensor --release --features loom --lib models`

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::handles::Handles;
use super::users::{InUse, Users};

/// What a storage is for these models: its counts, and elements of which loom knows who touches them when.
struct Model {
    users: InUse,
    handles: Handles,
    elements: UnsafeCell<u32>,
}

impl Model {
    fn new(handles: u32) -> Arc<Model> {
        let model = Model { users: InUse::default(), handles: Handles::one(), elements: UnsafeCell::new(0) };
        (1..handles).for_each(|_| model.handles.add());
        Arc::new(model)
    }

    /// What is read, unless a writer is there. A storage would wait, which a model of all interleavings cannot.
    fn read(&self, token: u32) -> Option<u32> {
        let there = self.users.enter_reader(token) || self.users.enter(&|users| users.and_reader(token));
        // SAFETY: nobody writes, or loom says so.
        let read = there.then(|| self.elements.with(|elements| unsafe { *elements }))?;
        self.users.leave(Users::reader(token));
        Some(read)
    }

    /// Whether it could, nobody else being there.
    fn write(&self, token: u32) -> bool {
        let there = self.users.enter(&|users| users.and_writer(token));
        if there {
            self.change();
            self.users.leave(Users::writer(token));
        }
        there
    }

    fn change(&self) {
        // SAFETY: nobody else reads or writes, or loom says so.
        self.elements.with_mut(|elements| unsafe { *elements += 1 });
    }
}

// SAFETY: what the models are to show; loom says if it is not so.
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
