//! How ranks become a communicator: those with the same id, or those of a communicator that is split.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use phalanx_emulator_link::lock;

use crate::message::Message;
use crate::relay::{self, Ranks, Relay, UniqueId};
use crate::rendezvous::Rendezvous;
use crate::status::{Failure, Result, Status};

/// How long a rank waits for others, in milliseconds.
const TIMEOUT: &str = "PHALANX_EMULATOR_NCCL_TIMEOUT_MS";

/// How long a rank waits for others.
pub(crate) fn timeout() -> Duration {
    let set = env::var(TIMEOUT).ok().and_then(|text| text.parse().ok());
    Duration::from_millis(set.unwrap_or(60_000))
}

/// A new id, by which ranks of this process and of others find each other.
pub(crate) fn unique_id() -> UniqueId {
    UniqueId::new(relay::port(arrived))
}

/// Which ranks gather: those with an id, or those of a split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum GatheringKey {
    Id(UniqueId),
    /// The n-th split of the communicator whose rendezvous is at this address. Its ranks keep it alive.
    Split(usize, u64),
}

/// Lets several ranks of a communicator share a GPU.
const SHARED_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The colour and the key that a rank of a split comes with; zeros for a new communicator.
type ColourAndKey = (i32, i32);

/// What a rank comes with.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    colour_and_key: ColourAndKey,
    /// Its GPU; none in a split, whose ranks have theirs.
    device: Option<i32>,
}

/// A rank's place in a communicator: the rendezvous, and its rank there.
type Seat = (Arc<Rendezvous>, usize);

/// Ranks that have come, until all are there and each has taken its seat.
#[derive(Debug, Default)]
struct Gathering {
    ranks: usize,
    /// The ranks that have come.
    came: BTreeMap<usize, Arrival>,
    /// Those of them that are in other processes.
    elsewhere: Vec<usize>,
    /// Why they do not become a communicator.
    refusal: Option<Failure>,
    seats: BTreeMap<usize, Seat>,
}

static GATHERINGS: LazyLock<Mutex<HashMap<GatheringKey, Gathering>>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

fn gatherings() -> MutexGuard<'static, HashMap<GatheringKey, Gathering>> {
    lock(&GATHERINGS)
}

/// A rank that has come, and waits for the others.
#[derive(Debug)]
pub(crate) struct Joining {
    key: GatheringKey,
    rank: usize,
    /// The way to other processes, if there can be any.
    relay: Option<Arc<Relay>>,
    seat: OnceLock<Seat>,
}

impl Joining {
    /// A rank of a new communicator comes.
    pub(crate) fn by_id(id: UniqueId, rank: usize, ranks: usize, device: i32) -> Result<Joining> {
        if !id.is_ours() && !id.is_emulated() {
            return Err(Status::INVALID_ARGUMENT.because("the unique id was made by another library"));
        }
        let relay = relay::open(id, arrived).map_err(|error| {
            Status::SYSTEM_ERROR
                .because(format!("the process that made the unique id cannot be reached: {error}"))
        })?;
        let arrival = Arrival { colour_and_key: (0, 0), device: Some(device) };
        let joining = Joining::come(GatheringKey::Id(id), rank, ranks, arrival)?;
        relay.tell(&Message::Hello { rank, ranks, device });
        Ok(Joining { relay: Some(relay), ..joining })
    }

    /// A rank comes to the `number`th split of its communicator.
    pub(crate) fn by_split(
        rendezvous: &Arc<Rendezvous>,
        number: u64,
        rank: usize,
        colour_and_key: ColourAndKey,
    ) -> Result<Joining> {
        if !rendezvous.is_here() {
            let why = "a split of a communicator of several processes is not emulated";
            return Err(Status::INVALID_USAGE.because(why));
        }
        Joining::come(
            GatheringKey::Split(Arc::as_ptr(rendezvous) as usize, number),
            rank,
            rendezvous.ranks,
            Arrival { colour_and_key, device: None },
        )
    }

