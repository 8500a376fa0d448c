//! [`agree`]: before a run begins, its ranks compare what decides the run's bits, and each learns what differs, between which
//! ranks, and both values. [`same_contents`] compares files and what is in memory in this way.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use phalanx_rendezvous::name_ranks;
use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh64::Xxh64;

use crate::comm::Comm;
use crate::{Error, Result, all_gather_object};

/// What a rank was given, by name, in the order in which differences are reported.
pub type Facts = Vec<(String, String)>;

/// The differences that an error lists.
const DIFFERENCES_MAX: usize = 4;
/// The characters of a value that an error shows.
const VALUE_MAX: usize = 160;

/// Compares facts between all ranks of a group, which all call it.
///
/// # Errors
/// [`Error::Disagreement`] on every rank of the group if they differ; or as [`all_gather_object`].
#[track_caller]
pub fn agree(comm: &Comm, facts: &Facts) -> Result<()> {
    agree_over(&[comm], facts)
}

/// Compares facts between all ranks that are reached by going along one group after another.
fn agree_over(groups: &[&Comm], facts: &Facts) -> Result<()> {
    let Some(why) = differences(&gather_over(groups, facts)?) else { return Ok(()) };
    // The first rank that fails ends the run of all. It waits here until every rank has compared, so that each has the error itself.
    for comm in groups {
        let _ = comm.barrier();
    }
    Err(Error::Disagreement(why))
}

/// The values of all ranks, with the ranks' numbers in the whole run.
fn gather_over<T: Serialize + DeserializeOwned + Clone>(
    groups: &[&Comm],
    own: &T,
) -> Result<Vec<(usize, T)>> {
    let rank = groups.first().map_or(0, |comm| comm.ranks()[comm.rank()]);
    let mut all = vec![(rank, own.clone())];
    for comm in groups.iter().filter(|comm| comm.has_peers()) {
        all = all_gather_object(comm, &all)?.concat();
    }
    all.sort_by_key(|(rank, _)| *rank);
    Ok(all)
}

/// What differs, as text; none if all facts are equal.
fn differences(all: &[(usize, Facts)]) -> Option<String> {
    let mut names: Vec<&str> = Vec::new();
    for name in all.iter().flat_map(|(_, facts)| facts).map(|(name, _)| &name[..]) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let found: Vec<String> = names.into_iter().filter_map(|name| difference(name, all)).collect();
    let (first, more) = (found.iter().take(DIFFERENCES_MAX), found.len().saturating_sub(DIFFERENCES_MAX));
    let listed = first.cloned().collect::<Vec<_>>().join("; ");
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    (!found.is_empty()).then(|| format!("the ranks were given different things: {listed}{more}"))
}

/// The values of one fact and the ranks that have each, as text; none if there is only one value.
fn difference(name: &str, all: &[(usize, Facts)]) -> Option<String> {
    let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, facts) in all {
        let value = facts.iter().find(|(other, _)| other == name).map_or("nothing", |(_, value)| value);
        match values.iter_mut().find(|(other, _)| *other == value) {
            Some((_, ranks)) => ranks.push(*rank),
            None => values.push((value, vec![*rank])),
        }
    }
    let [(first, _), others @ ..] = &values[..] else { return None };
    let same = |other: &str| first.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    let from = others.iter().map(|(other, _)| same(other)).min()?;
    let shown = values.iter().take(DIFFERENCES_MAX);
    let shown: Vec<String> =
        shown.map(|(v, ranks)| format!("{} on {}", excerpt(v, from), name_ranks(ranks))).collect();
    Some(format!("{name} is {}", shown.join(", and ")))
}

/// A value that is not too long, or the part of it around the first difference.
fn excerpt(value: &str, from: usize) -> String {
    if value.chars().count() <= VALUE_MAX {
        return value.into();
    }
    let begin = from.saturating_sub(VALUE_MAX / 2);
    let part: String = value.chars().skip(begin).take(VALUE_MAX).collect();
    format!("..{part}..")
}

