//! [`Dumps`]: the dumps of all ranks of a run, read from a folder, with their clocks aligned. [`Stream`]: the calls of one group, or the
//! messages of one pair of ranks, side by side.

use std::collections::BTreeMap;
use std::path::Path;

use super::dump::{Dump, Entry};
use crate::{Error, Result};

/// A dump is called old if the newest one was written so much later, in microseconds.
const OLD_US: f64 = 10e6;

/// Clocks of two machines are taken to differ by less, in microseconds.
const CLOCKS_US: f64 = 60e6;

/// The dumps of the ranks of a run.
#[derive(Clone, Debug, Default)]
pub struct Dumps {
    /// How many ranks the run has.
    pub ranks: usize,
    /// The dumps by rank.
    pub by_rank: BTreeMap<usize, Dump>,
    /// What is wrong with a file, a line each.
    pub complaints: Vec<String>,
    /// What is added to a rank's times so that they are those of the first rank that has a dump.
    offsets: BTreeMap<usize, f64>,
}

/// The place of calls that belong together: a group's collectives, or the messages from one rank to another.
pub(super) type Place = (String, Option<(usize, usize)>);

/// The calls at one place, by their sequence numbers and ranks.
#[derive(Default)]
pub(super) struct Stream<'a> {
    pub(super) members: Vec<usize>,
    pub(super) calls: BTreeMap<u64, BTreeMap<usize, &'a Entry>>,
}

impl Dumps {
    /// Reads the files `rank-I.jsonl` of a folder. Files that are damaged or of another run are named in `complaints`.
    ///
    /// # Errors
    /// If the folder cannot be read, or has no dump.
    pub fn read(folder: &Path) -> Result<Dumps> {
        let wrong = |why: String| Error::Config(format!("flight: {}: {why}", folder.display()));
        let files = std::fs::read_dir(folder).map_err(|e| wrong(e.to_string()))?.flatten();
        let is_dump = |name: &String| name.starts_with("rank-") && name.ends_with(".jsonl");
        let names = files.map(|file| file.file_name().to_string_lossy().into_owned()).filter(is_dump);
        let (mut names, mut found, mut complaints): (Vec<String>, Vec<Dump>, _) =
            (names.collect(), vec![], vec![]);
        names.sort_by_key(|name| (name.len(), name.clone()));
        for name in names {
            let content = std::fs::read(folder.join(&name)).map_err(|e| e.to_string());
            match content.and_then(|content| Dump::parse(&content)) {
                Ok(dump) => found.push(dump),
                Err(why) => complaints.push(format!("{name} cannot be read: {why}")),
            }
        }
        let newest = found.iter().max_by(|a, b| a.written().total_cmp(&b.written()));
        let Some((ranks, newest, began)) =
            newest.map(|newest| (newest.head.ranks, newest.written(), newest.head.unix_us))
        else {
            let complaints = complaints.iter().map(|complaint| format!("; {complaint}"));
            return Err(wrong(format!("there is no dump of a rank here{}", complaints.collect::<String>())));
        };
        let mut by_rank = BTreeMap::new();
        for dump in found {
            let rank = dump.head.rank;
            if dump.head.ranks != ranks || rank >= ranks {
                complaints.push(format!(
                    "rank {rank}'s dump is of a run of {} ranks, and the newest of one of {ranks}: left out",
                    dump.head.ranks
                ));
                continue;
            }
            if dump.written() < began - CLOCKS_US {
                complaints.push(format!("rank {rank}'s dump was written before the run began: left out"));
                continue;
            }
            if dump.damaged > 0 {
                complaints.push(format!("rank {rank}'s dump has {} damaged lines", dump.damaged));
            }
            if newest - dump.written() > OLD_US {
                let older = (newest - dump.written()) / 1e6;
                complaints.push(format!("rank {rank}'s dump is {older:.0} s older than the newest"));
            }
            by_rank.insert(rank, dump);
        }
        let mut dumps = Dumps { ranks, by_rank, complaints, offsets: BTreeMap::new() };
        dumps.align();
        Ok(dumps)
    }

    /// The ranks that have no dump.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.ranks).filter(|rank| !self.by_rank.contains_key(rank)).collect()
    }

    /// A rank's time on the common clock, in microseconds.
    pub fn common_us(&self, rank: usize, us: f64) -> f64 {
        us + self.offsets.get(&rank).copied().unwrap_or(0.0)
    }

    /// All calls by place.
    pub(super) fn streams(&self) -> BTreeMap<Place, Stream<'_>> {
        let mut streams: BTreeMap<Place, Stream<'_>> = BTreeMap::new();
        for (&rank, dump) in &self.by_rank {
            for entry in &dump.entries {
                let (Some(place), Some(sequence)) = (entry.place(rank), entry.sequence) else { continue };
                let stream = streams.entry(place.clone()).or_default();
                if stream.members.is_empty() {
                    stream.members =
                        place.1.map_or_else(|| entry.members.to_vec(), |(from, to)| vec![from, to]);
                }
                stream.calls.entry(sequence).or_default().insert(rank, entry);
            }
        }
        streams
    }

    /// Finds the offsets of the clocks. The ranks of a collective learn that all have come at nearly one moment, so the median difference
    /// over their common collectives is the difference of their clocks. Ranks without any are aligned by their machines' clocks.
    fn align(&mut self) {
        let mut between: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for ((_, pair), stream) in self.streams() {
            for calls in stream.calls.values().filter(|_| pair.is_none()) {
                let mut times = calls.iter().filter_map(|(&rank, entry)| Some((rank, entry.complete_us?)));
                let Some((a, at)) = times.next() else { continue };
                for (b, bt) in times {
                    between.entry((a, b)).or_default().push(at - bt);
                    between.entry((b, a)).or_default().push(bt - at);
                }
            }
        }
        let unix = |rank: usize| self.by_rank.get(&rank).map_or(0.0, |dump| dump.head.unix_us);
        let Some(&first) = self.by_rank.keys().next() else { return };
        let mut offsets = BTreeMap::from([(first, 0.0)]);
        let mut waiting = vec![first];
        while let Some(known) = waiting.pop() {
            for (&(_, other), differences) in between.range_mut((known, 0)..=(known, usize::MAX)) {
                if !offsets.contains_key(&other) {
                    differences.sort_by(f64::total_cmp);
                    offsets.insert(other, offsets[&known] + differences[differences.len() / 2]);
                    waiting.push(other);
                }
            }
        }
        for &rank in self.by_rank.keys() {
            offsets.entry(rank).or_insert(unix(rank) - unix(first));
        }
        self.offsets = offsets;
    }
}