    fn come(key: GatheringKey, rank: usize, ranks: usize, arrival: Arrival) -> Result<Joining> {
        add(key, rank, ranks, arrival, false)?;
        Ok(Joining { key, rank, relay: None, seat: OnceLock::new() })
    }

    /// The rank's seat, if all have come.
    pub(crate) fn seat(&self) -> Option<&Seat> {
        if let Some(seat) = self.seat.get() {
            return Some(seat);
        }
        // Its process may end once it has one: the others have to have been told that it came.
        if self.relay.as_ref().is_some_and(|relay| !relay.is_flushed()) {
            return None;
        }
        // Of several threads that ask, one takes it from the gathering; the others find it here when they get the lock.
        let mut gatherings = gatherings();
        if let Some(gathering) = gatherings.get_mut(&self.key)
            && let Some(seat) = gathering.seats.remove(&self.rank)
        {
            if gathering.seats.is_empty() {
                gatherings.remove(&self.key);
            }
            self.seat.get_or_init(|| seat);
        }
        self.seat.get()
    }

    /// Why the ranks that have come do not become a communicator, if they do not.
    pub(crate) fn refusal(&self) -> Option<Failure> {
        gatherings().get(&self.key)?.refusal.clone()
    }

    /// Waits for the others.
    ///
    /// # Errors
    /// Ranks that do not come in time, or that share a GPU.
    pub(crate) fn wait(&self) -> Result<&Seat> {
        let start = Instant::now();
        loop {
            if let Some(seat) = self.seat() {
                return Ok(seat);
            }
            if let Some(refusal) = self.refusal() {
                return Err(refusal);
            }
            let gatherings = gatherings();
            let (absent, ranks) = gatherings.get(&self.key).map_or((Vec::new(), 0), |gathering| {
                let absent = (0..gathering.ranks).filter(|rank| !gathering.came.contains_key(rank)).collect();
                (absent, gathering.ranks)
            });
            if start.elapsed() > timeout() {
                let why =
                    format!("rank {} of {ranks} waits for ranks {absent:?}, which do not come", self.rank);
                return Err(Status::TIMEOUT.because(why));
            }
            // If none is absent, others are being told of this one.
            let nap = Duration::from_millis(if absent.is_empty() { 1 } else { 20 });
            let waited = CHANGED.wait_timeout(gatherings, nap);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// Notes that a rank has come; with the last, all have seats.
fn add(key: GatheringKey, rank: usize, ranks: usize, arrival: Arrival, is_elsewhere: bool) -> Result<()> {
    let mut gatherings = gatherings();
    let gathering = gatherings.entry(key).or_default();
    let wrong = |why: String| Err(Status::INVALID_ARGUMENT.because(why));
    if gathering.came.is_empty() {
        gathering.ranks = ranks;
    } else if gathering.ranks != ranks {
        return wrong(format!("rank {rank} says {ranks} ranks, another one said {}", gathering.ranks));
    }
    if gathering.came.insert(rank, arrival).is_some() {
        return wrong(format!("rank {rank} comes twice"));
    }
    if is_elsewhere {
        gathering.elsewhere.push(rank);
    }
    if gathering.came.len() == ranks {
        gathering.refusal = on_one_gpu(&gathering.came);
    }
    if gathering.came.len() == ranks && gathering.refusal.is_none() {
        gathering.seats = match key {
            GatheringKey::Id(id) if !gathering.elsewhere.is_empty() => {
                seats_across(id, ranks, &gathering.elsewhere)?
            }
            _ => seats(&gathering.came),
        };
    }
    drop(gatherings);
    CHANGED.notify_all();
    Ok(())
}

/// A rank has come in another process.
pub(crate) fn arrived(id: UniqueId, rank: usize, ranks: usize, device: i32) {
    let arrival = Arrival { colour_and_key: (0, 0), device: Some(device) };
    if let Err(error) = add(GatheringKey::Id(id), rank, ranks, arrival, true) {
        eprintln!("phalanx emulated NCCL: {}", error.message);
    }
}

/// The error of two ranks that are on one GPU, unless that is allowed.
fn on_one_gpu(came: &BTreeMap<usize, Arrival>) -> Option<Failure> {
    let mut on = BTreeMap::new();
    let mut same = came.iter().filter_map(|(rank, arrival)| {
        let device = arrival.device?;
        on.insert(device, *rank).map(|other| format!("ranks {other} and {rank} are both on device {device}"))
    });
    let why = same
        .next()
        .filter(|_| env::var(SHARED_GPUS).is_err() || env::var(SHARED_GPUS).as_deref() == Ok("0"))?;
    Some(Status::INVALID_USAGE.because(format!("duplicate GPU: {why}")))
}

/// One rendezvous, with seats for the ranks that are here.
fn seats_across(id: UniqueId, ranks: usize, elsewhere: &[usize]) -> Result<BTreeMap<usize, Seat>> {
    let relay = relay::open(id, arrived).map_err(|error| Status::SYSTEM_ERROR.because(error.to_string()))?;
    let rendezvous = Arc::new(Rendezvous::across(ranks, timeout(), elsewhere.to_vec(), relay.clone()));
    relay.meet(&(rendezvous.clone() as Arc<dyn Ranks>));
    let here = (0..ranks).filter(|rank| !elsewhere.contains(rank));
    Ok(here.map(|rank| (rank, (rendezvous.clone(), rank))).collect())
}

/// One rendezvous a colour, ranks by key and then by their old rank.
fn seats(came: &BTreeMap<usize, Arrival>) -> BTreeMap<usize, Seat> {
    let mut colours: BTreeMap<i32, Vec<(i32, usize)>> = BTreeMap::new();
    for (rank, Arrival { colour_and_key: (colour, key), .. }) in came {
        colours.entry(*colour).or_default().push((*key, *rank));
    }
    let mut seats = BTreeMap::new();
    for members in colours.values_mut() {
        members.sort_unstable();
        let rendezvous = Arc::new(Rendezvous::new(members.len(), timeout()));
        for (seat, (_, rank)) in members.iter().enumerate() {
            seats.insert(*rank, (rendezvous.clone(), seat));
        }
    }
    seats
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_split_seats_ranks_of_a_colour_by_key() {
        let arrival = |colour_and_key| Arrival { colour_and_key, device: None };
        let came = [(0, (7, 5)), (1, (3, 0)), (2, (7, 1)), (3, (3, 0))];
        let seats = seats(&came.into_iter().map(|(rank, of)| (rank, arrival(of))).collect());
        let seat = |rank: usize| (seats[&rank].1, seats[&rank].0.ranks);
        assert_eq!([0, 1, 2, 3].map(seat), [(1, 2), (0, 2), (0, 2), (1, 2)]);
        assert!(Arc::ptr_eq(&seats[&0].0, &seats[&2].0) && !Arc::ptr_eq(&seats[&0].0, &seats[&1].0));
    }

    #[test]
    fn of_several_threads_that_ask_for_a_seat_at_once_all_get_it() {
        for _ in 0..200 {
            let (id, begin) = (unique_id(), Barrier::new(3));
            let rank = |rank| Joining::by_id(id, rank, 2, rank as i32).unwrap();
            let (joining, _other) = (rank(0), rank(1));
            std::thread::scope(|scope| {
                for asks in [true, false, false] {
                    let (joining, begin) = (&joining, &begin);
                    scope.spawn(move || {
                        begin.wait();
                        if asks { joining.seat().is_some() } else { joining.wait().is_ok() }
                    });
                }
            });
            assert_eq!(joining.seat().unwrap().1, 0);
        }
    }
}