/// A part of what a rank was given.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// The digest of what is in memory.
    Digest(u64),
    /// A file.
    File(PathBuf),
}

/// Compares contents between all ranks of a group, which all call it: `what` is their name in the error. Files that all ranks have at the
/// same place of the same machine, by device and number, are not read; otherwise each rank reads all of its files once.
///
/// # Errors
/// [`Error::Disagreement`] on every rank if they differ; or if a file cannot be read.
pub fn same_contents(comm: &Comm, what: &str, contents: &[Content]) -> Result<()> {
    same_contents_over(&[comm], what, contents)
}

fn same_contents_over(groups: &[&Comm], what: &str, contents: &[Content]) -> Result<()> {
    let places: Vec<Option<String>> = contents
        .iter()
        .map(|content| match content {
            Content::Digest(digest) => Some(format!("{digest:016x}")),
            Content::File(path) => place(path),
        })
        .collect();
    let all = gather_over(groups, &places)?;
    let is_alone = all.len() == 1;
    if is_alone || all.iter().all(|(_, other)| other.iter().all(Option::is_some) && *other == places) {
        return Ok(());
    }
    let (mut files, mut in_memory) = (Vec::new(), Xxh64::new(0));
    for content in contents {
        match content {
            Content::Digest(digest) => in_memory.update(&digest.to_le_bytes()),
            Content::File(path) => files.push(path.clone()),
        }
    }
    let named = |e: io::Error| Error::Config(format!("{what}: {e}"));
    let (digest, bytes) = digest_of(&files).map_err(named)?;
    let value = match (files.len(), contents.len() - files.len()) {
        (0, _) => format!("{:016x}", in_memory.digest()),
        (count, 0) => format!("{digest:016x} (XXH64 of {count} files, {bytes} bytes)"),
        (count, _) => {
            format!("{:016x} with {digest:016x} (XXH64 of {count} files, {bytes} bytes)", in_memory.digest())
        }
    };
    agree_over(groups, &vec![(what.into(), value)])
}

/// Compares the safetensors of the folder that each rank was given.
///
/// # Errors
/// As [`same_contents`].
pub(crate) fn same_weights(groups: &[&Comm], folder: &Path) -> Result<()> {
    let failed = |e: io::Error| Error::Config(format!("{}: {e}", folder.display()));
    let files: Vec<Content> = weight_files(folder).map_err(failed)?.into_iter().map(Content::File).collect();
    same_contents_over(groups, "the digest of the initial weights", &files)
}

fn weight_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    let is_one = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors") && path.is_file();
    let mut files: Vec<PathBuf> = entries.into_iter().filter(is_one).collect();
    files.sort();
    Ok(files)
}

/// Which file of which machine it is, and when it was written; none where the system does not tell.
#[cfg(unix)]
fn place(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let (machine, file) =
        (fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?, fs::metadata(path).ok()?);
    let (device, number, size) = (file.dev(), file.ino(), file.len());
    Some(format!("{} {device} {number} {size} {} {}", machine.trim(), file.mtime(), file.mtime_nsec()))
}

#[cfg(not(unix))]
fn place(_: &Path) -> Option<String> {
    None
}

/// Bytes of a file that a thread reads.
const PIECE: u64 = 1 << 26;

