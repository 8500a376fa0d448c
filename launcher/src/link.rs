//! The run's store, as the launcher serves it ([`serve`]) and speaks with it ([`Link`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use phalanx_rendezvous::{Absent, Node, Store};

use crate::options::{Options, show};
use crate::say;

/// Between two looks at what the store says.
const PAUSE: Duration = Duration::from_millis(100);

/// The store of the run, listening.
///
/// # Errors
/// If its port is taken, or its address is none of this machine.
pub(crate) fn serve(options: &Options) -> Result<Option<Store>, String> {
    let Some(place) = options.store.as_ref().filter(|_| options.serves) else { return Ok(None) };
    let store = Store::bind(&place.0, place.1, options.known.clone(), options.least..=options.world_size());
    store.map(Some).map_err(|error| format!("the store cannot listen at {}: {error}", show(place)))
}

/// The number of launchers and ranks that are connected with the store.
pub(crate) type Visitors = Arc<AtomicUsize>;

/// Serves on a thread that lives as long as the launcher.
pub(crate) fn serve_on_a_thread(store: Store) -> Visitors {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let visitors = store.visitors();
    thread::spawn(|| store.serve(&NEVER));
    visitors
}

/// Serves until a signal comes.
///
/// # Errors
/// As [`serve`].
pub(crate) fn serve_alone(options: &Options) -> Result<u8, String> {
    let stop = Arc::new(AtomicBool::new(false));
    #[cfg(unix)]
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let set = signal_hook::flag::register(signal, stop.clone());
        set.map_err(|error| format!("signals: {error}"))?;
    }
    if let Some(store) = serve(options)? {
        say(&format!(
            "the store of {} ranks listens at {}",
            options.world_size(),
            options.store.as_ref().map(show).unwrap_or_default()
        ));
        store.serve(&stop);
    }
    Ok(0)
}

/// What the store is told.
enum Tell {
    /// The run ends.
    End(String),
    /// This rank is started no more.
    Lose(usize, String),
    /// A rank is started again after this time.
    Wait(Duration),
}

/// What the store says.
pub(crate) enum Heard {
    /// The run is over, why. Nothing follows.
    Over(String),
    /// Ranks do not come.
    Absent(Absent),
}

/// A thread that is connected with the store.
pub(crate) struct Link {
    tell: Sender<Tell>,
    thread: JoinHandle<()>,
}

impl Link {
    /// Calls `hear` with what the store says.
    pub(crate) fn new(options: &Options, hear: impl Fn(Heard) + Send + 'static) -> Option<Link> {
        let place = (options.node_rank, options.world_size());
        let node = Node::new(options.store.clone()?, options.known.clone(), place);
        let (tell, told) = channel();
        Some(Link { tell, thread: thread::spawn(move || watch(node, &told, hear)) })
    }

    /// Ends the run, for all ranks that are to meet.
    pub(crate) fn end(&self, why: String) {
        // A link that has ended knows that the run is over.
        let _ = self.tell.send(Tell::End(why));
    }

    /// Gives up a rank, without which the run may go on.
    pub(crate) fn lose(&self, rank: usize, why: String) {
        let _ = self.tell.send(Tell::Lose(rank, why));
    }

    /// A rank is started again after this time.
    pub(crate) fn wait(&self, pause: Duration) {
        let _ = self.tell.send(Tell::Wait(pause));
    }

    /// Whether the store knows that the run is over.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }
}

fn watch(mut node: Node, told: &Receiver<Tell>, hear: impl Fn(Heard)) {
    let mut waiting = VecDeque::new();
    loop {
        match told.recv_timeout(PAUSE) {
            Ok(tell) => waiting.push_back(tell),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        match waiting.front() {
            // This launcher knows why.
            Some(Tell::End(why)) if node.end(why) => return,
            Some(Tell::Lose(rank, why)) if node.lose(*rank, why) => drop(waiting.pop_front()),
            Some(Tell::Wait(pause)) if node.wait(*pause) => drop(waiting.pop_front()),
            _ => {
                if let Some(why) = node.over() {
                    return hear(Heard::Over(why.to_string()));
                }
            }
        }
        node.absent().into_iter().for_each(|absent| hear(Heard::Absent(absent)));
    }
}
