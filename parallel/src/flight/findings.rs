//! [`Findings`]: why a run hangs, as its dumps tell: the first call on which ranks disagree, and who waits for whom.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

use super::dump::Entry;
use super::dumps::{Dumps, Place, Stream};
use phalanx_rendezvous::{clean, name_ranks};

/// What the dumps of a run say.
#[derive(Debug)]
pub struct Findings<'a> {
    dumps: &'a Dumps,
    /// The first call on which ranks disagree.
    pub disagreement: Option<Disagreement<'a>>,
    /// Each rank that waits, and for whom.
    pub waits: Vec<Wait<'a>>,
    /// The ranks of a circle of waits: a deadlock. Empty if there is none.
    pub circle: Vec<usize>,
    /// The last call that all ranks of its group completed which have a dump, of the largest such group, and its place.
    pub last_common: Option<(String, &'a Entry)>,
}

/// A call that the ranks of a group came to unlike.
#[derive(Clone, Debug)]
pub struct Disagreement<'a> {
    /// `call 3 of ranks [0, 1]`, or `message 3 from rank 0 to rank 1`.
    pub place: String,
    /// What each rank of the group called there; none if it has not come there.
    pub calls: BTreeMap<usize, Option<&'a Entry>>,
    /// Whether calls differ. If not, ranks have not come.
    pub differs: bool,
}

/// A rank waits for others to come to a call.
#[derive(Clone, Debug)]
pub struct Wait<'a> {
    /// The rank that waits.
    pub rank: usize,
    /// The ranks that have not come.
    pub missing: Vec<usize>,
    /// The call.
    pub call: &'a Entry,
    /// The call's place.
    pub place: String,
}

