//! loom's models of the engine's state machine: every interleaving of a few threads, up to a number of preemptions.
//!
//! `cargo test -p phalanx-parallel --release --features loom --lib engine::loom_models`
//!
//! loom finds races that are lost in a million runs: it runs a model once for each order in which its threads can touch
//! the locks and atomics, and reports a thread that waits for ever as a deadlock.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::thread;
use smallvec::smallvec;

use super::completion::{Completion, Started};
use super::node::{FreeList, Given, Node, NodeKind, Outcome, recycled};
use super::op::{Lane, Op};
use super::queue::ReadyQueue;
use super::runner::{Ender, EngineCore, Runner};
use super::variable::{Ready, Variable, enter, leave};
use super::wait::{Progress, Signal};

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(3);
    builder.check(run);
}

/// Counts its runs, and fails if another one that may not runs at the same time.
struct Probe {
    /// Writes count 100, reads 1.
    inside: Arc<AtomicUsize>,
    ran: Arc<AtomicUsize>,
    weight: usize,
}

impl Probe {
    fn run(&self) {
        let before = self.inside.fetch_add(self.weight, Ordering::Relaxed);
        assert!(if self.weight == 100 { before == 0 } else { before < 100 }, "not alone");
        self.inside.fetch_sub(self.weight, Ordering::Relaxed);
        self.ran.fetch_add(1, Ordering::Relaxed);
    }
}

/// Pushes an operation, and runs all operations that become ready.
fn push_and_run(op: Op<'_>, probe: Probe, pushed: &AtomicU64, free_nodes: &FreeList) {
    let work = move |_: Given<'_>| {
        probe.run();
        Ok(())
    };
    let node = free_nodes.take(|node| node.fill(op, 0, NodeKind::Plain, work));
    let mut ready: Ready = enter(node, pushed).unwrap().into_iter().collect();
    while let Some(node) = ready.pop() {
        node.run();
        leave(&node, true, None, &mut ready);
        free_nodes.keep(recycled(node));
    }
}

/// Threads that each push one operation, which writes or reads both of two variables, named in either order.
fn pushes(writes: &'static [bool]) {
    model(move || {
        let variables = [Variable::new(1, 0), Variable::new(2, 0)];
        let (inside, ran) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (pushed, free_nodes) = (Arc::new(AtomicU64::new(0)), Arc::new(FreeList::new()));
        let push = |n: usize| {
            let ([a, b], pushed, free_nodes) = (variables.clone(), pushed.clone(), free_nodes.clone());
            let weight = if writes[n] { 100 } else { 1 };
            let probe = Probe { inside: inside.clone(), ran: ran.clone(), weight };
            move || {
                let both = if n % 2 == 0 { [&a, &b] } else { [&b, &a] };
                let op = Op::new("op");
                let op = if writes[n] { op.mutates(&both) } else { op.reads(&both) };
                push_and_run(op, probe, &pushed, &free_nodes);
            }
        };
        let threads: Vec<_> = (1..writes.len()).map(|n| thread::spawn(push(n))).collect();
        push(0)();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(ran.load(Ordering::Relaxed), writes.len(), "each runs once, and no thread waits for ever");
        let written = writes.iter().filter(|w| **w).count() as u64;
        assert_eq!(variables.map(|v| v.version()), [written; 2]);
    });
}

#[test]
fn two_writes_of_two_variables() {
    pushes(&[true, true]);
}

#[test]
fn a_write_and_two_reads() {
    pushes(&[true, false, false]);
}

#[test]
fn two_writes_and_a_read() {
    pushes(&[true, true, false]);
}

#[test]
fn a_queue_loses_no_item_and_no_worker() {
    for workers in [1, 2] {
        model(move || {
            let (queue, taken) = (Arc::new(ReadyQueue::new()), Arc::new(AtomicUsize::new(0)));
            let work = || {
                let (queue, taken) = (queue.clone(), taken.clone());
                // Half of the items bring one more.
                move || {
                    let mut more: Option<(i32, usize)> = None;
                    while let Some(item) = queue.exchange(more.take().into_iter(), || ()) {
                        more = (item == 1).then_some((1, 2));
                        if taken.fetch_add(1, Ordering::Relaxed) == 2 {
                            queue.close(); // an item for which no worker was woken would leave all asleep
                        }
                    }
                }
            };
            let threads: Vec<_> = (0..workers).map(|_| thread::spawn(work())).collect();
            queue.push(0, 0);
            queue.push(0, 1);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(taken.load(Ordering::Relaxed), 3);
        });
    }
}