impl Dump {
    /// When it was written, by its machine's clock.
    pub(super) fn written(&self) -> f64 {
        self.head.unix_us + self.head.written_us
    }
}

impl Entry {
    /// Where a call of `rank` belongs; none of an action, and of a message to itself.
    pub(super) fn place(&self, rank: usize) -> Option<Place> {
        let pair = match (&self.kind[..], self.root) {
            ("send", Some(to)) => Some((rank, to)),
            ("recv", Some(from)) => Some((from, rank)),
            _ => None,
        };
        let is_call = !self.members.is_empty() && pair.is_none_or(|(from, to)| from != to);
        is_call.then(|| (self.group.clone(), pair))
    }

    /// Whether two members of a group, by their numbers in it, that come to one place mean the same.
    pub(super) fn agrees(&self, a: usize, other: &Entry, b: usize) -> bool {
        match (&self.kind[..], &other.kind[..]) {
            ("send", "recv") | ("recv", "send") => {
                (&self.dtype, &self.counts) == (&other.dtype, &other.counts)
            }
            ("all_to_all", "all_to_all") => {
                self.dtype == other.dtype
                    && self.counts.get(b) == other.wanted.get(a)
                    && other.counts.get(a) == self.wanted.get(b)
            }
            (kind, others) => {
                kind == others
                    && (&self.by, &self.dtype, self.root, &self.counts)
                        == (&other.by, &other.dtype, other.root, &other.counts)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight::{Findings, Head, picture};

    fn entry(kind: &str, members: &[usize], sequence: u64, at: f64) -> Entry {
        Entry {
            kind: kind.into(),
            group: format!("{members:?}"),
            members: members.into(),
            sequence: Some(sequence),
            started_us: at,
            complete_us: Some(at + 1.0),
            ended_us: Some(at + 2.0),
            ..Entry::default()
        }
    }

    fn of(ranks: Vec<(f64, Vec<Entry>)>) -> Dumps {
        let dump = |(rank, (unix_us, entries))| {
            let head = Head { rank, ranks: 3, unix_us, written_us: 1e6, ..Head::default() };
            (rank, Dump { head, entries, damaged: 0 })
        };
        let by_rank = ranks.into_iter().enumerate().map(dump).collect();
        let mut dumps = Dumps { ranks: 3, by_rank, ..Dumps::default() };
        dumps.align();
        dumps
    }

    #[test]
    fn clocks_are_aligned_by_common_collectives_also_through_another_rank() {
        let near = |rank: usize, dumps: &Dumps, us: f64, wanted: f64| {
            let got = dumps.common_us(rank, us);
            assert!((got - wanted).abs() < 1e-6, "rank {rank}: {got}");
        };
        // The clocks of the machines are wrong; rank 2 has no collective in common with rank 0. One of rank 1's times is far off.
        let first = (0..5).map(|i| entry("barrier", &[0, 1], i, 100.0 * i as f64)).collect();
        let late = |i: u64| if i == 3 { 900.0 } else { 0.0 };
        let second = (0..5).map(|i| entry("barrier", &[0, 1], i, 100.0 * i as f64 + 7000.0 + late(i)));
        let second = second.chain([entry("barrier", &[1, 2], 0, 7600.0)]).collect();
        let third = vec![entry("barrier", &[1, 2], 0, 50.0)];
        let dumps = of(vec![(0.0, first), (3e9, second), (5e9, third)]);
        near(0, &dumps, 10.0, 10.0);
        near(1, &dumps, 7010.0, 10.0);
        near(2, &dumps, 50.0, 600.0);
        // Without any collective the machines' clocks count.
        let dumps = of(vec![(1e6, vec![]), (3e6, vec![])]);
        near(1, &dumps, 10.0, 2e6 + 10.0);
    }

    #[test]
    fn text_from_a_dump_is_escaped() {
        let nasty =
            Entry { site: "<script>\x1b[2J".into(), ended_us: None, ..entry("barrier", &[0, 1], 0, 0.0) };
        let dumps = of(vec![(0.0, vec![nasty]), (0.0, vec![])]);
        let findings = Findings::of(&dumps);
        let (text, svg) = (findings.text(), picture(&findings, &dumps));
        assert!(!text.contains('\x1b') && !svg.contains('\x1b') && !svg.contains("<script>"), "{text}{svg}");
        assert!(svg.contains("&lt;script&gt;") && text.contains("no dump: rank 2"), "{text}");
    }
}