impl<'a> Findings<'a> {
    /// Compares the dumps, group by group.
    pub fn of(dumps: &'a Dumps) -> Findings<'a> {
        let streams = dumps.streams();
        let (mut waits, mut unlike) = (Vec::new(), Vec::new());
        for (place, stream) in &streams {
            let numbers: HashMap<usize, usize> =
                stream.members.iter().enumerate().map(|(number, &rank)| (rank, number)).collect();
            for (&sequence, calls) in &stream.calls {
                let missing = stream.missing(sequence);
                let under_way = calls.values().any(|call| call.ended_us.is_none());
                let differs = differ(calls, &numbers);
                if differs || (under_way && !missing.is_empty()) {
                    let of = |rank: &usize| (*rank, calls.get(rank).copied());
                    let calls = stream.members.iter().map(of).collect();
                    unlike.push((
                        Disagreement { place: named(place, stream, sequence), calls, differs },
                        missing.clone(),
                    ));
                }
                let waiting = calls.iter().filter(|(_, call)| call.is_waited() && !missing.is_empty());
                waits.extend(waiting.map(|(&rank, &call)| {
                    let (missing, place) = (missing.clone(), named(place, stream, sequence));
                    Wait { rank, missing, call, place }
                }));
            }
        }
        waits.sort_by_key(|wait| wait.rank);
        let waits_for_none = |rank: &usize| !waits.iter().any(|wait| wait.rank == *rank);
        // Calls that differ come first. Of ranks that have not come, the ones that wait for no other are the cause.
        let order = |(one, missing): &(Disagreement<'_>, Vec<usize>)| {
            let begun =
                one.calls.iter().filter_map(|(&rank, call)| Some(dumps.common_us(rank, (*call)?.started_us)));
            let begun = begun.fold(f64::INFINITY, f64::min);
            (!one.differs, !missing.iter().any(waits_for_none), begun)
        };
        unlike.sort_by(|a, b| {
            let (a, b) = (order(a), order(b));
            (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
        });
        let disagreement = unlike.into_iter().next().map(|(disagreement, _)| disagreement);
        let circle = circle(&waits);
        let last_common = last_common(dumps, &streams);
        Findings { dumps, disagreement, waits, circle, last_common }
    }

    /// The findings as text, for a terminal.
    pub fn text(&self) -> String {
        let dumps = self.dumps;
        let mut text = String::new();
        let mut line = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        line(format!("{} of {} ranks have dumps", dumps.by_rank.len(), dumps.ranks));
        let causes: BTreeMap<&str, Vec<usize>> =
            dumps.by_rank.iter().fold(BTreeMap::new(), |mut causes, (&rank, dump)| {
                causes.entry(&dump.head.cause[..]).or_default().push(rank);
                causes
            });
        for (cause, ranks) in causes {
            line(format!("  {}: {}", name_ranks(&ranks), clean(cause.as_bytes())));
        }
        for complaint in &dumps.complaints {
            line(format!("  {}", clean(complaint.as_bytes())));
        }
        let missing = dumps.missing();
        if !missing.is_empty() {
            line(format!("no dump: {}", name_ranks(&missing)));
        }
        match &self.last_common {
            Some((place, last)) => line(format!("last common call: {place}: {}", last.with_site())),
            None => line("last common call: none".into()),
        }
        match &self.disagreement {
            None => line("first disagreement: none".into()),
            Some(Disagreement { place, calls, differs }) => {
                let what =
                    if *differs { "the ranks call different things" } else { "not all ranks have come" };
                line(format!("first disagreement: {place}: {what}"));
                for (rank, call) in calls {
                    line(format!(
                        "  rank {rank}: {}",
                        call.map_or_else(|| self.instead(*rank), |call| self.state(*rank, call))
                    ));
                }
            }
        }
        line(format!("who waits for whom:{}", if self.waits.is_empty() { " no rank waits" } else { "" }));
        for Wait { rank, missing, call, place } in &self.waits {
            line(format!("  rank {rank} -> {}: {}, {place}", name_ranks(missing), call.name()));
        }
        if !self.circle.is_empty() {
            let ranks: Vec<String> =
                self.circle.iter().chain(&self.circle[..1]).map(usize::to_string).collect();
            line(format!("  a deadlock: {}", ranks.join(" -> ")));
        }
        for rank in self.idle() {
            line(format!("  rank {rank} waits for none: {}", self.instead(rank)));
        }
        text
    }

    /// The ranks that others wait for and that wait for none, as far as they have dumps.
    fn idle(&self) -> BTreeSet<usize> {
        let wanted = self.waits.iter().flat_map(|wait| wait.missing.iter().copied());
        let has_dump = |rank: &usize| self.dumps.by_rank.contains_key(rank);
        wanted.filter(|rank| has_dump(rank) && !self.waits.iter().any(|wait| wait.rank == *rank)).collect()
    }

    /// What a rank did in place of the call that others wait for.
    fn instead(&self, rank: usize) -> String {
        let Some(dump) = self.dumps.by_rank.get(&rank) else {
            return "has no dump: it is gone, stopped, or on a machine whose folder is not here".into();
        };
        let waited = self.waits.iter().find(|wait| wait.rank == rank);
        let under_way = dump.entries.iter().rev().find(|entry| entry.ended_us.is_none());
        let doing = match (waited, under_way) {
            (Some(wait), _) => format!("has not come; {}", self.state(rank, wait.call)),
            (None, Some(entry)) => format!("has not come; {}", self.state(rank, entry)),
            (None, None) => "has not come, and has no operation under way".into(),
        };
        let last = dump.entries.iter().filter(|entry| entry.ended_us.is_some());
        let last = last.max_by(|a, b| a.ended_us.unwrap_or(0.0).total_cmp(&b.ended_us.unwrap_or(0.0)));
        let ago = |entry: &Entry| (dump.head.written_us - entry.ended_us.unwrap_or(0.0)) / 1e6;
        let last = last.map(|entry| {
            format!("; its last was {}, ended {:.3} s before the dump", entry.with_site(), ago(entry))
        });
        doing + &last.unwrap_or_default()
    }

    /// An operation of a rank, and how far it is.
    fn state(&self, rank: usize, entry: &Entry) -> String {
        let now = self.dumps.by_rank.get(&rank).map_or(0.0, |dump| dump.head.written_us);
        let since = (now - entry.started_us) / 1e6;
        let state = match (entry.ended_us, &entry.error) {
            (_, Some(error)) => format!("failed: {}", clean(error.as_bytes())),
            (Some(_), None) => "ended".into(),
            (None, None) => format!("under way for {since:.3} s"),
        };
        format!("{}, {state}", entry.with_site())
    }
}

impl Stream<'_> {
    /// The members that have not come to a call.
    fn missing(&self, sequence: u64) -> Vec<usize> {
        let has_come = |rank: &usize| self.calls.range(sequence..).any(|(_, calls)| calls.contains_key(rank));
        self.members.iter().copied().filter(|rank| !has_come(rank)).collect()
    }
}

/// Whether the calls at one place differ. `numbers` are the ranks' numbers in their group.
fn differ(calls: &BTreeMap<usize, &Entry>, numbers: &HashMap<usize, usize>) -> bool {
    let number = |rank: &usize| numbers.get(rank).copied().unwrap_or(0);
    let mut ones = calls.iter();
    while let Some((a, call)) = ones.next() {
        if ones.clone().any(|(b, other)| !call.agrees(number(a), other, number(b))) {
            return true;
        }
        // Equality is transitive; only the counts of an all-to-all have to be compared between all pairs.
        if call.kind != "all_to_all" {
            break;
        }
    }
    false
}

/// `call 3 of ranks [0, 1]`.
fn named((_, pair): &Place, stream: &Stream<'_>, sequence: u64) -> String {
    match pair {
        Some((from, to)) => format!("message {sequence} from rank {from} to rank {to}"),
        None => format!("call {sequence} of ranks {:?}", stream.members),
    }
}

/// The first circle of ranks that wait for each other.
fn circle(waits: &[Wait<'_>]) -> Vec<usize> {
    let mut after: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    waits.iter().for_each(|wait| after.entry(wait.rank).or_default().extend(&wait.missing));
    let mut done = BTreeSet::new();
    for &start in after.keys() {
        // The ranks on the way from `start`, each with the number of its followers that were tried.
        let mut way: Vec<(usize, usize)> = vec![(start, 0)];
        while let Some((rank, tried)) = way.last_mut() {
            let next = after.get(rank).and_then(|followers| followers.get(*tried)).copied();
            *tried += 1;
            let Some(next) = next else {
                done.insert(*rank);
                way.pop();
                continue;
            };
            if let Some(at) = way.iter().position(|(rank, _)| *rank == next) {
                return way[at..].iter().map(|(rank, _)| *rank).collect();
            }
            if !done.contains(&next) {
                way.push((next, 0));
            }
        }
    }
    Vec::new()
}

/// The last call that all members of its group completed which have a dump, of the largest such group.
fn last_common<'a>(dumps: &Dumps, streams: &BTreeMap<Place, Stream<'a>>) -> Option<(String, &'a Entry)> {
    let mut best: Option<(usize, f64, String, &Entry)> = None;
    for (place, stream) in streams {
        let dumped = stream.members.iter().filter(|rank| dumps.by_rank.contains_key(rank)).count();
        for (&sequence, calls) in stream.calls.iter().filter(|(_, calls)| calls.len() == dumped) {
            let done = |entry: &&Entry| entry.error.is_none().then_some(entry.ended_us).flatten();
            let ends: Option<Vec<f64>> =
                calls.iter().map(|(&rank, entry)| Some(dumps.common_us(rank, done(entry)?))).collect();
            let (Some(ends), Some(&entry)) = (ends, calls.values().next()) else { continue };
            let end = ends.into_iter().fold(f64::NEG_INFINITY, f64::max);
            if best.as_ref().is_none_or(|(size, at, ..)| (calls.len(), end) > (*size, *at)) {
                best = Some((calls.len(), end, named(place, stream, sequence), entry));
            }
        }
    }
    best.map(|(.., place, entry)| (place, entry))
}

impl Entry {
    /// Whether a thread waits for it.
    fn is_waited(&self) -> bool {
        self.ended_us.is_none() && self.waited_us.is_some()
    }