#[test]
fn a_wait_for_all_hears_the_last_worker() {
    model(|| {
        let progress = Arc::new(Progress::new(2));
        progress.pushed.0.store(2, Ordering::Relaxed);
        let ran = Arc::new(AtomicUsize::new(0));
        let work = |worker| {
            let (progress, ran) = (progress.clone(), ran.clone());
            move || {
                ran.fetch_add(1, Ordering::Relaxed);
                progress.done(worker);
                progress.idle();
            }
        };
        let threads = [0, 1].map(|worker| thread::spawn(work(worker)));
        progress.wait();
        assert_eq!(ran.load(Ordering::Relaxed), 2, "it has run, and what it did is seen");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_wait_for_one_hears_its_signal() {
    model(|| {
        let (variable, pushed) = (Variable::new(1, 0), Arc::new(AtomicU64::new(0)));
        let (free_nodes, ran) = (FreeList::new(), Arc::new(AtomicUsize::new(0)));
        let counted = ran.clone();
        let work = move |_: Given<'_>| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let mutates = [&variable];
        let write = Op::new("op").mutates(&mutates);
        let node = free_nodes.take(|node| node.fill(write, 0, NodeKind::Plain, work));
        let node = enter(node, &pushed).unwrap().unwrap();
        let worker = thread::spawn(move || {
            node.run();
            let mut ready: Ready = smallvec![];
            leave(&node, true, None, &mut ready);
            super::runner::end_waits(&mut ready);
        });
        let signal = Arc::new(Signal::new());
        let wait = Op::new("wait").mutates(&mutates);
        let wait = free_nodes.take(|node| node.fill(wait, 0, NodeKind::Wait, signal.clone().notifier()));
        if let Some(wait) = enter(wait, &pushed).unwrap() {
            super::runner::end_waits(&mut smallvec![wait]);
        }
        assert!(signal.wait().is_none());
        assert_eq!((ran.load(Ordering::Relaxed), variable.version()), (1, 1));
        worker.join().unwrap();
    });
}

/// A runner without threads, for operations that complete by callback.
struct Callbacks(EngineCore);

impl Runner for Callbacks {
    fn core(&self) -> &EngineCore {
        &self.0
    }

    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, _: Arc<Node>) {
        unreachable!("only waits are granted here")
    }

    fn ended(&self, node: Arc<Node>, outcome: Outcome) {
        let mut ready: Ready = smallvec![];
        self.0.end(&node, outcome, Ender::Other, &mut ready);
        assert!(ready.is_empty());
        self.0.progress.idle();
    }

    fn shut_down(&self) {}
}

/// An operation completes on another thread while its closure returns, and a thread waits for it.
fn completion_races(wait: impl Fn(&Callbacks, &Variable) + Send + Sync + 'static, is_dropped: bool) {
    model(move || {
        let (variable, runner) = (Variable::new(1, 0), Arc::new(Callbacks(EngineCore::new(0, 0))));
        let mutates = [&variable];
        let (same, complete) = (runner.clone(), move |completion: Completion| {
            thread::spawn(move || if is_dropped { drop(completion) } else { completion.complete(Ok(())) });
            Ok(())
        });
        let op = Op::new("copy").mutates(&mutates);
        let work = move |given: Given<'_>| {
            Started::begin(given.node, same, complete);
            Ok(())
        };
        let node = runner.0.free_nodes.take(|node| node.fill(op, 0, NodeKind::Async, work));
        let node = enter(node, &runner.0.progress.pushed.0).unwrap().unwrap();
        let worker = thread::spawn(move || assert!(matches!(node.run(), Outcome::Started)));
        wait(&runner, &variable);
        assert_eq!(variable.version(), 1, "the wait comes after the operation");
        worker.join().unwrap();
    });
}

#[test]
fn a_completion_races_a_wait_for_its_variable() {
    for is_dropped in [false, true] {
        let wait = move |runner: &Callbacks, variable: &Variable| {
            let (signal, mutates) = (Arc::new(Signal::new()), [variable]);
            let op = Op::new("wait").mutates(&mutates);
            let notify = signal.clone().notifier();
            let wait = runner.0.free_nodes.take(|node| node.fill(op, 0, NodeKind::Wait, notify));
            if let Some(wait) = enter(wait, &runner.0.progress.pushed.0).unwrap() {
                super::runner::end_waits(&mut smallvec![wait]);
            }
            assert_eq!(signal.wait().is_some(), is_dropped, "what is dropped fails");
        };
        completion_races(wait, is_dropped);
    }
}

#[test]
fn a_completion_races_a_wait_for_all() {
    completion_races(|runner, _| runner.0.progress.wait(), false);
}