/// A digest of files, and how many bytes they have: XXH64 with seed 0 of the digests of their pieces of 64 MiB, which all cores read. It
/// finds differences, not forgery.
///
/// # Errors
/// If a file cannot be read.
pub fn digest_of(files: &[PathBuf]) -> io::Result<(u64, u64)> {
    let mut pieces = Vec::new();
    for path in files {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let bytes = fs::metadata(path).map_err(named)?.len();
        pieces.extend((0..bytes.max(1)).step_by(PIECE as usize).map(|at| (path, at)));
    }
    let digest = |(path, at): &(&PathBuf, u64)| {
        let mut file = File::open(path)?;
        file.seek(io::SeekFrom::Start(*at))?;
        let (mut file, mut hash, mut buffer, mut bytes) =
            (file.take(PIECE), Xxh64::new(0), vec![0; 1 << 20], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok((hash.digest(), bytes)),
                n => {
                    hash.update(&buffer[..n]);
                    bytes += n as u64;
                }
            }
        }
    };
    let all: io::Result<Vec<(u64, u64)>> = pieces.par_iter().map(digest).collect();
    let (mut hash, mut bytes) = (Xxh64::new(0), 0);
    for (digest, of_piece) in all? {
        hash.update(&digest.to_le_bytes());
        bytes += of_piece;
    }
    Ok((hash.digest(), bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::launch;

    fn facts(facts: &[(&str, &str)]) -> Facts {
        facts.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    /// What each rank hears.
    fn heard(ranks: usize, f: impl Fn(&Comm) -> Result<()> + Sync) -> Vec<String> {
        let said = Mutex::new(vec![String::new(); ranks]);
        let _ = launch::threads(ranks, |rank| {
            let outcome = f(rank.comm());
            said.lock().unwrap()[rank.rank()] =
                outcome.as_ref().map_or_else(Error::to_string, |()| "ok".into());
            outcome
        });
        said.into_inner().unwrap()
    }

    #[test]
    fn every_rank_learns_what_differs_with_both_values() {
        let given = |rank: usize| match rank {
            1 => facts(&[("`lr`", "0.01"), ("`seed`", "1")]),
            2 => facts(&[("`lr`", "0.001")]),
            _ => facts(&[("`lr`", "0.001"), ("`seed`", "1")]),
        };
        let wanted = "the ranks were given different things: `lr` is 0.001 on ranks 0, 2, and 0.01 on rank 1; \
                      `seed` is 1 on ranks 0, 1, and nothing on rank 2";
        assert_eq!(heard(3, |comm| agree(comm, &given(comm.rank()))), [wanted; 3]);
        assert_eq!(heard(3, |comm| agree(comm, &given(0))), ["ok"; 3]);
    }

    #[test]
    fn long_values_are_shown_where_they_differ() {
        let long = |end: &str| format!("{}{end}", "x".repeat(1000));
        let value = |rank: usize| long(if rank == 0 { "left" } else { "right" });
        for said in heard(2, |comm| agree(comm, &facts(&[("`a`", &value(comm.rank()))]))) {
            assert!(said.contains("xleft..") && said.contains("xright..") && said.len() < 400, "{said}");
        }
    }

    #[test]
    fn weights_are_compared_by_their_bytes() {
        let root = std::env::temp_dir().join(format!("phalanx-same-weights-{}", std::process::id()));
        let folder = |name: &str, bytes: &[u8]| {
            let folder = root.join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("model.safetensors"), bytes).unwrap();
            folder
        };
        let [a, copy, other] =
            [folder("a", b"weights"), folder("copy", b"weights"), folder("other", b"weighty")];
        for (second, wanted) in [(&a, "ok"), (&copy, "ok"), (&other, "the digest of the initial weights is ")]
        {
            // Along groups of two and two, as of tensor-parallel ranks and of replicas.
            let said = heard(4, |comm| {
                let r = comm.rank();
                let [pair, across] =
                    [[r & 2, (r & 2) + 1], [r & 1, (r & 1) + 2]].map(|ranks| comm.group(&ranks).unwrap());
                same_weights(&[&pair, &across], if r == 3 { second } else { &a })
            });
            assert!(said.iter().all(|said| said.contains(wanted)), "{said:?}");
            assert!(
                wanted == "ok"
                    || said
                        .iter()
                        .all(|said| said.contains("on ranks 0, 1, 2") && said.contains("on rank 3")),
                "{said:?}"
            );
        }
        fs::remove_dir_all(root).unwrap();
    }
}