    /// The operation as in messages: `all_reduce(sum) of 64 f32 [8, 8]`, `forward of micro-batch 3 at stage 1`.
    pub fn name(&self) -> String {
        let mut name = clean(self.kind.as_bytes());
        if let (Some(stage), Some(micro_batch)) = (self.stage, self.micro_batch) {
            let _ = write!(name, " of micro-batch {micro_batch} at stage {stage}");
        }
        if let Some(by) = &self.by {
            let _ = write!(name, "({})", clean(by.as_bytes()));
        }
        if let Some(dtype) = &self.dtype {
            let counts: Vec<String> = self.counts.iter().map(usize::to_string).collect();
            let all_equal = self.counts.iter().all(|count| *count == self.counts[0]);
            let counts = match &counts[..] {
                [one, _, ..] if all_equal => format!("{} x {one}", counts.len()),
                _ => counts.join("+"),
            };
            let _ = write!(name, " of {counts} {}", clean(dtype.as_bytes()));
        }
        if let Some(shape) = self.output.as_ref().or(self.input.as_ref()) {
            let _ = write!(name, " {shape:?}");
        }
        match (&self.kind[..], self.root) {
            ("send" | "reduce" | "gather", Some(root)) => {
                let _ = write!(name, " to rank {root}");
            }
            (_, Some(root)) => {
                let _ = write!(name, " from rank {root}");
            }
            (_, None) => {}
        }
        name
    }

    fn with_site(&self) -> String {
        let step = self.step.map_or_else(String::new, |step| format!(" in step {step}"));
        match self.stage {
            // Every action is noted at one line.
            Some(_) => self.name() + &step,
            None => format!("{}{step} at {}", self.name(), clean(self.site.as_bytes())),
        }
    }
}
